"""Prometheus metrics, in a registry of kvass's own; docs/operations.md describes each."""

from prometheus_client import CollectorRegistry, Counter, Histogram

registry = CollectorRegistry()

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

lookup_tokens = Counter(
    "kvass_lookup_tokens", "Prompt tokens looked up, by result (hit, miss).", ["result"], registry=registry
)
lookup_seconds = Histogram("kvass_lookup_seconds", "Time of one lookup.", registry=registry, buckets=_SECONDS)
load_bytes = Counter(
    "kvass_load_bytes", "Bytes of KV read and verified, by tier.", ["tier"], registry=registry
)
load_seconds = Histogram(
    "kvass_load_seconds", "Time of one load of a whole match.", registry=registry, buckets=_SECONDS
)
store_bytes = Counter("kvass_store_bytes", "Bytes of objects written, by tier.", ["tier"], registry=registry)
store_seconds = Histogram(
    "kvass_store_seconds",
    "Time from a store's start to its commit, by tier.",
    ["tier"],
    registry=registry,
    buckets=_SECONDS,
)
corrupt_objects = Counter(
    "kvass_corrupt_objects",
    "Objects that failed verification and were quarantined, by tier.",
    ["tier"],
    registry=registry,
)
evicted_objects = Counter(
    "kvass_evicted_objects",
    "Objects evicted to stay within the budget, by tier.",
    ["tier"],
    registry=registry,
)
dropped_stores = Counter(
    "kvass_dropped_stores",
    "Objects not stored, by tier and reason (full, error, deadline, orphan).",
    ["tier", "reason"],
    registry=registry,
)
errors = Counter(
    "kvass_errors",
    "Failures that were answered with a miss, by tier and operation.",
    ["tier", "operation"],
    registry=registry,
)
