"""Mooncake Store as a store: objects in the memory that its members lend, found by a master.

This process joins as a member and lends `mooncake_bytes`; what it holds for others goes when it ends.
Nothing is kept over a restart of the master either: members come back within seconds, objects do not.
Mooncake lists nothing to its members, so `list` yields nothing. Its master evicts what was not asked for
lately.

An object begins with a stamp that no other write has. It is read before and after the rest: what was
deleted meanwhile, and its memory given to the next object, is a miss and never a mixture of both.

TCP is tested; RDMA (`mooncake_protocol`) goes the same way and is not.
"""

import contextlib
import os
import secrets
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from math import inf
from typing import Self

from kvass.config import Settings
from kvass.container import Buffer
from kvass.errors import CorruptObjectError, KvassError, TierUnavailableError
from kvass.tiers.mooncake.blocks import BLOCK_BYTES, REST_SECONDS, Block, filled
from kvass.tiers.mooncake.codes import BrokenOffError, Codes, translated
from kvass.tiers.mooncake.member import Member, Membership
from kvass.tiers.store import Fetched, Held, Listed, Store

_STAMP = struct.Struct("<8s16sQ")
"""Magic, random bytes, and how many bytes follow."""
_MAGIC = b"kvassmc1"
_NAMES_AT_ONCE = 1000
_BLOCKS_AT_ONCE = 4
"""Of one write: what is copied before it is sent."""


class MooncakeStore(Store):
    """Objects of the default tenant of one Mooncake master."""

    def __init__(self, membership: Membership):
        self._membership = membership
        self._guard = threading.Lock()
        self._taken: dict[str, float] = {}
        """Names that are written here, and for a while those whose write broke off: until when."""

    @classmethod
    def open(cls, settings: Settings) -> Self:
        return cls(Membership.read(settings))

    def __repr__(self) -> str:
        return f"MooncakeStore({self._membership.master})"

    # -- reading --------------------------------------------------------------------------------------

    def exists(self, names: Sequence[str]) -> list[bool]:
        found: list[bool] = []
        with self._membership.using() as member:
            for first in range(0, len(names), _NAMES_AT_ONCE):
                for code in member.client.batch_is_exist(list(names[first : first + _NAMES_AT_ONCE])):
                    if code < 0:
                        raise translated(code, "look for objects")
                    found.append(code == 1)
        return found

    def get(self, name: str, limit: int) -> Fetched:
        with self._membership.using() as member, contextlib.ExitStack() as held:
            parts = held.enter_context(_opened(member, name, limit=limit))[1]
            return Fetched(parts, held.pop_all().close)

    def head(self, name: str, size: int) -> tuple[int, Buffer]:
        with self._membership.using() as member, _opened(member, name, most=size) as (found, parts):
            return found, memoryview(b"".join(parts))

    # -- writing --------------------------------------------------------------------------------------

    def put(self, name: str, parts: Sequence[Buffer]) -> bool:
        size = sum(part.nbytes for part in parts)
        stamped = [memoryview(_STAMP.pack(_MAGIC, secrets.token_bytes(16), size)), *parts]
        with self._guard:
            until = self._taken.get(name, 0.0)
            if until == inf:
                return False
            if time.monotonic() < until:
                raise TierUnavailableError(f"cannot write {name}: the last write of it broke off just now")
            self._taken[name] = inf
        until = 0.0
        try:
            with self._membership.using() as member:
                return _write(member, name, _STAMP.size + size, stamped)
        except BrokenOffError:
            until = time.monotonic() + REST_SECONDS
            raise
        finally:
            with self._guard:
                del self._taken[name]
                if until:
                    now = time.monotonic()
                    self._taken = {one: end for one, end in self._taken.items() if end > now}
                    self._taken[name] = until

    def delete(self, names: Sequence[str]) -> int:
        """Also what somebody reads at the moment, which Mooncake would otherwise keep for some seconds."""
        count = 0
        with self._membership.using() as member:
            for first in range(0, len(names), _NAMES_AT_ONCE):
                for code in member.client.batch_remove(list(names[first : first + _NAMES_AT_ONCE]), True):
                    if code not in (0, *Codes.ABSENT):
                        raise translated(code, "delete objects")
                    count += code == 0
        return count

    # -- the whole ------------------------------------------------------------------------------------

    def list(self, prefix: str) -> Iterator[Listed]:
        """Nothing: Mooncake tells its members no names."""
        self._membership.check()
        return iter(())

    def held(self) -> Held:
        self._membership.check()
        return Held(-1, -1, -1)

    def advice(self) -> Iterator[tuple[str, str | None]]:
        self._membership.check()
        probe = f"kvass-doctor-{os.urandom(8).hex()}"
        yield from self._membership.advice()
        try:
            self.exists([probe])
            yield f"the Mooncake master at {self._membership.master} answers", None
            self.put(probe, [memoryview(b"first")])
            try:
                fetched = self.get(probe, 5)
                same = b"".join(fetched.parts) == b"first"
                fetched.release()
                fix = None if same else "stop using it: look for another program that writes the same names"
                yield "an object was written and read", fix
                if self.put(probe, [memoryview(b"second")]):
                    yield "an object could be replaced", "update Mooncake to 0.3.13 or later"
            finally:
                self.delete([probe])
        except (KvassError, KeyError) as error:
            found, _, remedy = str(error).partition("; ")
            yield found, remedy or "see the master's log"

    def close(self) -> None:
        self._membership.close()


