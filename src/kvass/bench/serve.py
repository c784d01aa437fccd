"""`kvass bench serve`: what the server costs, and what it saves, through HTTP.

Servers run in processes of their own, over tiers of their own; what is called directly runs here.
"""

import json
import os
import shutil
import statistics
import sysconfig
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvass.bench.client import Client, Reply, run_kvass, serving
from kvass.bench.plain import answer
from kvass.bench.report import interleaved, interval, machine, ratios
from kvass.bench.scratch import scratch
from kvass.cache import KVCache
from kvass.config import Settings
from kvass.engines.transformers import Engine, LoadedModel, Sampling, encode_chat, load_model

_DOCUMENT_TOKENS = 4096
_TURN_TOKENS = 200
_ANSWER_TOKENS = 100
_TENANT_TOKENS = 512
_LAST_TURNS = 3
_SETTLE_SECONDS = 0.5
"""After which nothing is being written any more of what was stored before."""


def run(
    disk: Path,
    models_path: Path,
    *,
    model: str,
    pairs: int,
    turns: int,
    clients: int,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Every figure of the server; see docs/serving.md for what each is."""
    loaded = load_model(model, dtype="bfloat16", models_path=models_path)
    text = _Text(loaded)
    found: dict[str, Any] = {
        "bench": "serve", "machine": machine() | {"torch_threads": torch.get_num_threads()},
        "model": model, "dtype": "bfloat16", "pairs": pairs, "turns": turns, "clients": clients,
    }  # fmt: skip
    with scratch(disk) as (host_path, disk_path):
        place = _Place(host_path, disk_path, models_path, model)
        progress("a document, through HTTP and directly")
        found |= _http(loaded, text, place, pairs)
        progress("a chat")
        found |= _chat(loaded, text, place, turns)
        progress("many clients and one document")
        found |= _shared(text, place, clients)
        progress("two tenants")
        found |= _tenants(loaded, place, pairs)
        progress("warming a code base")
        found |= _warm(text, place)
    return found


class _Text:
    """Text of Python's standard library, by the token."""

    def __init__(self, loaded: LoadedModel):
        self._tokenizer: Any = loaded.tokenizer
        library = Path(sysconfig.get_path("stdlib"))
        self.folder = library
        source = "".join((library / name).read_text() for name in ("textwrap.py", "tarfile.py", "zipfile.py"))
        self._ids: list[int] = self._tokenizer(source)["input_ids"]
        self._at = 0

    def take(self, tokens: int) -> str:
        """About so many tokens that were not taken before."""
        ids = self._ids[self._at : self._at + tokens]
        self._at += tokens
        text: str = self._tokenizer.decode(ids)
        return text


class _Place:
    """Where servers keep what they store: a new pair of folders for each."""

    def __init__(self, host: Path, disk: Path, models_path: Path, model: str):
        self._host, self._disk, self._models_path, self._model = host, disk, models_path, model
        self._number = 0

    def settings(self) -> dict[str, str]:
        """Settings of a server that has read nothing yet."""
        self._number += 1
        return {
            "KVASS_HOST_PATH": str(self._host / str(self._number)),
            "KVASS_HOST_BYTES": str(3 << 30),
            "KVASS_DISK_PATH": str(self._disk / str(self._number)),
            "KVASS_STATE_PATH": str(self._disk / f"state-{self._number}"),
            "KVASS_MODELS_PATH": str(self._models_path),
        }

    def server(self, settings: dict[str, str]) -> AbstractContextManager[str]:
        """A server with these settings; its address."""
        return serving(["--model", self._model], settings)

    def code_base(self, library: Path) -> tuple[Path, Path]:
        """A copy of two packages of the standard library, and a folder for their contexts."""
        code, out = self._disk / "code", self._disk / "contexts"
        shutil.copytree(library / "json", code / "json", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(library / "argparse.py", code / "argparse.py")
        return code, out

    def warm(self, folder: Path, out: Path, settings: dict[str, str]) -> dict[str, Any]:
        """`kvass warm`."""
        found: dict[str, Any] = json.loads(
            run_kvass(["warm", str(folder), "--out", str(out), "--model", self._model, "--json"], settings)
        )
        return found


def _messages(document: str, question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": document}, {"role": "user", "content": question}]


def _http(loaded: LoadedModel, text: _Text, place: _Place, pairs: int) -> dict[str, Any]:
    """The same kind of question over a document that was read before: through HTTP, and to the engine."""
    document, settings = text.take(_DOCUMENT_TOKENS), place.settings()
    numbers = iter(range(1_000_000))
    with place.server(settings) as url, ExitStack() as stack:
        client = Client(url)
        client.chat(_messages(document, "What is this?"), max_tokens=1)
        own = Settings.load(
            **{name.removeprefix("KVASS_").lower(): value for name, value in settings.items()}
        )
        cache = stack.enter_context(KVCache.open(own))
        engine = Engine(loaded.model, cache, tokenizer=loaded.tokenizer)

        def question() -> list[dict[str, str]]:
            return _messages(document, f"Question {next(numbers)}: what does the first function do?")

        def through_http() -> float:
            reply = client.chat(question(), max_tokens=1, temperature=0)
            assert reply.cached_tokens >= _DOCUMENT_TOKENS - 64
            return reply.first_token_seconds

        def directly() -> float:
            began = time.perf_counter()
            steps = engine.generate(encode_chat(loaded, question()), Sampling(max_tokens=1))
            next(steps)
            took = time.perf_counter() - began
            for _ in steps:
                pass
            cache.flush()
            return took

        sides = {"http": through_http, "direct": directly}
        interleaved(sides, 3)
        seconds = interleaved(sides, pairs)
    found = ratios(seconds["http"], seconds["direct"])
    return {
        "http_ttft_ratio": round(
            statistics.median(seconds["http"]) / statistics.median(seconds["direct"]), 4
        ),
        "http_ttft_interval95": [round(one, 4) for one in interval(found)],
        "http_ttft_seconds": {side: round(statistics.median(took), 4) for side, took in seconds.items()},
    }


def _chat(loaded: LoadedModel, text: _Text, place: _Place, turns: int) -> dict[str, Any]:
    """A chat whose every turn sends all of it again, answers as text."""
    messages: list[dict[str, str]] = []
    shares, held = [], 0
    with place.server(place.settings()) as url:
        client = Client(url)
        for number in range(turns):
            messages.append({"role": "user", "content": text.take(_TURN_TOKENS)})
            reply = client.chat(messages, max_tokens=_ANSWER_TOKENS, temperature=0.7, seed=number)
            messages.append({"role": "assistant", "content": reply.text})
            if number:
                shares.append(reply.cached_tokens / held)
            held = reply.prompt_tokens + reply.completion_tokens
        messages = messages[:-2]  # and the last turn again, each time with another question
        kvass, plain = [], []
        for _ in range(_LAST_TURNS):
            said = {"role": "user", "content": text.take(_TURN_TOKENS)}
            prompt = encode_chat(loaded, [*messages, said])
            plain.append(answer(loaded.model, prompt, 1).first_token_seconds)
            kvass.append(client.chat([*messages, said], max_tokens=1, temperature=0).first_token_seconds)
    return {
        "chat_cached_share_min": round(min(shares), 4),
        "chat_speedup_turn20": round(statistics.median(plain) / statistics.median(kvass), 2),
        "chat_tokens": held,
        "chat_ttft_seconds": {
            "plain": round(statistics.median(plain), 4), "kvass": round(statistics.median(kvass), 4),
        },
    }  # fmt: skip


def _shared(text: _Text, place: _Place, clients: int) -> dict[str, Any]:
    """Clients that come all at once, to a server that has read nothing, with one document."""
    document = text.take(_DOCUMENT_TOKENS)
    replies: list[Reply] = []
    together = threading.Barrier(clients)

    def ask(url: str, number: int) -> None:
        together.wait()
        question = f"Question {number}: what does the first function do?"
        replies.append(Client(url).chat(_messages(document, question), max_tokens=8, temperature=0))

    with place.server(place.settings()) as url:
        threads = [threading.Thread(target=ask, args=(url, number)) for number in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    computed = [reply.prompt_tokens - reply.cached_tokens for reply in replies]
    assert len(replies) == clients
    return {
        "shared_prefills": sum(one > _DOCUMENT_TOKENS // 2 for one in computed),
        "shared_computed_tokens": sorted(computed, reverse=True),
    }


def _tenants(loaded: LoadedModel, place: _Place, pairs: int) -> dict[str, Any]:
    """One tenant's stored prompt, sent by another; against prompts that nobody ever sent."""
    keys = {name: f"{name}-{os.urandom(16).hex()}" for name in ("alice", "bob")}
    settings = place.settings() | {"KVASS_API_KEYS": ",".join(f"{name}={key}" for name, key in keys.items())}
    random = np.random.default_rng()
    hits: list[int] = []
    with place.server(settings) as url:
        alice, bob = (Client(url, key) for key in keys.values())

        def prompt() -> list[int]:
            return [int(one) for one in random.integers(1000, loaded.model.config.vocab_size, _TENANT_TOKENS)]

        def first_token(of_alice: bool) -> float:
            """Bob's, after alice sent a prompt twice: the same one, or one that nobody sent."""
            ids = prompt()
            alice.complete(ids, max_tokens=1, temperature=0)
            assert alice.complete(ids, max_tokens=1, temperature=0).cached_tokens == _TENANT_TOKENS - 1
            time.sleep(_SETTLE_SECONDS)
            reply = bob.complete(ids if of_alice else prompt(), max_tokens=1, temperature=0)
            hits.append(reply.cached_tokens)
            return reply.first_token_seconds

        sides = {"other": partial(first_token, True), "new": partial(first_token, False)}
        interleaved(sides, 2)
        seconds = interleaved(sides, 2 * pairs)  # a prefill varies by a tenth from run to run
    found = ratios(seconds["other"], seconds["new"])
    return {
        "cross_tenant_ratio": round(
            statistics.median(seconds["other"]) / statistics.median(seconds["new"]), 4
        ),
        "cross_tenant_interval95": [round(one, 4) for one in interval(found)],
        "cross_tenant_hit_tokens": sum(hits),
    }


def _warm(text: _Text, place: _Place) -> dict[str, Any]:
    """`kvass warm` on a code base, a question over it, one line changed at its end, and again."""
    settings = place.settings()
    code, out = place.code_base(text.folder)
    first = place.warm(code, out, settings)
    context = Path(first["contexts"][-1]["text"]).read_text()
    with place.server(settings) as url:
        reply = Client(url).chat(_messages(context, "What does this code do?"), max_tokens=8, temperature=0)
    last = code / first["contexts"][-1]["files"][-1]
    lines = last.read_text().splitlines(keepends=True)
    last.write_text("".join([*lines[:-1], lines[-1].rstrip("\n") + "  # changed\n"]))
    again = place.warm(code, out, settings)
    return {
        "warm_tokens": first["tokens"],
        "warm_seconds": first["seconds"],
        "warm_question_cached_share": round(reply.cached_tokens / reply.prompt_tokens, 4),
        "warm_question_ttft_seconds": round(reply.first_token_seconds, 4),
        "rewarm_share": again["read_share"],
        "rewarm_tokens": again["read_tokens"],
    }
