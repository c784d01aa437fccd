"""What the connector counts for vLLM's own statistics: hits, loads, stores and errors."""

from dataclasses import dataclass, field
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

COUNTS: Final = {
    "kvass_hit_tokens": "Prompt tokens that were loaded instead of computed.",
    "kvass_loads": "Loads of a request's KV.",
    "kvass_load_bytes": "Bytes of KV loaded.",
    "kvass_load_seconds": "Seconds spent loading.",
    "kvass_failed_loads": "Loads of which not all arrived; the rest was recomputed.",
    "kvass_stores": "Stores of a request's new chunks.",
    "kvass_store_bytes": "Bytes of KV copied out to be stored.",
    "kvass_store_seconds": "Seconds that the engine waited for copies out of its memory.",
    "kvass_errors": "Failures inside the connector; each was a miss.",
}


@dataclass
class KvassStats(KVConnectorStats):
    """Counts since the last report, by the names in `COUNTS`."""

    data: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, amount: float = 1) -> None:
        """Count something."""
        self.data[name] = self.data.get(name, 0) + amount

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, amount in other.data.items():
            self.add(name, amount)
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: round(amount, 6) for name, amount in self.data.items()}

    def is_empty(self) -> bool:
        return not self.data

    def take(self) -> "KvassStats | None":
        """What was counted, leaving nothing; None where that is nothing."""
        if not self.data:
            return None
        taken, self.data = KvassStats(data=self.data), {}
        return taken


class KvassPromMetrics(KVConnectorPromMetrics):
    """The counts as `vllm:kvass_*` counters, one of each an engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ):
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[int, dict[str, Any]] = {engine: {} for engine in per_engine_labelvalues}
        for name, text in COUNTS.items():
            counter = self._counter_cls(name=f"vllm:{name}", documentation=text, labelnames=labelnames)
            for engine, values in per_engine_labelvalues.items():
                self._counters[engine][name] = counter.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, amount in transfer_stats_data.items():
            counter = self._counters.get(engine_idx, {}).get(name)
            if counter is not None and amount > 0:
                counter.inc(amount)
