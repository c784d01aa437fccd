"""A vLLM engine in a process of its own that a benchmark drives: one line of JSON asks, one answers.

Started with a job as its only argument and the number of an inherited descriptor to answer on: vLLM writes
to the standard output as it likes.
"""

import json
import os
import sys
import time
from typing import Any

Job = dict[str, Any]


def main() -> None:
    """Answer until the input ends."""
    job = json.loads(sys.argv[1])
    with os.fdopen(int(sys.argv[2]), "w", encoding="utf-8") as answers:
        engine = _Engine(job)
        _say(answers, {"ready": True})
        for line in sys.stdin:
            _say(answers, engine.do(json.loads(line)))
        engine.close()


def _say(answers: Any, what: Job) -> None:
    answers.write(json.dumps(what) + "\n")
    answers.flush()


class _Engine:
    def __init__(self, job: Job):
        from vllm.config import KVTransferConfig

        from vllm import LLM

        options: Job = {
            "enable_prefix_caching": False, "max_model_len": job.get("max_model_len", 8192),
            "dtype": "bfloat16", "enforce_eager": True, "disable_log_stats": True,
        }  # fmt: skip
        if job.get("transfer") is not None:
            options["kv_transfer_config"] = KVTransferConfig(**job["transfer"])
        self._llm: Any = LLM(model=job["model"], **options)

    def do(self, what: Job) -> Job:
        """Answer prompts at once (`ask`, `drain` inside of the time or not; `salt` and `transfer` of all)."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=what.get("tokens", 1), ignore_eos=True)
        if what.get("transfer"):
            params.extra_args = {"kv_transfer_params": what["transfer"]}
        salted = {"cache_salt": what["salt"]} if what.get("salt") else {}
        prompts = [{"prompt_token_ids": one, **salted} for one in what["ask"]]
        began = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        if what.get("drain"):
            _drain()
        seconds = time.perf_counter() - began
        return {
            "seconds": seconds,
            "cached": [one.num_cached_tokens for one in outputs],
            "tokens": [list(one.outputs[0].token_ids) for one in outputs],
        }

    def close(self) -> None:
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

        ensure_kv_transfer_shutdown()


def _drain() -> None:
    """Wait until all that was stored so far is in every tier; where the engine runs in this process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if has_kv_transfer_group():
        get_kv_transfer_group()._worker._cache.flush()


if __name__ == "__main__":
    main()
