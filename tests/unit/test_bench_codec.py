"""`kvass bench codec`: what its figures at the top say, the line of the baselines, and what it codes."""

import math

import ml_dtypes
import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from kvass.bench.baselines.base import Coded
from kvass.bench.codec import flat, row
from kvass.bench.codec_coders import _coder, our_codecs
from kvass.bench.codec_pareto import Point, bits_at, compared, dominates, height_at, hull
from kvass.bench.codec_plot import on_the_line, write_png
from kvass.bench.codec_speed import INTO, pieces, speeds
from kvass.cli import app
from kvass.codecs.registry import codec
from kvass.codecs.tables import Tables, rope_arrays, write_tables
from kvass.errors import InputError, ModelFilesError
from kvass.quality import Measured
from kvass.spec import KVSpec, LayerGroup

BF16 = np.dtype(ml_dtypes.bfloat16)
SPEC = KVSpec(
    groups=(
        LayerGroup(
            kind="attention", layers=(0, 1), kv_heads=2, head_dim=32, v_head_dim=32, dtype="bfloat16"
        ),
    )
)  # fmt: skip


def point(bits: float, exponent: float) -> Point:
    return Point(bits, 10.0**exponent)


def measured(name: str, bits: float, kl: float) -> Measured:
    return Measured(
        codec=name, bits=bits, kl_mean=kl, kl_low=kl / 2, kl_high=2 * kl, kl_early=kl, kl_p99=9 * kl,
        top1=0.98, ppl_ratio=1.001, facts_tried=410, facts_lost=2, facts_lost_high=0.015,
    )  # fmt: skip


@pytest.fixture
def tables() -> Tables:
    return Tables.parse(write_tables(rope_arrays(0, 0.5 ** np.arange(16), 1024)))


@pytest.fixture
def kv() -> list[dict[str, np.ndarray]]:
    draw = np.random.default_rng(0)
    shape = SPEC.groups[0].shape("k", 600)
    return [{name: draw.standard_normal(shape).astype(np.float32).astype(BF16) for name in ("k", "v")}]


# -- the line -----------------------------------------------------------------------------------------

LINE = [point(2, 0), point(3, -2), point(5, -3)]


def test_the_hull_leaves_out_what_lies_above_it_or_does_not_descend() -> None:
    above = [point(2.5, -0.5), point(4, -2.4), point(2, 0.3), point(3, -1.9), point(8, -2.9), point(9, -3)]
    assert hull([*above, *LINE]) == LINE
    assert hull([*reversed(LINE), *above]) == LINE
    assert hull([]) == []


def test_a_point_under_a_corner_takes_the_corner_away() -> None:
    assert hull([*LINE, point(2.9, -2.9)]) == [point(2, 0), point(2.9, -2.9), point(5, -3)]


@pytest.mark.parametrize(
    ("bits", "exponent"),
    [(2, 0), (2.5, -1), (3, -2), (4, -2.5), (5, -3), (1.5, 1), (7, -4)],
)
def test_the_line_is_straight_in_log_kl_and_goes_on_beyond_its_ends(bits: float, exponent: float) -> None:
    assert height_at(LINE, bits) == pytest.approx(exponent * math.log(10))
    assert bits_at(LINE, 10.0**exponent) == pytest.approx(bits)


def test_a_line_of_one_point_is_level_and_needs_no_number_of_bits() -> None:
    assert height_at([point(4, -2)], 1) == height_at([point(4, -2)], 9) == point(4, -2).height
    assert bits_at([point(4, -2)], 0.01) is None and bits_at([], 0.01) is None


def test_a_level_dominates_only_below_the_line() -> None:
    assert dominates([point(2.5, -1.1), point(4, -2.6)], LINE)
    assert not dominates([point(2.5, -1.1), point(4, -2.4)], LINE)  # no point beats it, but a mixture does
    assert not dominates([point(2.5, -1)], LINE)
    assert dominates([point(1, 1.9)], LINE) and not dominates([point(1, 2.1)], LINE)
    assert dominates([point(1, 2)], [])


def test_a_baseline_of_the_same_bits_and_kl_is_not_dominated() -> None:
    assert not dominates([point(3, -2)], [point(3, -2)])
    assert not dominates([point(3, -2)], [point(2.9, -2.1), point(9, -2.2)])


def test_no_kl_at_all_is_below_every_line() -> None:
    assert dominates([Point(10.4, 0.0)], LINE)
    assert math.isfinite(Point(10.4, 0.0).height)


# -- the report ---------------------------------------------------------------------------------------


def test_the_top_of_the_report_has_the_contracts_keys() -> None:
    ours = [measured("lossless", 10.0, 0.0), measured("q2", 2.0, 0.001), measured("q3", 1.5, 0.02)]
    baselines = [measured("a", 2, 1.0), measured("b", 3, 0.01), measured("c", 5, 0.001)]
    found = flat(ours, baselines, 16)
    assert found["lossless_ratio"] == 1.6
    assert (found["q2_bits"], found["q2_kl"], found["q2_facts_lost_high"]) == (2.0, 0.001, 0.015)
    assert found["pareto_dominates"] is True
    assert found["best_baseline_q2_bits"] == 5.0
    assert found["best_baseline_q3_bits"] == pytest.approx(3 - math.log10(2) / 2, abs=1e-4)
    assert "best_baseline_lossless_bits" not in found


