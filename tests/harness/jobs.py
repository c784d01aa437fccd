"""What the other processes of the concurrency tests do. Messages go through files in a folder."""

import os
import random
import time
from pathlib import Path

from kvass.cache import KVCache
from kvass.errors import TierUnavailableError
from kvass.tiers.directory import DirectoryTier

from .kv import CHUNK, load, namespace, store, text

BIG = namespace(heads=24)
SPACE = namespace()


def say(folder: Path, word: str) -> None:
    """Tell whoever waits for the word."""
    (folder / word).touch()


def wait_for(folder: Path, word: str, seconds: float = 30) -> None:
    """Wait until somebody said it."""
    deadline = time.monotonic() + seconds
    while not (folder / word).exists():
        assert time.monotonic() < deadline, f"nobody said {word!r}"
        time.sleep(0.001)


def cache_over(path: Path, budget: int) -> KVCache:
    """A cache over one directory tier."""
    return KVCache([DirectoryTier(path, budget, name="shared")], chunk_tokens=CHUNK, store_deadline=60)


def write_for(path: str, budget: int, seed: int, seconds: float) -> None:
    """Store new sequences all the time."""
    dice = random.Random(seed)
    end = time.monotonic() + seconds
    with cache_over(Path(path), budget) as cache:
        while time.monotonic() < end:
            family, branch, length = dice.randrange(400), dice.randrange(3), dice.randrange(20, 200)
            store(cache, text(family, branch, length), BIG)
            if dice.random() < 0.2:
                store(cache, text(family, branch, length + 5), BIG)
            if dice.random() < 0.1:
                cache.forget(text(family, branch, length), BIG)


def store_the_same(path: str, budget: int, folder: str, name: str) -> None:
    """Store a few sequences as soon as all are ready to, and say how many objects went in."""
    signals = Path(folder)
    with cache_over(Path(path), budget) as cache:
        say(signals, f"{name}-ready")
        wait_for(signals, "go")
        objects = 0
        for family in range(10):
            objects += store(cache, text(family, 0, 150), BIG)
            assert load(cache, text(family, 0, 150), BIG) <= 150
    (signals / f"{name}-objects").write_text(str(objects))


def fill_up(path: str, budget: int, first: int, count: int) -> None:
    """Store so much that everything that may be evicted is."""
    with cache_over(Path(path), budget) as cache:
        for family in range(first, first + count):
            store(cache, text(family, 0, 150), BIG)


def hold_lease(path: str, budget: int, folder: str) -> None:
    """Lease a sequence until killed."""
    with cache_over(Path(path), budget) as cache:
        tier = cache.tiers[0]
        pieces = cache.lookup(text(0, 0, 60), BIG).pieces(unseen=True)
        lease = tier.lease([piece.address for piece in pieces], 1000)
        assert len(lease.addresses) == len(pieces)
        say(Path(folder), "leased")
        time.sleep(1000)


def hold_write_lock(path: str, budget: int, folder: str) -> None:
    """Stand in a write transaction until killed."""
    tier = DirectoryTier(Path(path), budget, name="holder")
    with tier._live().write():
        say(Path(folder), "locked")
        time.sleep(1000)


def fork_while_open(path: str, budget: int, folder: str) -> None:
    """Open, store, fork; the child finds everything closed and opens anew; the parent goes on."""
    signals = Path(folder)
    cache = cache_over(Path(path), budget)
    tier = cache.tiers[0]
    tokens = text(0, 0, 60)
    store(cache, tokens, SPACE)
    lease = tier.lease([piece.address for piece in cache.lookup(tokens, SPACE).pieces()], 100)
    pid = os.fork()
    if not pid:
        code = 1
        try:
            _child(cache, tier, Path(path), budget)
            code = 0
        except BaseException as error:  # noqa: BLE001 - nothing may get out of a forked child
            (signals / "error").write_text(repr(error))
        finally:
            os._exit(code)
    for family in range(1, 6):  # while the child is at it
        store(cache, text(family, 0, 60), SPACE)
        assert load(cache, text(family, 0, 60), SPACE) == 60
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    cache._keep_house()
    assert load(cache, tokens, SPACE) == 60
    assert load(cache, text(77, 0, 60), SPACE) == 60, "what the child stored"
    assert os.path.exists(tier._owner.folder)  # type: ignore[attr-defined]
    for one in lease.addresses:
        assert tier._path(one).stat().st_nlink == 2  # type: ignore[attr-defined]
    lease.close()
    cache.close()
    assert os.listdir(Path(path) / "owners") == []


def _child(cache: KVCache, tier: DirectoryTier, path: Path, budget: int) -> None:
    tokens = text(0, 0, 60)
    assert cache.lookup(tokens, SPACE).length == 0
    assert load(cache, tokens, SPACE) == 0
    assert not cache.store(tokens, SPACE, None).copied  # type: ignore[arg-type]
    for call in (
        lambda: tier.contains([]),
        lambda: tier.write([]),
        lambda: tier.delete([]),
        tier.usage,
        tier.maintain,
        lambda: tier.touch([]),
        lambda: tier.pin([], 0),
        lambda: tier.lease([], 1),
        tier.scan,
    ):
        try:
            call()
        except TierUnavailableError:
            continue
        raise AssertionError("a tier works behind a fork")
    with cache_over(path, budget) as again:
        assert load(again, tokens, SPACE) == 60
        store(again, text(77, 0, 60), SPACE)
        assert load(again, text(77, 0, 60), SPACE) == 60
        again._keep_house()
    cache.close()
    tier.close()
