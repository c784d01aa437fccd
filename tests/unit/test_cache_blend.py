"""Blended state: for the prompt that it was repaired for, where that is allowed and certified, only."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from fixtures.coders import LOSSY, calibrate, finite, install
from fixtures.world import CHUNK, blank, namespace, prompt
from kvass import metrics
from kvass.cache import KVCache
from kvass.errors import CorruptObjectError, ModelFilesError
from kvass.keys import Namespace, blend_namespace
from kvass.provenance import EXACT, Blended
from kvass.quality import (
    BLENDS_FILE,
    BlendMeasured,
    Budget,
    Gate,
    calibrated_folder,
    certify_blends,
    keep_blends,
)

MB = 1 << 20
SPACE = namespace()
WIDE = Budget(kl=0.1)
MADE = Blended(method="query", chosen=0.14, fraction=0.15)


def row(method: str = "query", chosen: float = 0.136, kl: float = 0.015, lost: float = 0.02) -> BlendMeasured:
    return BlendMeasured(
        method=method, chosen=chosen, fraction=chosen, kl_mean=kl, kl_low=kl, kl_high=kl, top1=0.9,
        facts_tried=150, facts_lost=0, facts_lost_high=lost,
    )  # fmt: skip


ROWS = [row("none", 0.0, 0.05), row(chosen=0.036, kl=0.03), row(), row(chosen=0.286, kl=0.008)]


@pytest.fixture
def models(tmp_path: Path) -> Path:
    keep_blends(tmp_path, SPACE, certify_blends(SPACE, 50, 1.0, ROWS))
    return tmp_path


@pytest.fixture
def cache(make_cache, models):
    return make_cache(16 * MB, 16 * MB, gate=Gate(models))


def store(cache: KVCache, tokens, *, made: Blended | None = MADE, budget: Budget | None = WIDE) -> int:
    space = blend_namespace(SPACE, tokens)
    ticket = cache.store(tokens, space, finite(tokens, SPACE), budget=budget, made=made).wait(30)
    cache.flush(30)
    return ticket.objects


def load(cache: KVCache, tokens, budget: Budget | None = WIDE):
    spaces = [blend_namespace(SPACE, tokens)]
    match = cache.lookup(tokens, SPACE, limit=tokens.size - 1, approximate=spaces, budget=budget)
    pool = blank(SPACE, tokens.size)
    result = cache.load(match, pool)
    wanted = finite(tokens, SPACE)
    for name, array in pool.arrays(0, 0, result.tokens).items():
        assert array.tobytes() == wanted.arrays(0, 0, result.tokens)[name].tobytes()
    return match, result


def test_a_blend_is_found_by_its_prompt_and_by_no_other(cache) -> None:
    tokens = prompt(1, 5 * CHUNK + 7)
    assert store(cache, tokens)
    _, result = load(cache, tokens)
    assert (result.tokens, result.exact_tokens, result.made) == (tokens.size - 1, 0, MADE)
    other = np.append(tokens[:-1], tokens[-1] ^ 1)
    for asked in (tokens[:-1], np.append(tokens, 5).astype(tokens.dtype), other):
        assert load(cache, asked)[1].tokens == 0
    assert cache.lookup(tokens, SPACE).length == 0


def test_two_prompts_that_begin_alike_keep_their_own(cache) -> None:
    """What was repaired for one question is not what another needs; neither takes the other's place."""
    one = prompt(1, 5 * CHUNK)
    two = np.concatenate([one[: 4 * CHUNK], prompt(2, CHUNK)])
    assert store(cache, one) == store(cache, two) == 5
    assert load(cache, one)[1].tokens == load(cache, two)[1].tokens == 5 * CHUNK - 1


def test_exact_chunks_come_first(cache) -> None:
    tokens = prompt(1, 5 * CHUNK)
    cache.store(tokens[: 2 * CHUNK], SPACE, finite(tokens, SPACE)).wait(30)
    store(cache, tokens)
    match, result = load(cache, tokens)
    assert (match.exact, result.tokens, result.exact_tokens) == (2 * CHUNK, 5 * CHUNK - 1, 2 * CHUNK)
    assert match.upon(result.tokens, result.exact_tokens) == blend_namespace(SPACE, tokens)


@pytest.mark.parametrize(
    ("made", "budget", "stored"),
    [
        (MADE, WIDE, True),
        (MADE, None, False),  # the default is tighter than what was measured at that share
        (Blended(method="query", chosen=0.29, fraction=0.3), None, True),
        (Blended(method="query", chosen=0.12, fraction=0.2), Budget(kl=0.02), False),  # counts as 0.036
        (Blended(method="query", chosen=0.02, fraction=0.5), WIDE, False),  # less than ever measured
        (Blended(method="none", chosen=0.0, fraction=0.0), WIDE, False),
        (Blended(method="boundary", chosen=1.0, fraction=1.0), WIDE, False),  # not measured
        (None, WIDE, False),
    ],
)
def test_only_what_a_certificate_covers_is_stored(cache, made, budget, stored) -> None:
    assert bool(store(cache, prompt(1, 3 * CHUNK), made=made, budget=budget)) == stored


def test_a_tighter_request_gets_none_of_it(cache) -> None:
    tokens = prompt(1, 3 * CHUNK)
    store(cache, tokens)
    labels = {"operation": "load", "reason": "kl"}
    before = metrics.registry.get_sample_value("kvass_refused_total", labels) or 0.0
    assert load(cache, tokens, Budget(kl=0.01))[1].tokens == 0
    assert metrics.registry.get_sample_value("kvass_refused_total", labels) > before
    assert load(cache, tokens, Budget(kl=0.1, facts_lost=0.01))[1].tokens == 0
    assert load(cache, tokens)[1].tokens == tokens.size - 1


