"""KvassConnector: what vLLM sees. One object a process, with the half that belongs there."""

import contextlib
import logging
import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.version import __version__ as vllm_version

from kvass.cache.kvcache import KVCache
from kvass.engines.vllm.doubts import Doubts
from kvass.engines.vllm.identity import Adapters, base_namespace
from kvass.engines.vllm.meta import Report, Work
from kvass.engines.vllm.options import Options, check_version, read_options
from kvass.engines.vllm.plan import Plan, make_plan
from kvass.engines.vllm.scheduler import Rules, SchedulerHalf
from kvass.engines.vllm.stats import KvassPromMetrics, KvassStats
from kvass.engines.vllm.worker import WorkerHalf
from kvass.errors import ModelFilesError, UnsupportedModelError

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

log = logging.getLogger("kvass.vllm")

T = TypeVar("T")


@contextlib.contextmanager
def _on_all_cores() -> Iterator[None]:
    """Threads that are started in the block may run on every core that vLLM was given: on CPUs it binds its
    worker's own thread to one, which ours would inherit."""
    bound = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
    try:
        yield
    finally:
        os.sched_setaffinity(0, bound)


class KvassConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps vLLM's KV in kvass's tiers and promises vLLM what is there.

    Settings: `kv_connector_extra_config`, see `Options`. Raises ConfigError for settings, and
    UnsupportedModelError or ModelFilesError for a vLLM, a model or an arrangement of it that kvass does not
    handle, unless `on_unsupported` is "off": then it does nothing. Later, nothing here raises into vLLM.
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig):
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._doubts = Doubts()
        options = read_options(self._kv_transfer_config.kv_connector_extra_config)
        self._off_if_unsupported = options.off_if_unsupported
        try:
            mark = check_version(vllm_version, options)
            plan = make_plan(vllm_config, kv_cache_config, options.settings)
            plan = plan if plan.canonical else replace(plan, layout=plan.layout + mark)
            if role == KVConnectorRole.SCHEDULER:
                self._scheduler = self._scheduler_half(vllm_config, plan, options)
            else:
                self._worker = self._worker_half(plan, options)
        except (UnsupportedModelError, ModelFilesError) as error:
            if not options.off_if_unsupported:
                raise
            log.warning("kvass does nothing for this model: %s", error)

    def _scheduler_half(self, config: VllmConfig, plan: Plan, options: Options) -> SchedulerHalf:
        transfer = self._kv_transfer_config
        base = base_namespace(config, plan, options)
        rules = Rules(
            loads=transfer.is_kv_consumer,
            stores=transfer.is_kv_producer,
            checks_first=transfer.kv_load_failure_policy == "fail",
            shares_blocks=bool(config.cache_config.enable_prefix_caching),
            reports_late=plan.ranks > 1 or bool(config.scheduler_config.async_scheduling),
            tells=bool(config.kv_events_config and config.kv_events_config.enable_kv_cache_events),
        )
        cache = KVCache.open(
            options.settings, chunk_tokens=plan.chunk_tokens, shards=tuple(range(plan.ranks))
        )
        return SchedulerHalf(
            plan, base, cache, rules, Adapters(options.settings.models_path), options.settings
        )

    def _worker_half(self, plan: Plan, options: Options) -> WorkerHalf:
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        rank = get_tensor_model_parallel_rank() if plan.ranks > 1 else 0
        with _on_all_cores():
            cache = KVCache.open(options.settings, chunk_tokens=plan.chunk_tokens, shards=(rank,))
        patient = self._kv_transfer_config.kv_load_failure_policy == "fail"
        return WorkerHalf(plan, cache, patient=patient)

    @property
    def requires_kv_delivery(self) -> bool:
        """A store that is lost is a miss later."""
        return False

    def _guarded(self, operation: str, doubt: T, work: Callable[[], T]) -> T:
        """The outermost frame of ours: what fails in it is a miss, and never reaches vLLM."""
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - noted, and logged with its traceback
            self._doubts.note(operation, error)
            return doubt

    # -- the scheduler's side -------------------------------------------------------------------------

    def on_new_request(self, request: "Request") -> None:
        half = self._scheduler
        if half is not None:
            self._guarded("on_new_request", None, lambda: half.track(request) and None)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        half = self._scheduler
        if half is None:
            return 0, False
        none: tuple[int | None, bool] = (0, False)
        return self._guarded("lookup", none, lambda: half.matched(request, num_computed_tokens))

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        if self._scheduler is not None:  # not guarded: a promise that is not recorded would be a wrong answer
            self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        half = self._scheduler
        if half is None:
            return Work()
        work = Work(loads=half.take_loads(), tokens=scheduler_output.total_num_scheduled_tokens)
        work.stores = self._guarded("plan_stores", [], lambda: half.stores(scheduler_output))
        return work

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        half, report = self._scheduler, connector_output.kv_connector_worker_meta
        if half is not None:
            told = report if isinstance(report, Report) else None
            self._guarded("report", None, lambda: half.reported(told))

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        half = self._scheduler
        if half is not None:
            self._guarded("finish", None, lambda: half.finished(request))
        return False, None

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def reset_cache(self) -> bool | None:
        """vLLM asks for this where its weights change: what is stored is not hit from now on."""
        if self._scheduler is not None:
            self._scheduler.forget_all(uuid.uuid4().hex)
        return True

    # -- the worker's side ----------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        half = self._worker
        if half is None:
            return
        try:
            half.register(kv_caches)
        except UnsupportedModelError as error:
            if not self._off_if_unsupported:
                raise
            # Nothing was ever stored in this layout, then, so nothing will be promised either.
            log.warning("kvass does nothing for this model: %s", error)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        half, work = self._worker, self._get_connector_metadata()
        if half is not None and isinstance(work, Work) and work.loads:
            self._guarded("load", None, lambda: half.load(work))
            half.settle(work)  # not guarded: a load that is not reported would be a wrong answer

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads are done before the step begins."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: whole blocks are stored after the step."""

    def wait_for_save(self) -> None:
        half, work = self._worker, self._get_connector_metadata()
        if half is not None and isinstance(work, Work):
            self._guarded("store", None, lambda: half.store(work))

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._worker is None:
            return KVConnectorTransferResults()
        arrived, failed = self._worker.take_results()
        return KVConnectorTransferResults(finished_recving=arrived, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_bad_blocks() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> "KVConnectorWorkerMetadata | None":
        return self._worker.take_report() if self._worker is not None else None

    # -- both sides -----------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KvassStats | None:
        half = self._worker or self._scheduler
        return half.stats.take() if half is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvassStats:
        return KvassStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvassPromMetrics:
        return KvassPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def take_events(self) -> Iterable[Any]:
        half = self._scheduler
        return self._guarded("events", [], half.take_events) if half is not None else ()

    def shutdown(self) -> None:
        """Finish what is being stored, give leases back."""
        for half in (self._worker, self._scheduler):
            if half is not None:
                half.close()
