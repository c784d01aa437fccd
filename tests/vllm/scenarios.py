"""What the engines of the vLLM tests do: each function runs in a process of its own and returns JSON."""

import importlib
import json
import os
import signal
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

Job = dict[str, Any]
TOKENS = 20
"""Enough for every prompt of the tests to reach another block."""


def run(function: str, job: Job, path: str) -> None:
    """Run one of the functions below, or `module:function`, and write down what it returns."""
    module, _, name = function.rpartition(":")
    found = getattr(importlib.import_module(module or "scenarios"), name)(job)
    Path(path).write_text(json.dumps(found))


class Engine:
    """An LLM of vLLM in this process, with the connector where the job has settings for it."""

    def __init__(self, job: Job):
        from vllm.config import KVTransferConfig

        from vllm import LLM

        os.environ.update(job.get("environment", {}))
        options: dict[str, Any] = {"enable_prefix_caching": False, "max_model_len": 4096, "dtype": "float32"}
        if job.get("kvass") is not None:
            options["kv_transfer_config"] = KVTransferConfig(
                kv_connector="KvassConnector",
                kv_role="kv_both",
                kv_connector_module_path="kvass.engines.vllm",
                kv_load_failure_policy=job.get("policy", "recompute"),
                kv_connector_extra_config=job["kvass"],
            )
        options |= job.get("engine", {})
        self.counts: dict[str, float] = {}
        if job.get("kvass") is not None:
            self._count()
        self.llm = LLM(model=job["model"], enforce_eager=True, seed=0, **options)
        self.core = self.llm.llm_engine.engine_core.engine_core

    def _count(self) -> None:
        """Sum up what the connector tells vLLM's statistics."""
        from kvass.engines.vllm.stats import KvassStats

        take, counts = KvassStats.take, self.counts

        def taken(stats: Any) -> Any:
            found = take(stats)
            for name, amount in found.data.items() if found else ():
                counts[name] = counts.get(name, 0) + amount
            return found

        KvassStats.take = taken  # type: ignore[method-assign]

    @property
    def scheduler_half(self) -> Any:
        return self.core.scheduler.connector._scheduler

    def ask(self, prompts: Iterable[list[int]], **options: Any) -> list[Job]:
        """Greedy answers to prompts that come at once, each with its five best tokens a place."""
        from vllm.lora.request import LoRARequest

        from vllm import SamplingParams

        salt, transfer = options.pop("salt", None), options.pop("transfer", None)
        if "lora" in options:
            options["lora_request"] = LoRARequest(*options.pop("lora"))
        params = SamplingParams(
            temperature=0,
            max_tokens=options.pop("tokens", TOKENS),
            ignore_eos=True,
            logprobs=5,
            extra_args={"kv_transfer_params": transfer} if transfer else None,
        )
        asked = [{"prompt_token_ids": one} | ({"cache_salt": salt} if salt else {}) for one in prompts]
        return [self.written(one) for one in self.llm.generate(asked, params, use_tqdm=False, **options)]

    @staticmethod
    def written(answer: Any) -> Job:
        """An answer as JSON."""
        output = answer.outputs[0]
        tops = [{str(token): one.logprob for token, one in place.items()} for place in output.logprobs]
        reason, cached = output.finish_reason, answer.num_cached_tokens
        return {"tokens": list(output.token_ids), "top": tops, "cached": cached, "reason": reason}

    def close(self) -> None:
        """Shut down as vLLM does, so that all that was stored is there."""
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

        if self.core.scheduler.connector is not None:
            self.core.scheduler.shutdown()
        ensure_kv_transfer_shutdown()


def answers(job: Job) -> Job:
    """Answers to groups of prompts, group after group; `ask`: how, for each. What the connector counted."""
    engine = Engine(job)
    if job.get("late"):  # as with steps that are scheduled ahead
        half = engine.scheduler_half
        half._rules = replace(half._rules, reports_late=True)
    hows = job.get("ask") or [{}] * len(job["groups"])
    found = []
    for group, how in zip(job["groups"], hows, strict=True):
        if "spoil" in how:  # an adapter changes on disk
            with Path(how.pop("spoil")).open("ab") as file:
                file.write(b" ")
        found.append(engine.ask(group, **how))
    engine.close()
    return {"groups": found, "counts": engine.counts}


def started(job: Job) -> Job:
    """What an engine says that does not start, or one of its answers."""
    from kvass.errors import KvassError

    try:
        engine = Engine(job)
    except (KvassError, RuntimeError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    found = engine.ask(job["prompts"])
    engine.close()
    return {"answers": found, "counts": engine.counts}


def told(job: Job) -> Job:
    """The events that vLLM publishes of what the connector stored, and the hashes of the prompts' blocks."""
    from vllm.config import KVEventsConfig

    job["engine"] = {"kv_events_config": KVEventsConfig(enable_kv_cache_events=True, publisher="null")}
    engine = Engine(job)
    connector, events = engine.core.scheduler.connector, []
    take = connector.take_events
    connector.take_events = lambda: [events.append(one) or one for one in take()]
    engine.ask(job["prompts"], tokens=2)
    engine.close()
    return {
        "events": [
            {
                "blocks": len(one.block_hashes), "tokens": list(one.token_ids), "medium": one.medium,
                "follows": one.parent_block_hash is not None,
            }
            for one in events
        ]
    }  # fmt: skip


def preempted(job: Job) -> Job:
    """Answers to prompts that do not fit into vLLM's memory together, and how often one had to make way."""
    engine = Engine(job)
    scheduler = engine.core.scheduler
    preempt, count = scheduler._preempt_request, [0]

    def counted(*arguments: Any, **options: Any) -> Any:
        count[0] += 1
        return preempt(*arguments, **options)

    scheduler._preempt_request = counted
    found = engine.ask(job["prompts"])
    engine.close()
    return {"answers": found, "preemptions": count[0]}


def aborted(job: Job) -> Job:
    """One of two requests is aborted right after its load began; what then is left of it."""
    from vllm import SamplingParams

    engine = Engine(job)
    llm = engine.llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=5)
    for name, prompt in zip(("stays", "goes"), job["prompts"], strict=True):
        llm.add_request(name, {"prompt_token_ids": prompt}, params)
    llm.step()
    llm.abort_request(["goes"], internal=False)
    found = []
    while llm.has_unfinished_requests():
        found += [answer for answer in llm.step() if answer.finished]
    half = engine.scheduler_half
    leases = sum(len(tier._owner._leases) for tier in half._cache.tiers if hasattr(tier, "_owner"))
    kept = {"requests": len(half._requests), "loading": len(half._loading), "leases": leases}
    left = engine.ask(job["prompts"])
    engine.close()
    return {"answers": [engine.written(one) for one in found], "kept": kept, "after": left}


def killed(job: Job) -> None:
    """Ends by kill -9 in the middle of writing what a prompt's answer leaves behind."""
    from kvass.tiers.directory import DirectoryTier

    engine = Engine(job)
    write = DirectoryTier.write
    left = [job["objects"]]

    def dying(tier: Any, items: Any, run: Any = map) -> Any:
        def one_by_one(function: Any, all_items: Any) -> Any:
            for item in all_items:
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1
                yield function(item)

        return write(tier, items, one_by_one)

    DirectoryTier.write = dying  # type: ignore[method-assign]
    engine.ask(job["prompts"])
