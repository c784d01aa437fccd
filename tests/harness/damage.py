"""A tier with a little of everything, harm done to it, and how it must be used afterwards."""

import contextlib
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from kvass.cache import KVCache
from kvass.chunks import Tokens
from kvass.fingerprints import SHORTEST
from kvass.keys import address
from kvass.tiers.base import Child
from kvass.tiers.directory import DirectoryTier

from .consistency import Rows, opened, rows_of
from .kv import CHUNK, borrow, load, namespace, store, text

BUDGET = 64 << 20
SPACE = namespace()
OTHER_SPACE = namespace(tenant="another")
TEXTS = [text(family, branch, 30 + 9 * family + 5 * branch) for family in range(6) for branch in range(3)]
LONG = text(9, 0, 800)
"""Its chunks have more tokens than a row of the tree holds."""
LONG_CHUNK = 400


def cache_over(path: Path, chunk: int = CHUNK) -> KVCache:
    """A cache over one directory tier."""
    return KVCache([DirectoryTier(path, BUDGET, name="harmed")], chunk_tokens=chunk)


def fill(path: Path) -> Rows:
    """Store the texts, in two namespaces and two chunk sizes. What the index then holds."""
    with cache_over(path) as cache:
        for tokens in TEXTS:
            store(cache, tokens, SPACE)
        store(cache, TEXTS[0], OTHER_SPACE)
        store(cache, text(20, 0, 60), SPACE)
        cache.forget(text(20, 0, 60), SPACE)
        cache.flush()
    with cache_over(path, LONG_CHUNK) as cache:
        store(cache, LONG, OTHER_SPACE)
    return rows_at(path)


def rows_at(path: Path) -> Rows:
    """What the index of a tier that nobody uses holds."""
    with opened(path, BUDGET) as tier:
        return rows_of(tier._live())


def found(cache: KVCache) -> list[int]:
    """How much of each text can be loaded. Whatever that is, it is right: else AssertionError."""
    return [load(cache, tokens, SPACE) for tokens in TEXTS] + [load(cache, TEXTS[0], OTHER_SPACE)]


ALL = [tokens.size for tokens in TEXTS] + [TEXTS[0].size]


def answers(tier: DirectoryTier) -> list[Child | None]:
    """`nearest_child` of many places: behind each stored prefix, for text that is there and text that is not.

    Without the address where several children agree equally long.
    """
    from kvass.keys import chain

    given: list[Child | None] = []
    for tokens in [*TEXTS, *(text(family, 7, 90) for family in range(8))]:
        root = SPACE.root()
        keys = [root, *chain(root, tokens, CHUNK)]
        for number, key in enumerate(keys):
            child = tier.nearest_child(address(key, 0), _rest(tokens, number))
            given.append(child and child._replace(address=b"", length=0))
    return given


def _rest(tokens: Tokens, chunks: int) -> Tokens:
    return tokens[chunks * CHUNK :][:CHUNK]


def use(path: str, expected: str, harm_while_open: str = "") -> None:
    """In a process of its own: load everything, store, keep house, load again. Fails on any wrong answer.

    `expected`: 'heals' if everything must be there in the end.
    """
    with cache_over(Path(path)) as cache:
        if harm_while_open:
            assert found(cache) == ALL
            HARMS[harm_while_open](Path(path) / "index" / "data.mdb")
        found(cache)
        new = text(30, 0, 40)
        store(cache, new, SPACE)
        assert load(cache, new, SPACE) in (0, 32, 40)
        cache._keep_house()
        cache._keep_house()
        cache.flush()
        lengths = found(cache)
        moved = [borrow(cache, tokens[1:], SPACE) for tokens in TEXTS]
        store(cache, new, SPACE)
        assert load(cache, new, SPACE) == new.size or expected != "heals"
    if expected == "heals":
        assert lengths == ALL
        assert moved == [tokens.size - 1 if tokens.size > SHORTEST else 0 for tokens in TEXTS]


def _truncate(to: Callable[[int], int]) -> Callable[[Path], None]:
    return lambda file: os.truncate(file, to(file.stat().st_size))


def garbage(page: int, seed: int, *, zeros: bool = False) -> Callable[[Path], None]:
    """Overwrite one page."""

    def harm(file: Path) -> None:
        with file.open("r+b") as handle:
            handle.seek(page * 4096)
            handle.write(bytes(4096) if zeros else random.Random(seed).randbytes(4096))

    return harm


def _delete(*files: Path) -> None:
    for file in files:
        file.unlink()


HARMS: dict[str, Callable[[Path], None]] = {
    "data file deleted": lambda file: file.unlink(),
    "lock file deleted": lambda file: (file.parent / "lock.mdb").unlink(),
    "both deleted": lambda file: _delete(file, file.with_name("lock.mdb")),
    "folder deleted": lambda file: shutil.rmtree(file.parent),
    "emptied": _truncate(lambda size: 0),
    "cut to one page": _truncate(lambda size: 4096),
    "cut to two pages": _truncate(lambda size: 8192),
    "cut to 100 bytes": _truncate(lambda size: 100),
    "cut by half": _truncate(lambda size: size // 2),
    "cut by one page": _truncate(lambda size: size - 4096),
    "cut by ten pages": _truncate(lambda size: size - 40960),
    "cut by one byte": _truncate(lambda size: size - 1),
    "both meta pages garbage": lambda file: [garbage(page, page)(file) for page in (0, 1)] and None,
    "first meta page garbage": garbage(0, 1),
    "second meta page garbage": garbage(1, 1),
    "first meta page zeros": garbage(0, 1, zeros=True),
    "all garbage": lambda file: file.write_bytes(random.Random(1).randbytes(file.stat().st_size)) and None,
    "text": lambda file: file.write_text("this is no index\n" * 1000) and None,
    "lock file emptied": lambda file: os.truncate(file.parent / "lock.mdb", 0),
}


def descriptors_below(path: Path) -> list[str]:
    """Files below a directory that this process has open."""
    there = []
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{entry}")
            if target.startswith(str(path) + "/"):
                there.append(target)
    return there