def _fetch(member: Member, name: str, blocks: Sequence[Block], start: int, lengths: list[int]) -> None:
    """Bytes from `start` on, into the blocks: so many each, as one answer of the master places them."""
    starts = [start + number * BLOCK_BYTES for number in range(len(blocks))]
    replies = member.client.get_into_ranges(
        [block.address for block in blocks],
        [[name]] * len(blocks),
        [[[0]]] * len(blocks),
        [[[one]] for one in starts],
        [[[one]] for one in lengths],
    )
    codes = [int(reply[0][0]) for reply in replies]
    failed = [code for code, length in zip(codes, lengths, strict=True) if code != length]
    for code in sorted(failed, key=lambda code: code not in Codes.BROKEN_OFF):
        if code in Codes.ABSENT or code == Codes.WRONG_CALL:
            raise KeyError(name)  # or it is too short for this, and none of ours
        raise translated(code, f"read {name}")


def _stamp(member: Member, name: str, block: Block) -> bytes:
    _fetch(member, name, [block], 0, [_STAMP.size])
    return bytes(block.view[: _STAMP.size])


@contextlib.contextmanager
def _opened(
    member: Member, name: str, limit: int | None = None, most: int | None = None
) -> Iterator[tuple[int, list[Buffer]]]:
    """An object's size, and its bytes (the first `most`) in parts, which are valid until the end."""
    with contextlib.ExitStack() as held:
        with member.blocks.lent(1) as (block,):
            stamp = _stamp(member, name, block)
            magic, _, size = _STAMP.unpack(stamp)
            if magic != _MAGIC:
                raise CorruptObjectError(f"what Mooncake holds as {name} is no object of kvass")
            if limit is not None and size > limit:
                raise CorruptObjectError(f"{name} has {size} bytes, more than {limit}")
            wanted = size if most is None else min(size, most)
            lengths = [min(BLOCK_BYTES, wanted - start) for start in range(0, wanted, BLOCK_BYTES)]
            blocks = held.enter_context(member.blocks.lent(len(lengths)))
            if blocks:
                _fetch(member, name, blocks, _STAMP.size, lengths)
                if _stamp(member, name, block) != stamp:
                    raise KeyError(name)
        yield size, [one.view[:length] for one, length in zip(blocks, lengths, strict=True)]


def _write(member: Member, name: str, size: int, parts: Sequence[Buffer]) -> bool:
    client = member.client
    started = client.batch_put_session_start([name], [size])[0]
    if started == Codes.WRONG_CALL:
        # one of ours that could be neither ended nor revoked, as the master was away
        client.batch_put_session_revoke([name])
        started = client.batch_put_session_start([name], [size])[0]
    if started == Codes.EXISTS:
        return False  # or somebody writes it; if they died, the master frees the name after half a minute
    if started:
        raise translated(started, f"write {name}")
    try:
        _send(member, name, size, parts)
        code = client.batch_put_session_end([name])[0]
        if code:
            raise translated(code, f"write {name}")
    except TierUnavailableError:
        # Not revoked: that gives the room to others, and what is late would be written over their objects.
        # The master frees the name, and much later the room, by itself.
        raise
    except BaseException:
        client.batch_put_session_revoke([name])
        raise
    return True


def _send(member: Member, name: str, size: int, parts: Sequence[Buffer]) -> None:
    with member.blocks.lent(min(_BLOCKS_AT_ONCE, -(-size // BLOCK_BYTES))) as blocks:
        offset = 0
        for lengths in filled(blocks, parts):
            starts = [offset + number * BLOCK_BYTES for number in range(len(lengths))]
            addresses = [block.address for block in blocks[: len(lengths)]]
            write = member.client.batch_put_from_multi_buffer_ranges
            (sent,) = write([name], [addresses], [lengths], [starts])
            if sent != sum(lengths):
                raise translated(sent, f"write {name}")
            offset += sent
