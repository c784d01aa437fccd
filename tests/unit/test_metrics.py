"""What happens is counted, and an exporter can read it."""

import pytest
from prometheus_client import generate_latest

from fixtures.world import blank, kv, namespace, prompt, store
from kvass import metrics
from kvass.cache import KVCache
from kvass.tiers.memory import MemoryTier

SPACE = namespace()
MB = 1 << 20


def sample(name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(name, labels) or 0.0


@pytest.fixture
def before(request: pytest.FixtureRequest) -> dict[tuple, float]:
    return {
        (one.name, *sorted(one.labels.items())): one.value
        for metric in metrics.registry.collect()
        for one in metric.samples
    }


def risen(before: dict[tuple, float], name: str, **labels: str) -> float:
    return sample(name, **labels) - before.get((name, *sorted(labels.items())), 0.0)


def test_lookups_loads_and_stores_are_counted(make_cache, before) -> None:
    cache = make_cache(16 * MB, 16 * MB)
    ticket = store(cache, prompt(1, 100))
    result = cache.load(cache.lookup(prompt(1, 150), SPACE), blank(SPACE, 100))
    assert risen(before, "kvass_lookup_tokens_total", result="hit") == 100
    assert risen(before, "kvass_lookup_tokens_total", result="miss") == 50
    assert risen(before, "kvass_lookup_seconds_count") == 1
    assert risen(before, "kvass_load_bytes_total", tier="host") == result.bytes
    assert risen(before, "kvass_load_seconds_count", tier="host") == 1
    for tier in ("host", "disk"):
        assert risen(before, "kvass_store_bytes_total", tier=tier) == ticket.bytes
        assert risen(before, "kvass_store_seconds_count", tier=tier) == 1


def test_memory_counts_its_stores_too(before) -> None:
    with KVCache([MemoryTier(MB, name="counted")], chunk_tokens=16) as cache:
        ticket = store(cache, prompt(1, 100))
    assert risen(before, "kvass_store_bytes_total", tier="counted") == ticket.bytes > 0


@pytest.mark.parametrize("kind", ["host", "memory"])
def test_evictions_and_refusals_are_counted(make_cache, before, kind: str) -> None:
    cache = make_cache(MB) if kind == "host" else KVCache([MemoryTier(MB, name="memory")], chunk_tokens=16)
    for seed in range(100):
        store(cache, prompt(seed, 60))
    evicted = risen(before, "kvass_evicted_objects_total", tier=kind)
    assert evicted == 400 - cache.stats()[kind].objects
    large = namespace()
    store(cache, prompt(200, 16 * 500), large)
    assert risen(before, "kvass_dropped_stores_total", tier=kind, reason="full") >= 1
    assert risen(before, "kvass_dropped_stores_total", tier=kind, reason="orphan") >= 1
    cache.close()


def test_quarantine_is_counted(make_cache, before) -> None:
    cache = make_cache()
    store(cache, prompt(1, 16))
    cache.tiers[0].quarantine(cache.lookup(prompt(1, 16), SPACE).pieces()[0].address)
    cache.tiers[0].quarantine(bytes(35))
    assert risen(before, "kvass_corrupt_objects_total", tier="host") == 1


def test_a_store_after_closing_is_counted(make_cache, before) -> None:
    cache = make_cache()
    cache.close()
    cache.store(prompt(1, 16), SPACE, kv(prompt(1, 16)))
    assert risen(before, "kvass_dropped_stores_total", tier="host", reason="error") == 1


def test_an_exporter_can_read_them(make_cache) -> None:
    store(make_cache(), prompt(1, 100))
    text = generate_latest(metrics.registry).decode()
    for name in ("kvass_lookup_tokens_total", "kvass_store_bytes_total", "kvass_load_seconds_bucket"):
        assert f"\n{name}" in text
