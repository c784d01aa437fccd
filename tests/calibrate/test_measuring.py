"""What a codec costs, measured: nothing for a lossless one, more for more noise, in the bytes of objects."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from drawing import tokens

from kvass.calibrate import certify
from kvass.calibrate.certify import as_stored, guarded, measure
from kvass.calibrate.evaluate import evaluate
from kvass.calibrate.tasks import FactContext
from kvass.calibrate.texts import Sequenced
from kvass.codecs.base import Chunk
from kvass.codecs.raw import Raw
from kvass.container import ALIGNMENT
from kvass.engines.transformers.runner import TransformersRunner
from kvass.errors import InputError
from kvass.keys import Namespace
from kvass.runner import KV, Branch


def _noisy(scale: float):
    def coder(kv: KV) -> tuple[KV, int]:
        draw = np.random.default_rng(0)
        made = [
            {
                name: (array.astype(np.float32) * (1 + scale * draw.standard_normal(array.shape))).astype(
                    ml_dtypes.bfloat16
                )
                for name, array in arrays.items()
            }
            for arrays in kv
        ]
        return made, 8 * sum(array.size for arrays in kv for array in arrays.values())

    return coder


def _texts(count: int) -> list[Sequenced]:
    return [Sequenced(f"t{seed}", "none", tokens(seed, 200), tokens(seed + 50, 30)) for seed in range(count)]


def _facts(runner: TransformersRunner, count: int) -> list[FactContext]:
    """Branches whose answers are what the model says, and one that it never says."""
    made = []
    for seed in range(count):
        read = tokens(seed + 200, 150)
        kv, branches = runner.prefill(read), []
        for number in range(5):
            prompt, answer = tokens(1000 + 10 * seed + number, 4), []
            for _ in range(3):
                answer.append(int(runner.choose_over(kv, [Branch([*prompt, *answer], [0])])[0][0]))
            branches.append(Branch(prompt, answer))
        wrong = [(branches[0].answer[0] + 1) % 160]
        made.append(FactContext(read, [], [*branches, Branch(branches[0].prompt, wrong)]))
    return made


def test_noise_costs_and_bits_kept_cost_nothing(runner: TransformersRunner) -> None:
    codecs = {"same": lambda kv: (kv, 800), "little": _noisy(0.003), "much": _noisy(1.0)}
    same, little, much = measure(runner, codecs, _texts(3), _facts(runner, 3))
    assert (same.kl_mean, same.kl_high, same.kl_p99, same.top1, same.ppl_ratio) == (0, 0, 0, 1, 1)
    assert 0 < little.kl_mean < 0.1 * much.kl_mean
    assert little.kl_low <= little.kl_mean <= little.kl_high <= little.kl_p99
    assert much.top1 < little.top1 <= 1
    assert same.facts_tried == little.facts_tried == much.facts_tried == 15  # not the one it does not know
    assert same.facts_lost == 0 < much.facts_lost
    assert much.facts_lost / 15 <= much.facts_lost_high <= 1
    assert little.bits == 8.0


def test_kl_is_of_the_predictions_over_what_was_decoded(runner: TransformersRunner) -> None:
    """By hand, from the model's own log-probabilities; and likelihood is of the tokens that come next."""
    text = _texts(1)[0]
    kv = runner.prefill(text.read)
    exact = runner.continue_over(kv, text.continued).astype(np.float64)
    other = runner.continue_over(_noisy(0.3)(kv)[0], text.continued).astype(np.float64)
    found = evaluate(runner, {"noisy": _noisy(0.3)}, [text], [])["noisy"]
    np.testing.assert_allclose(found.kl[0], (np.exp(exact) * (exact - other)).sum(1), rtol=1e-3, atol=1e-5)
    rows = range(len(text.continued) - 1)
    rise = np.mean(
        [exact[row, text.continued[row + 1]] - other[row, text.continued[row + 1]] for row in rows]
    )
    assert found.rise[0] == pytest.approx(rise, abs=1e-5)


def test_a_prompt_that_leaves_a_text_early_has_its_last_tokens_computed_again(
    runner: TransformersRunner,
) -> None:
    """What is far from the middle may be as coarse as it likes: it is behind it, or far before it."""
    text = _texts(1)[0]

    def coarse(first: int, last: int):
        def coder(kv: KV) -> tuple[KV, int]:
            made = [{name: array.copy() for name, array in arrays.items()} for arrays in kv]
            for arrays in made:
                for array in arrays.values():
                    array[:, first:last] = 0
            return made, 1

        return coder

    coders = {"again": coarse(80, 200), "before": coarse(0, 80), "none": coarse(80, 200)}
    found = evaluate(runner, coders, [text], [], guards={"again": 20, "before": 20})
    assert found["again"].early == [pytest.approx(0, abs=1e-4)]  # computed, and not rounded for a store
    assert found["before"].early[0] > 1e-3
    assert found["none"].early == []
    assert all(one.kl[0].mean() > 1e-3 for one in found.values())
    short = evaluate(runner, {"again": coarse(80, 200)}, [text], [], guards={"again": 19})["again"]
    assert short.early[0] > 4e-4


