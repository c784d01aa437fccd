"""Redis or Valkey as a store: an object is a manifest and parts, so that half of one is a miss.

`kvass:<name>` holds the manifest, `kvass:<name>:<write>:<number>` the parts. Parts come first and expire
soon; the manifest makes them an object, unless another write was there before; only then do they stay.
"""

import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Self

import msgspec

from kvass.config import Settings
from kvass.container import Buffer
from kvass.errors import CorruptObjectError, TierError, TierFullError, TierUnavailableError
from kvass.tiers.redis.address import Address
from kvass.tiers.redis.advice import advice
from kvass.tiers.redis.link import Command, Link, facts
from kvass.tiers.store import Fetched, Held, Listed, Store

_PREFIX = "kvass:"
"""Begins every key, since a server may have other users."""

_PART_BYTES = 1 << 20
"""No server refuses a value of this size, and larger ones are read more slowly."""

_PARTS_AT_ONCE = 8
"""Parts of one round trip: what a server has to buffer for one reader."""

_NAMES_AT_ONCE = 1000

_UNFINISHED_SECONDS = 600
"""What a write that ended half way leaves is gone after this time."""

_MANIFEST_BYTES = 1024
"""More than any has: what is longer is none, and is not read to its end."""

_DELETE_IF_SAME = f"""
if redis.call('GETRANGE', KEYS[1], 0, {_MANIFEST_BYTES - 1}) == ARGV[1] then
  return redis.call('DEL', KEYS[1])
end
return 0
"""


def _key(name: str) -> str:
    return _PREFIX + name


