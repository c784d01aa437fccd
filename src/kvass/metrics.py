"""Prometheus metrics, in a registry of kvass's own; docs/operations.md describes each."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

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
    "kvass_load_seconds",
    "Time of one load of a whole match, by the slowest tier that it read.",
    ["tier"],
    registry=registry,
    buckets=_SECONDS,
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
    "Objects not stored, by tier and reason (full, error, deadline, orphan, queue).",
    ["tier", "reason"],
    registry=registry,
)
errors = Counter(
    "kvass_errors",
    "Failures that were answered with a miss, by tier and operation.",
    ["tier", "operation"],
    registry=registry,
)
refused = Counter(
    "kvass_refused",
    "Uses of lossy codecs that no certificate covers, by operation (store, lookup, load, recode) and reason.",
    ["operation", "reason"],
    registry=registry,
)
remote_state = Gauge(
    "kvass_remote_state",
    "Circuit breaker of a remote tier: 0 closed, 1 half open, 2 open (left alone for now).",
    ["tier"],
    registry=registry,
)
retries = Counter(
    "kvass_retries", "Calls of a remote tier that were tried again, by tier.", ["tier"], registry=registry
)
queued_objects = Gauge(
    "kvass_queued_objects", "Objects that wait to be written to a lower tier.", ["tier"], registry=registry
)
requests = Counter(
    "kvass_requests",
    "Requests to the server, by endpoint and status.",
    ["endpoint", "status"],
    registry=registry,
)
failed_requests = Counter(
    "kvass_failed_requests", "Requests that ended in an error of the server's own.", registry=registry
)
queued_requests = Gauge("kvass_queued_requests", "Answers that wait for their turn.", registry=registry)
active_requests = Gauge("kvass_active_requests", "Answers that are being computed.", registry=registry)
ttft_seconds = Histogram(
    "kvass_ttft_seconds",
    "Time from a request's arrival to its first token, by what was loaded of its prompt (none, part, most).",
    ["hit"],
    registry=registry,
    buckets=(*_SECONDS, 30.0, 60.0, 120.0),
)
prompt_tokens = Counter(
    "kvass_prompt_tokens",
    "Prompt tokens of the server's requests, by origin (tiers, computed).",
    ["origin"],
    registry=registry,
)
completion_tokens = Counter("kvass_completion_tokens", "Tokens that the server wrote.", registry=registry)
jobs = Counter(
    "kvass_jobs",
    "Jobs of the queue, by outcome (done, failed, returned, lost, dropped, refused).",
    ["outcome"],
    registry=registry,
)
job_wait_seconds = Histogram(
    "kvass_job_wait_seconds",
    "Time that somebody waited for a job, by outcome (done, failed, timeout, no worker).",
    ["outcome"],
    registry=registry,
    buckets=_SECONDS,
)
queued_jobs = Gauge(
    "kvass_queued_jobs", "Jobs that wait for a worker, as this process last saw.", registry=registry
)
