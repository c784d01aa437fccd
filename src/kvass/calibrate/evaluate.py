"""What a codec does to a model: how far its predictions move on held texts, and which facts it forgets."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvass.calibrate.tasks import FactContext
from kvass.calibrate.texts import Sequenced
from kvass.errors import InputError
from kvass.runner import KV, Branch, ModelRunner

Coder = Callable[[KV], tuple[KV, int]]
"""KV of a sequence to what is left of it once it was stored and loaded, and the bits that were stored."""

Progress = Callable[[int, int], None]
"""Called with steps done and steps in all."""

_Floats = npt.NDArray[np.float32]


@dataclass
class Losses:
    """What one codec was seen to lose. Per text: `kl` and `agree` `[n]` for its n continued tokens (KL in
    nats from the exact model's prediction; whether both find the same token likeliest), the mean of what the
    negative log-likelihood rose by, and where the codec has a guard, `early`: the mean KL of as many tokens
    behind the middle of the text, where a prompt leaves it. Per context: how many facts the exact model
    completes, and how many of those are lost. `bits` stored for `elements` of K and V, over the texts."""

    bits: int = 0
    elements: int = 0
    kl: list[npt.NDArray[np.float64]] = field(default_factory=list)
    agree: list[npt.NDArray[np.bool_]] = field(default_factory=list)
    rise: list[float] = field(default_factory=list)
    early: list[float] = field(default_factory=list)
    tried: list[int] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)


class _Reference(NamedTuple):
    """The exact model's predictions for a continuation."""

    log: _Floats
    probabilities: _Floats
    choices: npt.NDArray[np.intp]
    wanted: npt.NDArray[np.int64]


def evaluate(
    runner: ModelRunner, coders: Mapping[str, Coder], texts: Sequence[Sequenced],
    facts: Sequence[FactContext], progress: Progress = lambda done, total: None,
    guards: Mapping[str, int] | None = None,
) -> dict[str, Losses]:  # fmt: skip
    """Run every coder over the same exact KV of each text and context; each is read by the model once.

    A coder that gives back the same bits is not run through the model: it lost nothing. `guards`: of the
    coders that mind where a sequence ends, how many tokens are computed again where a prompt ends earlier.
    Raises InputError without texts, and what a coder raises.
    """
    guards = guards or {}
    if not texts:
        raise InputError("there are no held texts to measure on")
    found = {name: Losses() for name in coders}
    done, total = 0, (len(texts) + len(facts)) * (1 + len(coders))

    def step() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    for text in texts:
        kv = runner.prefill(text.read)
        reference = _reference(runner.continue_over(kv, text.continued), text.continued)
        early = _reference(_early(runner, kv, text, 0), text.continued) if guards else None
        step()
        for name, coder in coders.items():
            decoded = _on_text(found[name], runner, coder, kv, text, reference)
            if early is not None and name in guards:
                other = _early(runner, decoded, text, guards[name])
                found[name].early.append(float(_divergences(early.probabilities, early.log, other).mean()))
            step()
    for context in facts:
        kv = runner.prefill(context.tokens)
        known = _completed(runner, kv, context.branches)
        branches = [branch for branch, one in zip(context.branches, known, strict=True) if one]
        step()
        for name, coder in coders.items():
            _on_facts(found[name], runner, coder, kv, branches)
            step()
    return found


def _on_text(
    losses: Losses, runner: ModelRunner, coder: Coder, kv: KV, text: Sequenced, reference: _Reference
) -> KV:
    """What the coder left."""
    decoded, bits = coder(kv)
    losses.bits += bits
    losses.elements += sum(array.size for arrays in kv for array in arrays.values())
    other = reference.log if _same_bits(kv, decoded) else runner.continue_over(decoded, text.continued)
    losses.kl.append(_divergences(reference.probabilities, reference.log, other))
    losses.agree.append(other.argmax(1) == reference.choices)
    rows = np.arange(len(reference.wanted))
    rise = reference.log[rows, reference.wanted] - other[rows, reference.wanted]
    losses.rise.append(float(rise.astype(np.float64).mean()))
    return decoded


def _early(runner: ModelRunner, kv: KV, text: Sequenced, guard: int) -> _Floats:
    """Predictions for the tokens behind the middle of a text, of which the `guard` last before are computed
    again."""
    middle, count = len(text.read) // 2, len(text.continued)
    kept = middle - min(guard, middle - 1)
    cut = [{name: np.ascontiguousarray(array[:, :kept]) for name, array in arrays.items()} for arrays in kv]
    return runner.continue_over(cut, text.read[kept : middle + count])[-count:]


def _divergences(probabilities: _Floats, log: _Floats, other: _Floats) -> npt.NDArray[np.float64]:
    """KL of each prediction. Rounding alone can take one below zero."""
    apart = np.einsum("nv,nv->n", probabilities, log - other).astype(np.float64)
    return np.asarray(np.maximum(apart, 0.0))


def _on_facts(losses: Losses, runner: ModelRunner, coder: Coder, kv: KV, branches: Sequence[Branch]) -> None:
    losses.tried.append(len(branches))
    if not branches:
        losses.lost.append(0)
        return
    decoded, _ = coder(kv)
    kept = len(branches) if _same_bits(kv, decoded) else sum(_completed(runner, decoded, branches))
    losses.lost.append(len(branches) - kept)


def _reference(log: _Floats, continued: Sequence[int]) -> _Reference:
    """The last prediction is of a token that is not there: it counts for KL, not for likelihood."""
    return _Reference(log, np.exp(log), log.argmax(1), np.asarray(continued[1:], np.int64))


def _completed(runner: ModelRunner, kv: KV, branches: Sequence[Branch]) -> list[bool]:
    chosen = runner.choose_over(kv, branches)
    return [bool(np.array_equal(one, branch.answer)) for one, branch in zip(chosen, branches, strict=True)]


def _same_bits(one: KV, other: KV) -> bool:
    return all(
        np.array_equal(arrays[name].view(np.uint8), there[name].view(np.uint8))
        for arrays, there in zip(one, other, strict=True)
        for name in arrays
    )