class _Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What stands under an object's name: bytes, bytes of each part but the last, seconds since the epoch.

    The bounds are those of a manifest that anyone may have written: no more than 16,384 parts.
    """

    write: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
    size: Annotated[int, msgspec.Meta(ge=0, le=16 << 30)]
    part: Annotated[int, msgspec.Meta(ge=1 << 20, le=512 << 20)]
    created: float

    def parts(self, name: str) -> list[tuple[str, int]]:
        """Key and bytes of each part."""
        return [
            (f"{_key(name)}:{self.write}:{number}", min(self.part, self.size - start))
            for number, start in enumerate(range(0, self.size, self.part))
        ]


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(_Manifest)


def _manifest(raw: bytes) -> _Manifest | None:
    try:
        return _decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


class RedisStore(Store):
    """Objects in a Redis server or cluster."""

    def __init__(self, link: Link, ttl_seconds: int):
        self._link = link
        self._ttl = ttl_seconds

    def __repr__(self) -> str:
        return f"RedisStore({self._link.address})"

    @classmethod
    def open(cls, settings: Settings) -> Self:
        return cls(Link(Address.read(settings), settings.remote_call_seconds), settings.redis_ttl_seconds)

    # -- reading --------------------------------------------------------------------------------------

    def exists(self, names: Sequence[str]) -> list[bool]:
        """By manifests: that a part was evicted, `get` finds, and removes the manifest."""
        return [bool(reply) for reply in self._link.exchange([("EXISTS", _key(name)) for name in names])]

    def get(self, name: str, limit: int) -> Fetched:
        raw, manifest = self._read(name)
        if manifest.size > limit:
            raise CorruptObjectError(f"object {name} has {manifest.size} bytes, more than the {limit} it may")
        wanted = manifest.parts(name)
        found: list[Buffer] = []
        for first in range(0, len(wanted), _PARTS_AT_ONCE):
            group = wanted[first : first + _PARTS_AT_ONCE]
            replies = self._link.exchange([("GET", key) for key, _ in group])
            if [size for _, size in group] != [-1 if reply is None else len(reply) for reply in replies]:
                self._remove([(name, raw)])
                raise KeyError(name)
            found += map(memoryview, replies)
        return Fetched(found)

    def head(self, name: str, size: int) -> tuple[int, Buffer]:
        raw, manifest = self._read(name)
        found = bytearray()
        wanted = min(size, manifest.size)
        for key, length in manifest.parts(name):
            more = min(length, wanted - len(found))
            if more <= 0:
                break
            reply = self._link.exchange([("GETRANGE", key, 0, more - 1)])[0]
            if len(reply) != more:
                self._remove([(name, raw)])
                raise KeyError(name)
            found += reply
        return manifest.size, memoryview(found)

    def _read(self, name: str) -> tuple[bytes, _Manifest]:
        raw = self._raw([name])[0]
        if not raw:
            raise KeyError(name)
        manifest = _manifest(raw)
        if manifest is None:
            raise CorruptObjectError(f"what Redis holds as {name} is no object of kvass")
        return raw, manifest

    def _raw(self, names: Sequence[str]) -> list[bytes]:
        """Manifests as they are stored; empty: not there."""
        return self._link.exchange([("GETRANGE", _key(name), 0, _MANIFEST_BYTES - 1) for name in names])

    # -- writing --------------------------------------------------------------------------------------

    def put(self, name: str, parts: Sequence[Buffer]) -> bool:
        if self._is_whole(name):
            return False
        views = [memoryview(part).cast("B") for part in parts if memoryview(part).nbytes]
        size = sum(map(len, views))
        manifest = _Manifest(secrets.token_hex(16), size, _PART_BYTES, time.time())
        keys = [key for key, _ in manifest.parts(name)]
        raw = _encoder.encode(manifest)
        try:
            commands: list[Command] = []
            for key, body in zip(keys, _cut(views), strict=True):
                commands.append(("SET", key, body, "EX", _UNFINISHED_SECONDS))
                if len(commands) == _PARTS_AT_ONCE:
                    self._link.exchange(commands)
                    commands = []
            self._link.exchange(commands)
            if self._publish(name, keys, raw):
                return True
        except TierUnavailableError:
            raise  # what is there expires; a server that does not answer is not waited for twice
        except TierError:
            self._remove([(name, raw)])
            raise
        self._remove([(name, raw)])
        return False

    def _publish(self, name: str, keys: Sequence[str], raw: bytes) -> bool:
        # the manifest expires too until its parts do not: a writer that dies here leaves nothing for long
        if self._link.exchange([("SET", _key(name), raw, "NX", "EX", _UNFINISHED_SECONDS)])[0] is None:
            return False
        if not all(self._link.exchange([self._stay(key) for key in (*keys, _key(name))])):
            raise TierFullError(f"Redis at {self._link.address} evicted {name} while it was written")
        return True

    def _stay(self, key: str) -> Command:
        return ("EXPIRE", key, self._ttl) if self._ttl else ("PERSIST", key)

    def _is_whole(self, name: str) -> bool:
        """Whether the object is there; what is left of one that is not whole is removed."""
        manifest_at = _key(name)
        there, raw = self._link.exchange(
            [("EXISTS", manifest_at), ("GETRANGE", manifest_at, 0, _MANIFEST_BYTES - 1)]
        )
        if not there:
            return False
        manifest = _manifest(raw)
        if manifest is not None:
            parts = manifest.parts(name)
            if self._link.exchange([("STRLEN", key) for key, _ in parts]) == [size for _, size in parts]:
                return True
        self._remove([(name, raw)])
        return False

    # -- deleting -------------------------------------------------------------------------------------

    def delete(self, names: Sequence[str]) -> int:
        count = 0
        for first in range(0, len(names), _NAMES_AT_ONCE):
            some = names[first : first + _NAMES_AT_ONCE]
            count += self._remove(list(zip(some, self._raw(some), strict=True)))
        return count

    def _remove(self, manifests: Sequence[tuple[str, bytes]]) -> int:
        """Delete the objects that these manifests make, none that was written since; how many went.

        Parts go first: whoever reads meanwhile finds one missing, and a call that ends here leaves none.
        """
        parts: list[tuple[str, int]] = []
        for name, raw in manifests:
            if manifest := _manifest(raw):
                parts += manifest.parts(name)
        self._link.exchange([("UNLINK", key) for key, _ in parts])
        return sum(
            self._link.exchange([("EVAL", _DELETE_IF_SAME, 1, _key(name), raw) for name, raw in manifests])
        )

    # -- all of it ------------------------------------------------------------------------------------

    def list(self, prefix: str) -> Iterator[Listed]:
        seen: set[str] = set()
        for page in self._link.scan(f"{_key(prefix)}*"):
            keys = [key.decode("ascii", "replace").removeprefix(_PREFIX) for key in page]
            names = [key for key in dict.fromkeys(keys) if ":" not in key and key not in seen]
            seen.update(names)
            for name, raw in zip(names, self._raw(names), strict=True):
                manifest = _manifest(raw)
                if manifest is not None:
                    yield Listed(name, manifest.size, manifest.created)
                elif raw:
                    yield Listed(name, len(raw), 0)

    def held(self) -> Held:
        """Keys, not objects, are counted: one is a manifest or a part."""
        replies = self._link.everywhere([("INFO", "memory"), ("DBSIZE",)])
        memory = [facts(info) for info, _ in replies]
        budgets = [int(one.get("maxmemory", 0)) for one in memory]
        return Held(
            sum(int(one.get("used_memory", 0)) for one in memory),
            sum(budgets) if all(budgets) else -1,
            sum(int(keys) for _, keys in replies),
        )

    def advice(self) -> Iterator[tuple[str, str | None]]:
        return advice(self._link, self._ttl)

    def maintain(self) -> None:
        self._link.end_late()

    def close(self) -> None:
        self._link.close()


def _cut(views: Sequence[Buffer]) -> Iterator[Buffer | bytes]:
    """The bytes in parts of `_PART_BYTES`: where one buffer has them all, they are not copied."""
    gathered: list[Buffer] = []
    room = _PART_BYTES
    for view in views:
        rest = view
        while len(rest) >= room:
            gathered.append(rest[:room])
            yield gathered[0] if len(gathered) == 1 else b"".join(gathered)
            rest, gathered, room = rest[room:], [], _PART_BYTES
        if rest:
            gathered.append(rest)
            room -= len(rest)
    if gathered:
        yield gathered[0] if len(gathered) == 1 else b"".join(gathered)