def test_nothing_dominates_where_nothing_was_compared() -> None:
    assert flat([measured("int8", 8, 0.001)], [measured("a", 9, 0.1)], 16)["pareto_dominates"] is None
    unasked = msgspec.structs.replace(measured("q2", 2, 0.001), facts_tried=0, facts_lost=0)
    assert flat([unasked], [], 16)["q2_facts_lost_high"] is None
    assert compared({"q1": point(3, -3)}, [])["pareto_dominates"] is None


def test_a_row_keeps_every_figure() -> None:
    found = row(measured("q2", 2.0, 0.001))
    assert set(found) == {
        "bits", "kl", "kl_interval95", "kl_early", "kl_p99", "top1", "ppl_ratio", "facts_tried", "facts_lost",
        "facts_lost_high",
    }  # fmt: skip
    assert found["kl_interval95"] == [0.0005, 0.002]
    assert set(row(measured("a", 2.0, 0.001), ours=False)) == {
        "bits", "kl", "kl_interval95", "kl_p99", "top1", "ppl_ratio"
    }  # fmt: skip


def test_the_picture_is_a_png_and_names_the_baselines_on_the_line(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    baselines = [measured("a", 2, 1.0), measured("above", 2.5, 0.9), measured("b", 3, 0.01)]
    assert [one.codec for one in on_the_line(baselines)] == ["a", "b"]
    write_png(tmp_path / "p.png", [measured("lossless", 10, 0.0)], baselines, "some model")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InputError, match="--plot"):
        write_png(tmp_path / "none" / "p.png", [], baselines, "some model")


@pytest.mark.model
def test_a_model_without_tables_is_to_be_calibrated_first(tmp_path, models_path, monkeypatch) -> None:
    from kvass.engines.transformers.load import find_model

    _, directory = find_model("smollm2-135m", models_path)
    monkeypatch.setenv("KVASS_MODELS_PATH", str(tmp_path))
    found = CliRunner().invoke(app, ["bench", "codec", "--model", str(directory), "--rounds", "0"])
    assert isinstance(found.exception, ModelFilesError)
    assert f"run `kvass calibrate {directory}` first" in str(found.exception)


# -- what is coded ------------------------------------------------------------------------------------


def test_levels_that_the_tables_do_not_hold_are_named_as_missing(tables: Tables) -> None:
    pytest.importorskip("numba")
    made, missing = our_codecs(["lossless", "int8", "q2"], tables)
    assert list(made) == ["lossless", "int8"] and list(missing) == ["q2"]
    with pytest.raises(InputError, match="q9"):
        our_codecs(["q9"], tables)


class _Half:
    """Gives back half of the keys and nothing of the values, for ten bits and a half."""

    def __init__(self, rotated: bool):
        self.rotated = rotated
        self.seen: list[np.ndarray] = []

    def __call__(self, keys, values, group) -> Coded:
        self.seen.append(keys)
        return Coded(keys / 2, np.zeros_like(values), 10.6)


@pytest.mark.parametrize("rotated", [True, False])
def test_a_baseline_sees_keys_before_or_after_rope_as_it_asks(tables: Tables, kv, rotated: bool) -> None:
    half = _Half(rotated)
    read, bits = _coder([half], SPEC, tables)(kv)
    keys = kv[0]["k"].astype(np.float32)
    rope = tables.rope(0)
    assert rope is not None
    wanted = keys if rotated else rope.unrotate(keys, 0)
    assert half.seen[0].dtype == np.float32 and np.array_equal(half.seen[0], wanted)
    assert bits == 11 and read[0]["k"].dtype == read[0]["v"].dtype == BF16
    assert np.allclose(read[0]["k"].astype(np.float32), keys / 2, atol=0.02)
    assert not read[0]["v"].astype(np.float32).any()


def test_speeds_are_of_whole_chunks_and_of_the_codecs_that_there_are(tables: Tables, kv) -> None:
    for package in ("numba", "zstandard", "lz4"):
        pytest.importorskip(package)
    held = pieces(kv, SPEC)
    assert [(piece.chunk.start, piece.chunk.tokens) for piece in held] == [(0, 256), (256, 256)]
    told: list[tuple[int, int]] = []
    codecs = {"int8": codec("int8", tables)}
    found = speeds(codecs, tables, held, 2, lambda done, total: told.append((done, total)))
    assert told[-1] == (16, 16)
    for name in ("int8_decode_vs_floor", "int8_decode_vs_zstd1", "int8_encode_vs_zstd1"):
        assert found[name] > 0
    for name in ("decode_vs_zstd1", "entropy_vs_zstd1", "encode_vs_zstd1"):
        assert found[name] is None
    assert {"floor", INTO, "lz4 decode"} <= found["megabytes_per_second"].keys()
    assert found["speed_setting"]["raw_bytes"] == 512 * SPEC.bytes_per_token
