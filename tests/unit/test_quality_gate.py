"""The gate: a lossy codec is used only where a certificate of this very model and these tables covers it."""

import json

import msgspec
import pytest

from fixtures.coders import LOSSY, calibrate, measured, tables
from fixtures.world import namespace
from kvass.codecs.tables import Tables
from kvass.errors import InputError, ModelFilesError
from kvass.keys import lossy_namespace
from kvass.quality import (
    Budget,
    Gate,
    calibrated_folder,
    certify,
    keep_calibrated,
    read_certificate,
)

SPACE = namespace()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def verdict(path, space=SPACE, codec=LOSSY, **budget):
    return Gate(path).verdict(space, codec, Budget(**budget))


def test_what_is_certified_is_allowed_for_every_namespace_of_the_model(tmp_path) -> None:
    calibrate(tmp_path, SPACE)
    for space in (
        SPACE,
        lossy_namespace(SPACE, LOSSY),
        namespace(tenant="somebody"),
        namespace(numerics="other"),
    ):
        assert verdict(tmp_path, space).allowed, verdict(tmp_path, space).reason
    assert Gate(tmp_path).tables(SPACE).digest == Tables.parse(tables()).digest


def test_without_a_certificate_nothing_is(tmp_path) -> None:
    found = verdict(tmp_path)
    assert (found.allowed, found.kind) == (False, "no certificate")
    assert "kvass calibrate" in found.reason
    keep_calibrated(tmp_path, SPACE, tables(), None)
    assert verdict(tmp_path).kind == "no certificate"
    assert Gate(tmp_path).tables(SPACE) is not None


def test_a_codec_that_was_not_measured_is_refused(tmp_path) -> None:
    calibrate(tmp_path, SPACE)
    assert verdict(tmp_path, codec="q9").kind == "not measured"


@pytest.mark.parametrize(
    ("changes", "kind"),
    [({"kl_mean": 0.0101}, "kl"), ({"kl_early": 0.0101}, "kl"), ({"facts_lost_high": 0.0251}, "facts")],
)
def test_over_the_budget_is_refused_and_a_larger_budget_allows_it(tmp_path, changes, kind: str) -> None:
    calibrate(tmp_path, SPACE, [measured(**changes)])
    found = verdict(tmp_path)
    assert (found.allowed, found.kind) == (False, kind)
    assert "budget" in found.reason or "lossy_max" in found.reason
    assert verdict(tmp_path, kl=0.05, facts_lost=0.05).allowed
    assert Gate(tmp_path).allowed(SPACE) == []


def test_those_allowed_are_named_the_most_faithful_first(tmp_path) -> None:
    results = [measured("q3", kl_mean=0.009), measured("q4", kl_mean=0.05), measured("q1", kl_mean=0.0004)]
    calibrate(tmp_path, SPACE, results)
    assert Gate(tmp_path).allowed(SPACE) == ["q1", "q3"]
    assert Gate(tmp_path).allowed(SPACE, Budget(kl=0.1)) == ["q1", "q3", "q4"]


@pytest.mark.parametrize(
    "other", [namespace(weights="x" * 64), namespace(config="d" * 64), namespace(adapter="a" * 64)]
)
def test_another_models_certificate_is_refused(tmp_path, other) -> None:
    theirs = calibrate(tmp_path, other)
    assert verdict(tmp_path).kind == "no certificate"
    theirs.rename(calibrated_folder(tmp_path, SPACE))  # put where ours belongs
    assert verdict(tmp_path).kind == "other model"
    assert Gate(tmp_path).certificate(SPACE) is None


def test_a_certificate_of_other_tables_is_refused(tmp_path) -> None:
    folder = calibrate(tmp_path, SPACE)
    (folder / "tables.safetensors").write_bytes(tables(mask=1))
    assert verdict(tmp_path).kind == "other tables"
    (folder / "tables.safetensors").unlink()
    assert verdict(tmp_path).kind == "no tables"
    (folder / "tables.safetensors").write_bytes(b"no tables")
    assert verdict(tmp_path).kind == "unreadable"


@pytest.mark.parametrize("field", ["kl_mean", "facts_lost_high", "facts_tried", "bits"])
def test_an_altered_certificate_is_refused(tmp_path, field: str) -> None:
    folder = calibrate(tmp_path, SPACE, [measured(kl_mean=0.5)])
    path = folder / "certificate.json"
    found = json.loads(path.read_text())
    found["measured"][0][field] = 0.0001 if field != "facts_tried" else 9999
    path.write_text(json.dumps(found))
    assert verdict(tmp_path).kind == "unreadable"
    with pytest.raises(ModelFilesError, match="altered"):
        read_certificate(path)


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"format": 1}', "[" * 100_000, "\xff"])
def test_a_damaged_certificate_is_refused(tmp_path, text: str) -> None:
    folder = calibrate(tmp_path, SPACE)
    (folder / "certificate.json").write_bytes(text.encode("latin-1"))
    assert verdict(tmp_path).kind == "unreadable"


def test_another_format_is_refused(tmp_path) -> None:
    folder = calibrate(tmp_path, SPACE)
    found = read_certificate(folder / "certificate.json")
    later = msgspec.structs.replace(found, format=2).sealed()
    (folder / "certificate.json").write_bytes(msgspec.json.encode(later))
    assert verdict(tmp_path).kind == "unreadable"


def test_only_what_belongs_together_is_kept(tmp_path) -> None:
    digest = Tables.parse(tables()).digest
    for wrong in (certify(SPACE, "0" * 64, []), certify(namespace(config="d" * 64), digest, [])):
        with pytest.raises(InputError):
            keep_calibrated(tmp_path, SPACE, tables(), wrong)
    assert not calibrated_folder(tmp_path, SPACE).exists()


def test_files_are_looked_at_again_after_a_while_only(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    gate = Gate(tmp_path, clock=clock)
    assert not gate.verdict(SPACE, LOSSY).allowed
    calibrate(tmp_path, SPACE)
    assert not gate.verdict(SPACE, LOSSY).allowed
    assert gate.tables(SPACE, fresh=True) is not None
    clock.now += 10
    assert gate.verdict(SPACE, LOSSY).allowed
    with monkeypatch.context() as patched:  # nothing that did not change is read twice
        patched.setattr("kvass.quality.gate.read_certificate", lambda path: pytest.fail("read again"))
        for _ in range(5):
            clock.now += 10
            assert gate.verdict(SPACE, LOSSY).allowed
    (calibrated_folder(tmp_path, SPACE) / "certificate.json").unlink()
    clock.now += 10
    assert not gate.verdict(SPACE, LOSSY).allowed


@pytest.mark.parametrize(
    "changes",
    [
        {"kl_mean": -1e9}, {"kl_early": -1.0}, {"bits": -1.0}, {"facts_lost_high": -5.0},
        {"facts_tried": -3, "facts_lost": 7}, {"facts_lost": 401}, {"facts_lost": 400},
        {"facts_tried": 0, "facts_lost": 0, "facts_lost_high": 0.0},
    ],
)  # fmt: skip
def test_a_certificate_that_contradicts_itself_is_refused(tmp_path, changes) -> None:
    calibrate(tmp_path, SPACE, [measured(**changes)])
    found = verdict(tmp_path)
    assert (found.allowed, found.kind) == (False, "unreadable")
    assert "contradicts itself" in found.reason


def test_a_certificate_with_two_figures_for_a_codec_is_refused(tmp_path) -> None:
    calibrate(tmp_path, SPACE, [measured(), measured(kl_mean=9.0)])
    assert verdict(tmp_path).kind == "unreadable"
