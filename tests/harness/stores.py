"""A store in this process that can be slow, away or broken, for what `RemoteTier` and the cache owe then."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence

from kvass.container import Buffer
from kvass.errors import CorruptObjectError, TierUnavailableError
from kvass.tiers.store import Fetched, Held, Listed, Store


class FaultyStore(Store):
    """A dictionary. `trouble`, if set, is called with each verb before it does anything: it may raise or
    sleep. `calls` counts verbs; `spoil` changes bytes that are read."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.calls: dict[str, int] = {}
        self.names: dict[str, list[int]] = {}
        self.trouble: Callable[[str], None] | None = None
        self.spoil: Callable[[str, bytes], bytes] = lambda name, data: data
        self.running = 0
        self.closed = False
        self._guard = threading.Lock()

    def _begin(self, verb: str, count: int = 1) -> None:
        with self._guard:
            self.calls[verb] = self.calls.get(verb, 0) + 1
            self.names.setdefault(verb, []).append(count)
        if self.trouble is not None:
            self.trouble(verb)

    @classmethod
    def open(cls, settings: object) -> "FaultyStore":
        return cls()

    def exists(self, names: Sequence[str]) -> list[bool]:
        self._begin("exists", len(names))
        return [name in self.objects for name in names]

    def get(self, name: str, limit: int) -> Fetched:
        self._begin("get")
        data = self.spoil(name, self.objects[name])
        if len(data) > limit:
            raise CorruptObjectError("too large")
        half = len(data) // 3
        return Fetched([memoryview(data)[:half], memoryview(data)[half:]])

    def head(self, name: str, size: int) -> tuple[int, Buffer]:
        self._begin("head")
        data = self.objects[name]
        return len(data), memoryview(data)[:size]

    def put(self, name: str, parts: Sequence[Buffer]) -> bool:
        self._begin("put")
        with self._guard:
            new = name not in self.objects
            self.objects.setdefault(name, b"".join(parts))
        return new

    def delete(self, names: Sequence[str]) -> int:
        self._begin("delete")
        return sum(self.objects.pop(name, None) is not None for name in names)

    def list(self, prefix: str) -> Iterator[Listed]:
        self._begin("list")
        for name, data in list(self.objects.items()):
            if name.startswith(prefix):
                yield Listed(name, len(data), 12.0)

    def held(self) -> Held:
        self._begin("held")
        return Held(sum(map(len, self.objects.values())), -1, len(self.objects))

    def advice(self) -> Iterator[tuple[str, str | None]]:
        yield "in this process", None

    def close(self) -> None:
        self.closed = True


def away(verb: str) -> None:
    """A server to which no connection can be made."""
    raise TierUnavailableError("connection refused")


def slow(seconds: float) -> Callable[[str], None]:
    """A server that takes its time."""
    return lambda verb: time.sleep(seconds)
