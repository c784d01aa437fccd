"""The scheduler's half of the connector: what to promise of each prompt, what to load, what to store."""

import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from kvass.cache.kvcache import KVCache
from kvass.cache.match import Match
from kvass.cache.pace import Pace
from kvass.chunks import as_tokens
from kvass.config import Settings
from kvass.engines.vllm.blending import Blends, Wish, tenant_of
from kvass.engines.vllm.events import stored
from kvass.engines.vllm.identity import Adapters, for_tenant
from kvass.engines.vllm.meta import Load, Report, Store, remainder
from kvass.engines.vllm.permissions import Permissions, permissions
from kvass.engines.vllm.plan import Plan
from kvass.engines.vllm.stats import KvassStats
from kvass.keys import Namespace
from kvass.quality import Budget
from kvass.tiers.base import Lease

_LEASE_SECONDS: Final = 30.0
"""How long a promise holds objects; a load begins in the step after it."""

_IDLE_WAIT: Final = 0.005
"""Seconds to wait for remote tiers inside a question while the engine has nothing else to do: asked again
at once, it would spin and hold the interpreter's lock."""

_NONE: Final = Lease((), lambda: None)


@dataclass(slots=True)
class Tracked:
    """One request: what it may do, what it was promised, and how many of its tokens are stored."""

    request: Request
    namespace: Namespace | None
    permits: Permissions
    stored: int = 0
    match: Match | None = None
    lease: Lease = _NONE
    leased_until: float = 0.0
    staging: "Future[Match] | None" = None
    give_up_at: float = 0.0
    wish: Wish | None = None
    failed: bool = False
    computed: int = 0

    def release(self) -> None:
        """End the promise."""
        self.lease.close()
        self.lease, self.match = _NONE, None


@dataclass(frozen=True, slots=True)
class Rules:
    """How this engine was started.

    `checks_first`: a load that fails would fail its request, so nothing is promised unread. `shares_blocks`:
    requests with one beginning share blocks. `reports_late`: whether a load failed is not known where what
    was computed upon it is stored (several ranks, or steps scheduled ahead). `tells`: vLLM's KV events are
    on.
    """

    loads: bool
    stores: bool
    checks_first: bool
    shares_blocks: bool
    reports_late: bool
    tells: bool