def test_without_its_certificate_it_is_not_used(cache, models, make_cache) -> None:
    tokens = prompt(1, 3 * CHUNK)
    store(cache, tokens)
    (calibrated_folder(models, SPACE) / BLENDS_FILE).unlink()
    later = make_cache(16 * MB, 16 * MB, gate=Gate(models))
    assert load(later, tokens)[1].tokens == 0
    assert load(make_cache(16 * MB, 16 * MB), tokens)[1].tokens == 0
    assert later.repairs(SPACE, "query", WIDE) == []


def test_the_budget_says_which_repair_may_be_used(cache) -> None:
    assert [one.chosen for one in cache.repairs(SPACE, "query", WIDE)] == [0.036, 0.136, 0.286]
    assert [one.chosen for one in cache.repairs(SPACE, "query")] == [0.286]
    assert cache.repairs(SPACE, "query", Budget(kl=0.001)) == []


def test_a_lossy_tier_keeps_none_of_it(make_cache, models, monkeypatch) -> None:
    install(monkeypatch)
    calibrate(models, SPACE)
    cache = make_cache(16 * MB, 16 * MB, codecs={"disk": LOSSY}, gate=Gate(models))
    tokens = prompt(1, 3 * CHUNK)
    assert store(cache, tokens) == 3
    assert {one.tier for one in cache.entries()} == {"host"}
    assert load(cache, tokens)[1].tokens == tokens.size - 1


def test_it_comes_up_from_a_lower_tier(make_cache, models) -> None:
    tokens = prompt(1, 3 * CHUNK)
    store(make_cache(16 * MB, 16 * MB, gate=Gate(models)), tokens)
    cache = make_cache(16 * MB, 16 * MB, names=("new", "disk"), gate=Gate(models))
    assert load(cache, tokens)[1].tokens == tokens.size - 1
    cache.flush(30)
    assert {one.tier for one in cache.entries()} == {"new", "disk"}
    assert load(cache, tokens)[1].tiers.keys() == {"new"}


def test_forgetting_a_text_forgets_what_was_repaired_behind_it(cache) -> None:
    tokens, other = prompt(1, 4 * CHUNK), prompt(2, 4 * CHUNK)
    store(cache, tokens)
    store(cache, other)
    assert cache.forget(tokens[: 2 * CHUNK], SPACE) == 4 * 2
    assert load(cache, tokens)[1].tokens == 0
    assert load(cache, other)[1].tokens == other.size - 1


def test_an_object_that_is_not_what_its_namespace_says_is_a_miss(cache) -> None:
    tokens = prompt(1, CHUNK)
    store(cache, tokens)
    header = next(iter(cache.entries())).header()
    decoder = cache._coding.decoder
    decoder(header)
    for changed in (
        msgspec.structs.replace(header, provenance=EXACT),
        msgspec.structs.replace(header, namespace=SPACE),
    ):
        with pytest.raises(CorruptObjectError):
            decoder(changed)


def test_recoding_leaves_it(cache, models, monkeypatch) -> None:
    install(monkeypatch)
    calibrate(models, SPACE)
    tokens = prompt(1, 3 * CHUNK)
    store(cache, tokens)
    counts = cache.recode(LOSSY, "disk")
    assert (counts.recoded, counts.failed) == (0, 0)
    assert load(cache, tokens)[1].tokens == tokens.size - 1


@pytest.mark.parametrize(
    "change",
    [
        {"kl_mean": float("nan")},
        {"kl_mean": -1.0},
        {"chosen": 2.0},
        {"facts_lost": 200},
        {"facts_tried": 0, "facts_lost_high": 0.0},
    ],
)
def test_a_certificate_that_contradicts_itself_allows_nothing(tmp_path: Path, change) -> None:
    bad = msgspec.structs.replace(row(), **change)
    certificate = certify_blends(SPACE, 50, 1.0, [bad])
    try:
        keep_blends(tmp_path, SPACE, certificate)
    except ValueError:
        return  # no number that a file could hold
    assert not Gate(tmp_path).blend(SPACE, "query", 1.0, WIDE).allowed


def test_a_certificate_of_another_model_or_altered_allows_nothing(models: Path) -> None:
    other: Namespace = msgspec.structs.replace(SPACE, weights="f" * 64)
    with pytest.raises(ModelFilesError):
        keep_blends(models, SPACE, certify_blends(other, 50, 1.0, ROWS))
    path = calibrated_folder(models, SPACE) / BLENDS_FILE
    path.write_bytes(path.read_bytes().replace(b"0.015", b"0.001"))
    verdict = Gate(models).blend(SPACE, "query", 0.14, WIDE)
    assert (verdict.allowed, verdict.kind) == (False, "unreadable")
    assert Gate(models).blends(SPACE) is None


def test_prompts_share_what_is_known_of_their_model(models: Path, monkeypatch) -> None:
    """Each prompt has a root of its own; the certificate is not read again for each."""
    gate = Gate(models)
    assert gate.blend(SPACE, "query", 0.14, WIDE).allowed
    first = gate.blend(blend_namespace(SPACE, prompt(1, 9)), "query", 0.14, WIDE)
    monkeypatch.setattr("kvass.quality.gate.read_blends", lambda path: pytest.fail("read again"))
    assert first == gate.blend(blend_namespace(SPACE, prompt(2, 9)), "query", 0.14, WIDE)
