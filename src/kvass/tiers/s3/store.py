"""The S3 store: whole objects below a prefix of a bucket, on Amazon's or any S3-compatible server."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Self, TypeVar

from kvass.config import Settings
from kvass.container import Buffer
from kvass.errors import CorruptObjectError, TierError, TierUnavailableError
from kvass.tiers.s3.bucket import Target, open_bucket, status_of, translated
from kvass.tiers.store import Fetched, Held, Listed, Store
from kvass.workers import Workers

if TYPE_CHECKING:
    from obstore import GetOptions
    from obstore.store import S3Store as Bucket

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")

_PART_BYTES = 8 << 20
"""Read in one request; what is bigger is read in parts of this size, several at once."""
_READERS = 8
_ASKERS = 32
_PAGE_OBJECTS = 1000


class S3Store(Store):
    """Objects of one bucket. Written by one conditional request each, so that none is ever half there.

    A server that refuses conditional writes is asked first whether the name is there. There, and where they
    are ignored, an object may be replaced by another of the same address; readers verify all they read.
    """

    _runtime: ClassVar[int] = 0
    """The process that has the library's threads: started once, and waited for for ever in a fork."""

    def __init__(self, target: Target, bucket: "Bucket", seconds: float):
        """`seconds`: how long one request, and one read of many, may take."""
        self._target = target
        self._bucket = bucket
        self._seconds = seconds
        self._pid = os.getpid()
        self._closed = False
        self._conditional = True
        self._readers = Workers(_READERS, "kvass-s3-read")
        # Apart from the readers: a lookup waits for no one's download.
        self._askers = Workers(_ASKERS, "kvass-s3-ask")

    @classmethod
    def open(cls, settings: Settings) -> Self:
        target, bucket = open_bucket(settings)
        return cls(target, bucket, settings.remote_call_seconds)

    def __repr__(self) -> str:
        return f"S3Store({self._target})"

    # -- one request, and several ---------------------------------------------------------------------

    def _live(self) -> None:
        pid = os.getpid()
        if self._pid != pid:
            raise TierUnavailableError(f"{self._target} was opened before a fork; open it again")
        if self._closed:
            raise TierUnavailableError(f"{self._target} is closed")
        S3Store._runtime = S3Store._runtime or pid
        if S3Store._runtime != pid:
            raise TierUnavailableError(
                f"{self._target} cannot be used in a process forked from one that uses S3; start it by spawn"
            )

    def _spread(
        self, workers: Workers, call: Callable[[Asked], Answer], items: Sequence[Asked], began: float
    ) -> list[Answer]:
        """The answers, in order. Raises what the first call that failed did."""
        end = began + self._seconds
        futures = [workers.submit(partial(call, item)) for item in items]
        try:
            return [future.result(max(0.0, end - time.monotonic())) for future in futures]
        except TimeoutError:
            raise TierUnavailableError(f"{self._target} did not answer within {self._seconds:g} s") from None
        finally:
            for future in futures:
                future.cancel()

    @contextlib.contextmanager
    def _asking(self, what: str, *, reading: bool = False) -> Iterator[None]:
        """Raises errors of kvass for the library's; KeyError only while reading."""
        from obstore.exceptions import BaseError

        self._live()
        try:
            yield
        except (BaseError, FileNotFoundError) as error:
            failed = f"{self._target}: cannot {what}"
            raise translated(error, failed, self._seconds, reading=reading) from None
        except BaseException as error:
            # The library panics where it is given what it does not expect; its panics are no Exception.
            if type(error).__name__ != "PanicException":
                raise
            raise TierError(f"{self._target}: cannot {what}; correct the AWS_* variables") from None

    # -- reading --------------------------------------------------------------------------------------

    def exists(self, names: Sequence[str]) -> list[bool]:
        self._live()
        if len(names) == 1:
            return [self._is_there(names[0])]
        return self._spread(self._askers, self._is_there, names, time.monotonic())

    def _is_there(self, name: str) -> bool:
        import obstore

        try:
            with self._asking(f"look for {name}", reading=True):
                obstore.head(self._bucket, name)
        except KeyError:
            return False
        return True

    def get(self, name: str, limit: int) -> Fetched:
        began = time.monotonic()
        size, tag, first = self._first(name, _PART_BYTES, limit)

        def rest(start: int) -> Buffer:
            return self._range(name, start, min(start + _PART_BYTES, size), size, tag)

        starts = range(len(first), size, _PART_BYTES)
        return Fetched([first, *self._spread(self._readers, rest, starts, began)])

    def head(self, name: str, size: int) -> tuple[int, Buffer]:
        found, _, first = self._first(name, max(size, 1))
        return found, first[:size]

    def _first(self, name: str, most: int, limit: int | None = None) -> tuple[int, str | None, Buffer]:
        """An object's size, its tag and its first `most` bytes; none are read of what is above the limit."""
        import obstore

        with self._asking(f"read {name}", reading=True):
            try:
                result = obstore.get(self._bucket, name, options={"range": (0, most)})
            except obstore.exceptions.GenericError as error:
                if status_of(error) != 416:
                    raise
                if obstore.head(self._bucket, name)["size"]:
                    raise CorruptObjectError(f"{name} has bytes, but the first are not to be had") from None
                return 0, None, memoryview(b"")  # of no bytes there is no range
            size, tag = result.meta["size"], result.meta["e_tag"]
            if limit is not None and size > limit:
                raise CorruptObjectError(f"{name} has {size} bytes, more than {limit}")
            body = memoryview(result.bytes())
        if len(body) != min(most, size):
            raise CorruptObjectError(f"{name}: {len(body)} bytes came instead of {min(most, size)}")
        # A weak tag matches nothing; servers that compress, and proxies, make such.
        return size, None if tag is None or tag.startswith("W/") else tag, body

    def _range(self, name: str, start: int, end: int, size: int, tag: str | None) -> Buffer:
        import obstore

        with self._asking(f"read {name}", reading=True):
            options: GetOptions = {"range": (start, end)}
            if tag:
                options["if_match"] = tag
            result = obstore.get(self._bucket, name, options=options)
            if result.meta["size"] != size:
                raise CorruptObjectError(f"{name} has {result.meta['size']} bytes, and had {size} before")
            body = memoryview(result.bytes())
        if len(body) != end - start:
            raise CorruptObjectError(f"{name}: {len(body)} bytes came instead of {end - start}")
        return body

    # -- writing --------------------------------------------------------------------------------------

    def put(self, name: str, parts: Sequence[Buffer]) -> bool:
        import obstore

        held = [part.cast("B") for part in parts if part.nbytes]
        with self._asking(f"write {name}"):
            # In one request whatever the size: uploads in parts are not conditional, and what is left of
            # one that failed stays, unseen and paid for.
            if self._conditional:
                try:
                    obstore.put(self._bucket, name, held, mode="create", use_multipart=False)
                    return True
                except obstore.exceptions.BaseError as error:
                    if status_of(error) == 412:
                        return False
                    if status_of(error) != 501:
                        raise
                    self._conditional = False
            if self._is_there(name):
                return False
            obstore.put(self._bucket, name, held, use_multipart=False)
        return True

    def delete(self, names: Sequence[str]) -> int:
        import obstore

        # Servers answer the same whether an object was there or not.
        found = [name for name, there in zip(names, self.exists(names), strict=True) if there]
        if found:
            with self._asking("delete objects"):
                obstore.delete(self._bucket, found)
        return len(found)

    # -- the whole ------------------------------------------------------------------------------------

    def list(self, prefix: str) -> Iterator[Listed]:
        import obstore

        folder = prefix.rpartition("/")[0]
        with self._asking("list objects"):
            for page in obstore.list(self._bucket, folder or None, chunk_size=_PAGE_OBJECTS):
                for one in page:
                    if one["path"].startswith(prefix):
                        yield Listed(one["path"], one["size"], one["last_modified"].timestamp())

    def held(self) -> Held:
        self._live()
        return Held(-1, -1, -1)

    def advice(self) -> Iterator[tuple[str, str | None]]:
        self._live()
        probe = f"kvass-doctor-{os.urandom(8).hex()}"
        try:
            next(self.list(f"{probe}/"), None)
            yield f"{self._target} answers, and lists what it holds", None
            self.put(probe, [memoryview(b"first")])
            yield "objects can be written", None
            try:
                yield from self._look_at(probe)
            finally:
                self.delete([probe])
            yield "objects can be deleted", None
        except (TierError, CorruptObjectError) as error:
            found, _, remedy = str(error).partition("; ")
            yield found, remedy or "see the server's log"

    def _look_at(self, probe: str) -> Iterator[tuple[str, str | None]]:
        twice = self.put(probe, [memoryview(b"second")])
        if twice or not self._conditional:
            yield (
                "the server does not know conditional writes (If-None-Match)",
                "update it; until then who stores the same at once may write it twice, which costs time only",
            )
        else:
            yield "an object is never replaced", None
        try:
            size, begin = self.head(probe, 3)
        except KeyError:
            size, begin = 0, memoryview(b"")
        if (size, bytes(begin)) != ((6, b"sec") if twice else (5, b"fir")):
            yield (
                "an object reads differently than it was written",
                "let no proxy or cache stand before the server",
            )
        else:
            yield "objects, and ranges of them, can be read", None

    def close(self) -> None:
        self._closed = True
        if self._pid == os.getpid():
            for workers in (self._readers, self._askers):
                workers.close(0.0)