class SchedulerHalf:
    """Lives in vLLM's scheduler process; everything is called from its one thread."""

    def __init__(
        self,
        plan: Plan,
        base: Namespace,
        cache: KVCache,
        rules: Rules,
        adapters: Adapters,
        settings: Settings,
    ):
        self._plan = plan
        self._base = base
        self._cache = cache
        self._rules = rules
        self._adapters = adapters
        self._requests: dict[str, Tracked] = {}
        self._loads: list[Load] = []
        self._loading: dict[str, Tracked] = {}
        self._busy = False
        self._pace = Pace()
        self._blends = Blends(cache, settings, self._pace)
        self._standard = Permissions(
            reuse=settings.reuse == "anywhere",
            max_fraction=settings.reuse_max_fraction,
            budget=Budget.of(settings),
        )
        self._stepped = time.perf_counter()
        self._step_tokens = 0
        self._told: dict[str, BlockStored] = {}
        self._events: list[BlockStored] = []
        self.stats = KvassStats()

    # -- promises -------------------------------------------------------------------------------------

    def track(self, request: Request) -> Tracked:
        """What is known of a request; found out where it is new."""
        known = self._requests.get(request.request_id)
        if known is None or known.request is not request:
            permits = self._permits(request)
            known = Tracked(request, self._namespace(request), permits)
            self._requests[request.request_id] = known
        return known

    def _permits(self, request: Request) -> Permissions:
        """What a request may do. Approximate state is for marked salts only; and nothing of what is computed
        under such a one is stored, for vLLM's own blocks of it may be approximate."""
        permits = permissions(request.kv_transfer_params, self._standard)
        _, marked = tenant_of(request.cache_salt)
        if marked:
            return permits._replace(store=False, reuse=permits.reuse and self._plan.canonical)
        return permits._replace(reuse=False)

    def _namespace(self, request: Request) -> Namespace | None:
        """The namespace of a request; None where its KV is not that of its tokens alone, or of unknown
        weights."""
        if (
            request.prompt_token_ids is None
            or request.prompt_embeds is not None
            or request.prompt_is_token_ids is not None
            or request.mm_features
            or request.sampling_params is None
            or request.resumable
        ):
            return None
        found = for_tenant(self._base, tenant_of(request.cache_salt)[0])
        if request.lora_request is not None:
            adapter = self._adapters.digest(request.lora_request)
            if adapter is None:
                return None
            found = msgspec.structs.replace(found, adapter=adapter)
        return found

    def matched(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """How many tokens behind the first `computed` are promised, and whether the request waits for them;
        None: not known yet."""
        known = self.track(request)
        if (
            not self._rules.loads
            or not known.permits.load
            or known.failed
            or known.namespace is None
            or request.skip_reading_prefix_cache
        ):
            return 0, False
        limit = (request.num_tokens - 1) // self._plan.chunk_tokens * self._plan.chunk_tokens
        if limit <= computed:
            known.release()
            return 0, False
        match = self._standing(known, limit)
        if match is None:
            match = self._find(known, known.namespace, request.all_token_ids[: limit + 1], limit, computed)
            if match is None:
                return None, False
            match = self._promise(known, match, computed)
        known.computed = computed
        more = match.length - computed
        if more <= 0:
            known.release()
            return 0, False
        if self._plan.windowed and self._rules.shares_blocks and self._comes(match, computed):
            return None, False  # another request is loading the same: its blocks will be shared
        return more, self._plan.windowed

    def _standing(self, known: Tracked, limit: int) -> Match | None:
        """The promise of an earlier question, which stands as long as its lease has time left."""
        match = known.match
        if match is None or time.monotonic() > known.leased_until - _LEASE_SECONDS / 2:
            return None
        return match if match.length <= limit else None

    def _find(
        self, known: Tracked, namespace: Namespace, tokens: list[int], limit: int, computed: int
    ) -> Match | None:
        """What this machine holds of a prompt, after what other machines have was brought here; None: it is
        still coming."""
        cache = self._cache
        if known.staging is not None and not self._staged(known):
            return None
        pause = 0.0 if self._busy else _IDLE_WAIT
        if not self._blends.ended(known.wish, pause):
            return None  # nothing is looked up meanwhile: the worker may need this core
        match = self._here(tokens, namespace, limit)
        if known.staging is None and cache.remote and match.length < limit:
            patience = self._pace.seconds(limit - max(computed, match.length))
            known.give_up_at = time.monotonic() + patience
            known.staging = cache.stage(tokens, namespace, limit=limit, seconds=self._pace.seconds)
            if not self._staged(known):
                return None
            match = self._here(tokens, namespace, limit)
        if known.permits.reuse and match.length < limit:
            prompt = known.request.prompt_token_ids or []
            known.wish, better = self._blends.lookup(
                known.wish, known.permits, namespace, prompt, match, computed, pause
            )
            return better
        return match

    def _here(self, tokens: list[int], namespace: Namespace, limit: int) -> Match:
        """What this machine's tiers hold of a prompt, in whole chunks."""
        return self._cache.lookup(tokens, namespace, limit=limit, local=True).whole()

    def _staged(self, known: Tracked) -> bool:
        """Whether what other machines have has come, or has had its time."""
        if known.staging is None or time.monotonic() >= known.give_up_at:
            return True
        try:
            known.staging.result(0 if self._busy else _IDLE_WAIT)
        except TimeoutError:
            return False
        return True

    def _promise(self, known: Tracked, match: Match, computed: int) -> Match:
        """Hold what is to be promised, and read it first where vLLM could not do without it."""
        known.release()
        if match.length <= computed:
            return match
        lease = self._cache.hold(match, _LEASE_SECONDS)
        held = set(lease.addresses)
        gone = [piece.start for piece in match.pieces() if piece.address not in held]
        if gone:  # evicted between the look and the lease: an ordinary miss
            lease.close()
            return match.cut(0)
        if self._rules.checks_first:
            match = self._cache.check(match)
        known.lease, known.match = lease, match
        known.leased_until = time.monotonic() + _LEASE_SECONDS
        return match

    def _comes(self, match: Match, computed: int) -> bool:
        """Whether what a match begins with is being loaded already."""
        key = match.keys[computed // match.chunk_tokens]
        others = [other.match for other in self._loading.values() if other.match is not None]
        return any(key in other.keys[: other.length // other.chunk_tokens] for other in others)

    def allocated(self, request: Request, blocks: Any, tokens: int) -> None:
        """vLLM took up a promise of `tokens` tokens (0: none) and has blocks for them.

        Must not fail: vLLM counts these tokens as computed from now on.
        """
        known = self.track(request)
        match = known.match
        if tokens <= 0:
            if request.request_id not in self._loading:
                known.release()
            return
        assert match is not None, "vLLM took up what was not promised"
        known.match = match.cut(known.computed + tokens)
        rest = remainder(known.match, known.computed)
        self._loads.append(Load(request.request_id, rest, blocks.get_block_ids(), self._plan.windowed))
        self._loading[request.request_id] = known
        known.stored = max(known.stored, rest.length)
        self.stats.add("kvass_hit_tokens", tokens)

    # -- a step ---------------------------------------------------------------------------------------

    def take_loads(self) -> list[Load]:
        """The loads of this step. Nothing here can fail, whatever else of the step does."""
        loads, self._loads = self._loads, []
        return loads

    def stores(self, output: SchedulerOutput) -> list[Store]:
        """The whole chunks that are complete after this step, of requests that have new ones."""
        self._busy = bool(output.num_scheduled_tokens)
        self._stepped, self._step_tokens = time.perf_counter(), output.total_num_scheduled_tokens
        state = output.kv_connector_block_state
        if not self._rules.stores or state is None:
            return []
        if self._rules.reports_late and self._loading and not self._plan.windowed:
            return []  # whether what is computed now is right, only the report of these loads says
        computed = {one.req_id: one.num_computed_tokens for one in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        found = []
        for name, scheduled in output.num_scheduled_tokens.items():
            known = self._requests.get(name)
            if known is None or known.namespace is None or not known.permits.store:
                continue
            # Drafts and tokens that are only just being sampled lie behind `num_tokens`.
            end = min(computed[name] + scheduled, known.request.num_tokens)
            end = end // self._plan.chunk_tokens * self._plan.chunk_tokens
            if end <= known.stored:
                continue
            blocks = state.resolve_block_ids(name)
            tokens = as_tokens(known.request.all_token_ids[:end])
            found.append(Store(name, tokens, known.namespace, blocks, known.stored))
            if self._rules.tells:
                event = stored(known.request, known.stored, end, self._plan.block_tokens)
                self._told |= {name: event} if event is not None else {}
            known.stored = end
        return found

    def reported(self, report: Report | None) -> None:
        """A step ended; what came of its loads and stores."""
        self._pace.learn(self._step_tokens, time.perf_counter() - self._stepped)
        skipped = report.skipped if report is not None else {}
        self._events += [event for name, event in self._told.items() if name not in skipped]
        self._told = {}
        if report is None:
            return
        for name, tokens in report.loaded.items():
            known = self._loading.pop(name, None)
            if known is None:
                continue
            if known.match is None or tokens < known.match.length:
                known.stored = min(known.stored, tokens // self._plan.chunk_tokens * self._plan.chunk_tokens)
                known.failed = True
            known.release()
        for name, start in report.skipped.items():
            if (found := self._requests.get(name)) is not None:
                found.stored = min(found.stored, start)

    def take_events(self) -> list[BlockStored]:
        """What was stored since this was asked last."""
        events, self._events = self._events, []
        return events

    def finished(self, request: Request) -> None:
        """A request ended or was aborted. What it loads just now is loaded all the same: vLLM knows."""
        known = self._requests.pop(request.request_id, None)
        if known is None:
            return
        if known.staging is not None:
            known.staging.cancel()  # where it has not begun, it need not
        if request.request_id not in self._loading:
            known.release()

    def forget_all(self, salt: str) -> None:
        """The weights may be other ones now: nothing stored so far is hit any more, nor by others later."""
        self._base = msgspec.structs.replace(self._base, weights=f"{self._base.weights}/{salt}")
        for known in self._requests.values():
            known.release()
            known.namespace = None

    def close(self) -> None:
        """Give leases and tiers back."""
        for known in self._requests.values():
            known.release()
        self._blends.close()
        self._cache.close()
