"""`kvass warm`: reads files into the cache before they are asked about, and again from where they change."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvass.cache import KVCache
from kvass.chunks import Tokens, as_tokens, common_prefix
from kvass.engines.transformers import Engine, LoadedModel, Usage
from kvass.errors import InputError
from kvass.serve.gather import CONTEXT_NAME, Signature, Skipped, Sources
from kvass.serve.pack import Context, Count, pack, read_template
from kvass.serve.prompts import ChatEncoder

_UNLIMITED = 1 << 20
"""Tokens that a model is taken to have room for, where its config does not say."""

_COUNTED_AT_ONCE = 64

Progress = Callable[[int, int], None]
"""Called with the tokens that are done, and those to be done."""


@dataclass(slots=True)
class WarmedContext:
    """What was done for one context.

    `stored_tokens` were there in the end: all, where the tiers have room. `seconds`: of looking up, loading
    and reading. `saves_seconds`: by how much a first question over it starts sooner; None where this run
    read nothing to measure it by. `text`: the file that its text was written to.
    """

    files: list[str]
    tokens: int
    hit_tokens: int = 0
    read_tokens: int = 0
    stored_tokens: int = 0
    seconds: float = 0.0
    saves_seconds: float | None = None
    text: str | None = None

    @property
    def complete(self) -> bool:
        """Whether it was read to its end."""
        return self.hit_tokens + self.read_tokens == self.tokens


@dataclass(slots=True)
class Report:
    """One run. `tokens` are those of all contexts, `contexts` those that it came to; the others are sums
    over these. `read_share`: `read_tokens / tokens`."""

    model: str
    contexts: list[WarmedContext] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    tokens: int = 0
    hit_tokens: int = 0
    read_tokens: int = 0
    read_share: float = 0.0
    seconds: float = 0.0
    saves_seconds: float | None = None
    interrupted: bool = False


class Warmer:
    """Keeps the contexts of some files in a cache; `warm` after each change reads what follows it."""

    def __init__(
        self,
        loaded: LoadedModel,
        engine: Engine,
        cache: KVCache,
        sources: Sources,
        *,
        reserve: int,
        template: Path | None = None,
        out: Path | None = None,
    ):
        """`engine`: of `loaded`, over `cache`. `reserve`: tokens of the model's length for question and
        answer. `out`: directory for the contexts' texts.

        Raises InputError where the model's chat template takes no system message.
        """
        self._loaded = loaded
        self._engine = engine
        self._cache = cache
        self._sources = sources
        self._limit = (engine.max_tokens or _UNLIMITED) - reserve
        self._template = template
        self._out = out
        self._encoder = ChatEncoder(loaded)
        self._check_system_message()

    def warm(self, cancelled: threading.Event, progress: Progress = lambda done, total: None) -> Report:
        """Read what is not stored yet. Setting `cancelled` ends it after a slice; what was read is stored.

        Raises InputError where there is nothing to read, for an unusable template, or where `out` cannot be
        written to.
        """
        began = time.perf_counter()
        files, skipped = self._sources.gather()
        template = read_template(self._template)
        self._make_out()
        contexts = pack(files, template, self._limit, self._encode, _counter(self._loaded.tokenizer))
        report = Report(self._loaded.name, skipped=skipped, tokens=sum(one.tokens.size for one in contexts))
        done, prefill_seconds = 0, 0.0
        for number, context in enumerate(contexts, 1):
            if cancelled.is_set():
                break
            warmed = WarmedContext(context.files, context.tokens.size)
            report.contexts.append(warmed)

            def so_far(n: int, before: int = done) -> None:
                progress(before + n, report.tokens)

            prefill_seconds += self._read(context.tokens, warmed, cancelled, so_far)
            done += warmed.tokens
            if warmed.complete:
                warmed.text = self._write(number, context.text)
        report.interrupted = sum(one.complete for one in report.contexts) < len(contexts)
        self._finish(report, contexts, prefill_seconds)
        report.seconds = round(time.perf_counter() - began, 3)
        return report

    def signature(self) -> Signature:
        """Of files and template as they are now; see `Sources.signature`."""
        return self._sources.signature([self._template] if self._template is not None else [])

    def wait_for_change(self, since: Signature, seconds: float = 1.0) -> None:
        """Look every so many `seconds`; return once something differs from `since` and is still again."""
        while (now := self.signature()) == since:
            time.sleep(seconds)
        while True:
            time.sleep(seconds)
            before, now = now, self.signature()
            if before == now:
                return

    # -- reading --------------------------------------------------------------------------------------

    def _read(
        self,
        tokens: Tokens,
        warmed: WarmedContext,
        cancelled: threading.Event,
        progress: Callable[[int], None],
    ) -> float:
        """Have one context stored, and note what it took. Returns the seconds of prefill."""
        began = time.perf_counter()
        usage = Usage()
        if self._stored(tokens) < tokens.size:
            there = 0

            def note(n: int) -> None:
                nonlocal there
                there = n
                progress(n)

            self._engine.read(tokens, usage=usage, cancelled=cancelled, progress=note)
            if usage.ticket is not None:
                usage.ticket.wait()
            warmed.hit_tokens = usage.cached_tokens
            warmed.read_tokens = max(0, there - usage.cached_tokens)
        else:
            warmed.hit_tokens = tokens.size
            progress(tokens.size)
        warmed.seconds = round(time.perf_counter() - began, 3)
        return usage.prefill_seconds

    def _stored(self, tokens: Tokens) -> int:
        """How many tokens of a context requests would find, lossy ones too where the engine allows these."""
        namespace = self._engine.namespace
        allowed = self._cache.approximations(namespace) if self._engine.allow_lossy else []
        return self._cache.lookup(tokens, namespace, approximate=allowed).length

    def _finish(self, report: Report, contexts: Sequence[Context], prefill_seconds: float) -> None:
        self._cache.flush()
        for warmed, context in zip(report.contexts, contexts, strict=False):
            warmed.stored_tokens = self._stored(context.tokens)
        report.hit_tokens = sum(one.hit_tokens for one in report.contexts)
        report.read_tokens = sum(one.read_tokens for one in report.contexts)
        report.read_share = round(report.read_tokens / report.tokens, 6)
        if report.interrupted:
            return
        self._remove_old(len(contexts))
        if report.read_tokens:
            largest = max((one.tokens for one in contexts), key=len)
            self._estimate(report, prefill_seconds / report.read_tokens, largest)

    def _estimate(self, report: Report, token_seconds: float, largest: Tokens) -> None:
        """What the contexts save: their prefill, less loading them, which is tried with the largest."""
        began = time.perf_counter()
        loaded, _ = self._cache.context(largest, self._engine.namespace)
        saved = token_seconds - (time.perf_counter() - began) / largest.size
        if loaded == largest.size:  # else it was evicted, and saves nothing
            for one in report.contexts:
                one.saves_seconds = round(saved * one.tokens, 3)
            report.saves_seconds = round(saved * report.tokens, 3)

    # -- tokens ---------------------------------------------------------------------------------------

    def _encode(self, text: str) -> Tokens:
        """What chats with this system message have in common, whatever is asked."""
        system = {"role": "system", "content": text}
        one, other = (
            as_tokens(self._encoder.encode([system, {"role": "user", "content": question}]))
            for question in ("a", "b")
        )
        return one[: common_prefix(one, other)]

    def _check_system_message(self) -> None:
        name = self._loaded.name
        try:
            one, other = self._encode("x"), self._encode("y")
        except InputError as error:
            raise InputError(
                f"files go into the system message, which {name} does not take: {error}"
            ) from error
        if one.tolist() == other.tolist():
            raise InputError(f"files go into the system message, which {name}'s chat template leaves out")

    # -- texts ----------------------------------------------------------------------------------------

    def _make_out(self) -> None:
        """Before anything is read, so that a mistake costs nothing."""
        if self._out is not None:
            with _told(self._out):
                self._out.mkdir(parents=True, exist_ok=True)

    def _write(self, number: int, text: str) -> str | None:
        """Put a context's text where clients find it: whole, or not at all."""
        if self._out is None:
            return None
        path = self._out / f"context-{number:03}.txt"
        draft = self._out / f".{path.name}.{os.getpid()}"
        with _told(path):
            if path.is_file() and path.read_bytes() == text.encode():
                return str(path)
            try:
                draft.write_bytes(text.encode())
                draft.replace(path)
            except OSError:
                draft.unlink(missing_ok=True)
                raise
        return str(path)

    def _remove_old(self, count: int) -> None:
        """Texts that an earlier run with more contexts left would be taken for some of these."""
        if self._out is None:
            return
        with _told(self._out):
            for path in self._out.iterdir():
                name = CONTEXT_NAME.fullmatch(path.name)
                if name is not None and int(name[1]) > count:
                    path.unlink(missing_ok=True)


@contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error


def _counter(tokenizer: Any) -> Count:
    def count(texts: list[str]) -> list[int]:
        sizes: list[int] = []
        for start in range(0, len(texts), _COUNTED_AT_ONCE):
            some = texts[start : start + _COUNTED_AT_ONCE]
            ids = tokenizer(some, add_special_tokens=False, split_special_tokens=True, verbose=False)
            sizes += map(len, ids["input_ids"])
        return sizes

    return count
