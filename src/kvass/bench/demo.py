"""`kvass demo`: a model reads code once; questions about it, in this process and in a new one, are fast.

The first process reads and answers; a second, started afresh, is timed: for each of three questions that
were never asked before, the plain engine, the host tier and the SSD tier in turn.
"""

import contextlib
import json
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from kvass.bench.plain import Answer, answer
from kvass.bench.report import drop_pages, machine
from kvass.bench.scratch import scratch
from kvass.cache import KVCache
from kvass.engines.transformers import Engine, LoadedModel, Sampling, Usage, encode_chat, load_model
from kvass.errors import KvassError
from kvass.tiers.directory import DirectoryTier

MODEL = "smollm2-135m"
CONTEXT_TOKENS = 7600
ANSWER_TOKENS = 16
_BUDGET = 2 << 30
_SOURCES = ("textwrap.py", "json/decoder.py", "json/encoder.py", "heapq.py", "bisect.py")

ASKED_FIRST = (
    "What does the function wrap do?",
    "Which class decodes JSON?",
    "What does heapq.merge return?",
)
TIMED = (
    "What does the function dedent do?",
    "Which error does the decoder raise?",
    "How does insort keep a list sorted?",
)


class Reader:
    """The model, the code that it reads, and prompts about it."""

    def __init__(self, models_path: Path):
        self.loaded: LoadedModel = load_model(MODEL, dtype="bfloat16", models_path=models_path)
        self.code = self._code()

    def prompt(self, question: str) -> list[int]:
        """Tokens of the chat prompt: the code, then the question."""
        return encode_chat(self.loaded, [{"role": "user", "content": f"{self.code}\n\n{question}"}])

    def text(self, tokens: Sequence[int]) -> str:
        """Tokens as text."""
        return str(self.loaded.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _code(self) -> str:
        """Real source of the standard library, whole lines, about CONTEXT_TOKENS tokens."""
        library = Path(sysconfig.get_paths()["stdlib"])
        text = "\n".join((library / name).read_text() for name in _SOURCES)
        lines = text.splitlines()
        low, high = 0, len(lines)
        while low < high:  # the longest beginning that fits
            middle = (low + high + 1) // 2
            size = len(self.loaded.tokenizer("\n".join(lines[:middle]))["input_ids"])
            low, high = (middle, high) if size <= CONTEXT_TOKENS else (low, middle - 1)
        return "\n".join(lines[:low])


def common(prompts: Sequence[Sequence[int]]) -> int:
    """Tokens that all prompts begin with: the context."""
    return next(
        (at for at, column in enumerate(zip(*prompts, strict=False)) if len(set(column)) > 1),
        min(map(len, prompts)),
    )


def run(folder: Path, models_path: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Both processes; the report, which is also written to `folder/report.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    with scratch(folder) as (host, disk):
        report = _first_process(host, disk, models_path, say)
        say("starting a new process")
        arguments = [str(host), str(disk), str(models_path)]
        done = subprocess.run(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-m", "kvass.bench.demo", *arguments],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode:
            raise KvassError("the demo's second process failed; its output is above")
        report |= json.loads(done.stdout)
    report |= _summary(report)
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    return report


def _first_process(host: Path, disk: Path, models_path: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Cold and host, and the check that hits are bitwise what the stock cache in memory would give."""
    say(f"loading {MODEL}")
    reader = Reader(models_path)
    model = reader.loaded.model
    prompts = [reader.prompt(question) for question in ASKED_FIRST]
    context = common([*prompts, *map(reader.prompt, TIMED)])
    tiers = [
        DirectoryTier(host / "tier", _BUDGET, name="host"),
        DirectoryTier(disk / "tier", _BUDGET, name="disk"),
    ]
    with KVCache(tiers) as cache:
        # One call for the whole prompt, as the plain engine does it best: then both have one schedule.
        engine = Engine(model, cache, tokenizer=reader.loaded.tokenizer, slice_tokens=None)
        answer(model, prompts[0][:64], 1)  # warm
        say(f"reading {context:,} tokens of code, once without and once with kvass")
        stock = DynamicCache(config=model.config)
        plain = answer(model, prompts[0], 1, stock)
        runs = []
        for prompt in prompts:
            engine.overwrite_pool(len(prompt) + ANSWER_TOKENS)
            runs.append(_ask(engine, prompt))
            cache.flush()
        stored = cache.stats()
    identical = True
    for prompt, (got, usage) in zip(prompts, runs, strict=True):
        kept = _cropped(stock, usage.cached_tokens if usage.cached_tokens else None, len(prompts[0]))
        wanted = _stock_answer(model, prompt, kept, plain)
        identical &= got.tokens == wanted.tokens and all(map(torch.equal, got.logits, wanted.logits))
    return {
        "model": MODEL,
        "dtype": "bfloat16",
        "machine": machine() | {"torch_threads": torch.get_num_threads()},
        "context_tokens": context,
        "identical": identical,
        "identical_to": "stock transformers, DynamicCache kept in memory, same schedule of forward calls",
        "bytes_stored": {name: usage.bytes for name, usage in stored.items()},
        "first": {
            "questions": list(ASKED_FIRST),
            "answers": [reader.text(got.tokens) for got, _ in runs],
            "tokens": [got.tokens for got, _ in runs],
            "plain_seconds": plain.first_token_seconds,
            "cold_seconds": runs[0][0].first_token_seconds,
            "host_seconds": [got.first_token_seconds for got, _ in runs[1:]],
            "hit_tokens": [usage.cached_tokens for _, usage in runs],
        },
    }


def _ask(engine: Engine, prompt: list[int], count: int = ANSWER_TOKENS) -> tuple[Answer, Usage]:
    """A greedy answer through the engine; seconds from the call to the first token."""
    usage = Usage()
    began = time.perf_counter()
    steps, first = [], 0.0
    for step in engine.generate(prompt, Sampling(max_tokens=count), usage=usage):
        first = first or time.perf_counter() - began
        steps.append(step)
    return Answer([step.token for step in steps], [step.logits for step in steps], first), usage


def _cropped(stock: DynamicCache, hit: int | None, length: int) -> DynamicCache:
    """A copy of the first prompt's cache, cut where a hit ended (None: the whole first prompt)."""
    kept = DynamicCache()
    for number, layer in enumerate(stock.layers):
        keys, values = layer.keys, layer.values  # type: ignore[union-attr]
        assert keys is not None and values is not None
        end = length if hit is None else hit
        kept.update(keys[:, :, :end].clone(), values[:, :, :end].clone(), number)
    return kept


def _stock_answer(model: Any, prompt: list[int], kept: DynamicCache, plain: Answer) -> Answer:
    if kept.get_seq_length() < len(prompt):
        return answer(model, prompt, ANSWER_TOKENS, kept)
    rest = answer(model, [*prompt, *plain.tokens], ANSWER_TOKENS - 1, kept)  # the first prompt itself
    return Answer(plain.tokens + rest.tokens, plain.logits + rest.logits, plain.first_token_seconds)


def _second_process(host: Path, disk: Path, models_path: Path) -> dict[str, Any]:
    """Time to first token of three new questions: plain, host and disk in turn."""
    reader = Reader(models_path)
    model = reader.loaded.model
    prompts = [reader.prompt(question) for question in TIMED]
    context = common([*prompts, *map(reader.prompt, ASKED_FIRST)])
    seconds: dict[str, list[float]] = {"plain": [], "host": [], "disk": []}
    plain: list[Answer] = []
    answers: dict[str, list[Answer]] = {"host": [], "disk": []}
    usages: dict[str, list[Usage]] = {"host": [], "disk": []}
    paths = {"host": host / "tier", "disk": disk / "tier"}
    with contextlib.ExitStack() as stack:
        engines, caches = {}, {}
        for side, path in paths.items():
            caches[side] = stack.enter_context(KVCache([DirectoryTier(path, _BUDGET, name=side)]))
            engines[side] = Engine(model, caches[side], slice_tokens=None)
        answer(model, prompts[0][:64], 1)  # warm
        for number, prompt in enumerate(prompts):
            for side in _rotated(["plain", "host", "disk"], number):
                if side == "plain":
                    plain.append(answer(model, prompt, ANSWER_TOKENS))
                    seconds[side].append(plain[-1].first_token_seconds)
                    continue
                engines[side].overwrite_pool(len(prompt) + ANSWER_TOKENS)
                if side == "disk":
                    drop_pages(paths[side])
                got, usage = _ask(engines[side], prompt, ANSWER_TOKENS if side == "host" else 1)
                caches[side].flush()
                answers[side].append(got)
                usages[side].append(usage)
                seconds[side].append(got.first_token_seconds)
    return {
        "questions": [
            {"text": text, "tokens": len(prompt) - context}
            for text, prompt in zip(TIMED, prompts, strict=True)
        ],
        "seconds": seconds,
        "hit_tokens": {side: [one.cached_tokens for one in used] for side, used in usages.items()},
        "bytes_loaded": {side: [one.loaded_bytes for one in used] for side, used in usages.items()},
        "bytes_verified": {side: [one.verified_bytes for one in used] for side, used in usages.items()},
        "loaded_from": {
            side: sorted({name for one in used for name in one.tiers}) for side, used in usages.items()
        },
        "pool_overwritten_before_each_run": True,
        "disk_pages_dropped_before_each_run": True,
        "answers": [reader.text(one.tokens) for one in answers["host"]],
        "plain_answers": [reader.text(one.tokens) for one in plain],
        "host_and_disk_bitwise_equal": all(
            one.tokens[: len(other.tokens)] == other.tokens and torch.equal(one.logits[0], other.logits[0])
            for one, other in zip(answers["host"], answers["disk"], strict=True)
        ),
        "same_answer_as_one_shot": [
            one.tokens == other.tokens for one, other in zip(answers["host"], plain, strict=True)
        ],
    }


def _rotated(sides: list[str], by: int) -> list[str]:
    at = by % len(sides)
    return sides[at:] + sides[:at]


def _summary(report: dict[str, Any]) -> dict[str, Any]:
    seconds = report["seconds"]
    plain = statistics.median(seconds["plain"])
    return {
        "ttft_seconds": {side: statistics.median(took) for side, took in seconds.items()}
        | {"cold": report["first"]["cold_seconds"]},
        "speedup_host": round(plain / statistics.median(seconds["host"]), 2),
        "speedup_disk": round(plain / statistics.median(seconds["disk"]), 2),
    }


if __name__ == "__main__":
    json.dump(_second_process(*map(Path, sys.argv[1:4])), sys.stdout)