def test_what_minds_an_end_is_measured_with_the_guard_of_the_cache(
    runner: TransformersRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, int] = {}

    def noted(*given: Any) -> dict[str, Any]:
        seen.update(given[-1])
        return {}

    monkeypatch.setattr(certify, "evaluate", noted)
    minding = _Recording()
    minding.end_aware = True
    codecs = {"minding": minding, "raw": Raw()}
    coders = {name: as_stored(one, _namespace(runner)) for name, one in codecs.items()}
    measure(runner, coders, _texts(1), [], guards=guarded(codecs))
    assert seen == {"minding": 256}


def test_progress_reaches_its_end(runner: TransformersRunner) -> None:
    seen: list[tuple[int, int]] = []
    codecs = {"one": lambda kv: (kv, 1), "two": _noisy(0.1)}
    evaluate(runner, codecs, _texts(2), _facts(runner, 1), lambda done, total: seen.append((done, total)))
    assert seen == [(number, 9) for number in range(1, 10)]


def test_no_texts_are_refused(runner: TransformersRunner) -> None:
    with pytest.raises(InputError, match="no held texts"):
        measure(runner, {}, [], [])


class _Recording(Raw):
    """Raw, that notes its chunks, and takes one bit from every value."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []

    def encode(self, arrays: Any, chunk: Chunk) -> dict[str, Any]:
        self.chunks.append(chunk)
        assert all(array.shape[1] == chunk.tokens for array in arrays.values())
        return {name: (array.view(np.uint16) & 0xFFFE).view(np.uint8) for name, array in arrays.items()}

    def decode(self, stored: Any, chunk: Chunk) -> dict[str, Any]:
        return {name: array.view(ml_dtypes.bfloat16) for name, array in stored.items()}


def _namespace(runner: TransformersRunner) -> Namespace:
    return Namespace(
        model="tiny", weights="a" * 64, config="b" * 64, adapter="", spec=runner.spec, tenant="", numerics=""
    )


def test_a_sequence_is_coded_chunk_by_chunk_as_objects(runner: TransformersRunner) -> None:
    codec, kv = _Recording(), runner.prefill(tokens(1, 300))
    decoded, bits = as_stored(codec, _namespace(runner), chunk_tokens=128)(kv)
    groups = runner.spec.groups
    assert codec.chunks == [
        Chunk(group, number, start, count)
        for start, count in ((0, 128), (128, 128), (256, 44))
        for number, group in enumerate(groups)
    ]
    payload = sum(array.nbytes for arrays in kv for array in arrays.values())
    headers = bits // 8 - payload
    assert headers % ALIGNMENT == 0 and headers >= 3 * len(groups) * ALIGNMENT
    for arrays, there in zip(kv, decoded, strict=True):
        for name, array in arrays.items():
            assert (there[name].view(np.uint16) == array.view(np.uint16) & 0xFFFE).all()


@pytest.mark.parametrize("aware", [False, True])
def test_each_chunk_is_coded_for_where_the_sequence_ends(
    runner: TransformersRunner, monkeypatch: pytest.MonkeyPatch, aware: bool
) -> None:
    codec, headers = _Recording(), []
    codec.lossless, codec.end_aware = False, aware
    encoded = certify.Encoded
    monkeypatch.setattr(
        certify, "Encoded", lambda header, arrays: headers.append(header) or encoded(header, arrays)
    )
    as_stored(codec, _namespace(runner), chunk_tokens=128)(runner.prefill(tokens(1, 300)))
    groups = runner.spec.groups
    wanted = [behind if one.window is None else 0 for behind in (172, 44, 0) for one in groups]
    assert [chunk.behind for chunk in codec.chunks] == (wanted if aware else [0] * len(wanted))
    assert [header.provenance.behind for header in headers] == [chunk.behind for chunk in codec.chunks]


def test_raw_loses_nothing_and_stores_its_headers(runner: TransformersRunner) -> None:
    found = measure(runner, {"raw": as_stored(Raw(), _namespace(runner))}, _texts(1), [])[0]
    assert found.kl_high == 0 and 16 < found.bits < 32
    assert found.facts_tried == 0 and found.facts_lost_high == 1.0
