"""Faults of remote servers times tiers: no wrong token, no hang, recovery without restart.

The table in docs/faults.md is what this run finds; the last test compares them.
"""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from fixtures.world import BIG, CHUNK, blank, kv, namespace, prompt, same
from harness.mooncake_server import LOOPBACK, mooncake_master
from harness.proxy import fault_proxy
from harness.redis_server import redis_server
from harness.s3_server import BUCKET, KEY, SECRET, nasty_s3, seaweedfs
from kvass.cache import KVCache
from kvass.config import Settings
from kvass.tiers import breaker

pytestmark = pytest.mark.alone

SPACE = namespace(BIG)
TEXT = 8 * CHUNK
EXISTS_SECONDS, LOAD_SECONDS, SLACK = 0.2, 1.0, 0.6
TABLE = Path(__file__).resolve().parents[2] / "docs" / "faults.md"

Change = Callable[[], None]


@dataclass
class Under:
    """A tier under test: its settings, its faults (how they begin and end)."""

    tier: str
    settings: dict[str, object]
    faults: dict[str, tuple[Change, Change]]


class World:
    """Machines with a host tier of their own each, over one remote server."""

    def __init__(self, under: Under, folder: Path):
        self._settings = under.settings
        self._folder = folder
        self._machines: list[KVCache] = []

    def machine(self) -> KVCache:
        settings = Settings.load(
            host_path=self._folder / f"host{len(self._machines)}", host_bytes=64 << 20, disk_bytes=0,
            chunk_tokens=CHUNK, remote_exists_seconds=EXISTS_SECONDS, remote_call_seconds=2.0,
            **self._settings,
        )  # fmt: skip
        self._machines.append(KVCache.open(settings))
        return self._machines[-1]

    def ask(self, machine: KVCache, seed: int) -> tuple[int, float]:
        """Look a text up and load it: tokens in place, all of them right; seconds."""
        text = prompt(seed, TEXT)
        began = time.monotonic()
        match = machine.lookup(text, SPACE)
        pool = blank(SPACE, match.length)
        loaded = machine.load(match, pool, seconds=LOAD_SECONDS).tokens
        spent = time.monotonic() - began
        assert same(pool, text, SPACE, loaded), "a wrong answer"
        return loaded, spent

    def keep(self, machine: KVCache, seed: int) -> float:
        """Store a text; the seconds that an engine waits for it."""
        text = prompt(seed, TEXT)
        source = kv(text, SPACE)
        began = time.monotonic()
        machine.store(text, SPACE, source).wait(10)
        return time.monotonic() - began

    def until_found(self, machine: KVCache, seed: int, seconds: float) -> bool:
        """Whether a text is found in time; it is stored again meanwhile, as engines do."""
        end = time.monotonic() + seconds
        again = 0.0
        while time.monotonic() < end:
            if self.ask(machine, seed)[0] == TEXT:
                return True
            if time.monotonic() > again:
                writer = self._machines[0]
                self.keep(writer, seed)
                again = time.monotonic() + 1.0
            time.sleep(0.05)
        return False

    def close(self) -> None:
        for machine in self._machines:
            machine.close(3)


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, str], str]:
    """What was found so far."""
    return {}


def _run(world: World, begin: Change, end: Change) -> str:
    """One fault, from before it to after it; what a row of the table says."""
    first, second = world.machine(), world.machine()
    world.keep(first, 1)
    first.flush(20)
    assert world.until_found(second, 1, 20.0)  # the first lookup may be spent on connecting
    third = world.machine()
    begin()
    loaded, longest, hangs = [], 0.0, 0
    try:
        for _ in range(6):
            tokens, spent = world.ask(third, 1)
            loaded.append(tokens)
            longest = max(longest, spent)
            hangs += spent > EXISTS_SECONDS + LOAD_SECONDS + SLACK
        hangs += world.keep(third, 2) > 1.0
        assert world.ask(third, 2)[0] == TEXT, "what this machine stored itself is lost"
    finally:
        end()
    assert not hangs, f"a request waited for {longest:.2f} s"
    recovered = world.until_found(world.machine(), 1, 40.0)
    assert recovered, "no hit after the fault was over"
    seen = "hit" if min(loaded) == TEXT else "miss" if not any(loaded) else "hit or miss"
    return f"{seen} | 0 | {hangs} | found again, nothing restarted"


@pytest.fixture
def world_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Under], World]]:
    monkeypatch.setattr(breaker, "_MOST_SECONDS", 2.0)  # so that the test need not wait for half a minute
    folder = Path(tempfile.mkdtemp(prefix="kvass-faults-", dir="/dev/shm"))
    made: list[World] = []

    def build(under: Under) -> World:
        made.append(World(under, folder))
        return made[-1]

    yield build
    for world in made:
        world.close()
    shutil.rmtree(folder)


def _named(proxy, fault: str) -> tuple[Change, Change]:  # type: ignore[no-untyped-def]
    return (lambda: setattr(proxy, "fault", fault)), (lambda: setattr(proxy, "fault", ""))


_NETWORK = ("hangs", "slow", "truncates", "corrupts", "resets")


@pytest.fixture(scope="module")
def redis_under() -> Iterator[Under]:
    with redis_server() as server, fault_proxy(server.port) as proxy:
        yield Under(
            "redis",
            {"redis_url": f"redis://127.0.0.1:{proxy.port}"},
            {
                **{f"network {name}": _named(proxy, name) for name in _NETWORK},
                "killed, restarted": (server.kill, server.start),
                "flushed": (server.admin.flushall, lambda: None),
                "out of memory": (
                    lambda: server.admin.config_set("maxmemory", "1mb"),
                    lambda: server.admin.config_set("maxmemory", "0"),
                ),
                "stops for seconds": (
                    lambda: server.admin.client_pause(3000),
                    lambda: None,
                ),
            },
        )


@pytest.fixture(scope="module")
def s3_under(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Under]:
    folder = tmp_path_factory.mktemp("weed")
    (folder / "keys.toml").write_text(f'access_key_id = "{KEY}"\nsecret_access_key = "{SECRET}"\n')
    with seaweedfs(folder) as server:
        port = int(server.endpoint.rpartition(":")[2])
        with fault_proxy(port) as proxy:
            yield Under(
                "s3",
                {
                    "s3_url": f"s3://{BUCKET}/faults", "s3_endpoint": f"http://127.0.0.1:{proxy.port}",
                    "s3_credentials_file": folder / "keys.toml",
                },
                {
                    **{f"network {name}": _named(proxy, name) for name in _NETWORK},
                    "killed, restarted": (server.kill, server.start),
                },
            )  # fmt: skip


@pytest.fixture(scope="module")
def nasty_under(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Under]:
    folder = tmp_path_factory.mktemp("nasty")
    (folder / "keys.toml").write_text(f'access_key_id = "{KEY}"\nsecret_access_key = "{SECRET}"\n')
    with nasty_s3() as server:
        objects = server.objects

        def swap() -> None:
            names = sorted(objects)
            for one, other in zip(names, [*names[1:], names[0]], strict=True):
                objects[one] = kept[other]

        kept: dict[str, bytes] = {}

        def replace() -> None:
            kept.clear()
            kept.update(objects)
            swap()

        faults = {
            f"answers {fault.split()[0]}": _named(server, fault)
            for fault in ("500 InternalError", "503 SlowDown", "403 AccessDenied")
        }
        yield Under(
            "s3",
            {
                "s3_url": f"s3://{BUCKET}/nasty", "s3_endpoint": server.endpoint,
                "s3_credentials_file": folder / "keys.toml",
            },
            {
                **faults,
                "answers a wrong range": _named(server, "wrong bytes"),
                "cuts the body": _named(server, "cut the body"),
                "answers what is no HTTP": _named(server, "garbage"),
                "an object replaced by another's": (replace, objects.clear),
            },
        )  # fmt: skip


@pytest.mark.parametrize(
    "fault",
    [
        *(f"network {name}" for name in _NETWORK),
        "killed, restarted",
        "flushed",
        "out of memory",
        "stops for seconds",
    ],
)
def test_redis(
    fault: str, redis_under: Under, world_of: Callable[[Under], World], rows: dict[tuple[str, str], str]
) -> None:
    rows[fault, "redis"] = _run(world_of(redis_under), *redis_under.faults[fault])


@pytest.mark.parametrize("fault", [*(f"network {name}" for name in _NETWORK), "killed, restarted"])
def test_s3(
    fault: str, s3_under: Under, world_of: Callable[[Under], World], rows: dict[tuple[str, str], str]
) -> None:
    rows[fault, "s3"] = _run(world_of(s3_under), *s3_under.faults[fault])


@pytest.mark.parametrize(
    "fault",
    [
        "answers 500", "answers 503", "answers 403", "answers a wrong range", "cuts the body",
        "answers what is no HTTP", "an object replaced by another's",
    ],
)  # fmt: skip
def test_s3_that_answers_as_no_server_should(
    fault: str, nasty_under: Under, world_of: Callable[[Under], World], rows: dict[tuple[str, str], str]
) -> None:
    rows[fault, "s3"] = _run(world_of(nasty_under), *nasty_under.faults[fault])


@pytest.mark.parametrize("fault", ["killed, restarted", "stops for seconds"])
def test_mooncake(
    fault: str,
    tmp_path: Path,
    world_of: Callable[[Under], World],
    rows: dict[tuple[str, str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in LOOPBACK.items():
        monkeypatch.setenv(name, value)
    with mooncake_master(tmp_path) as master, ExitStack() as stack:
        stack.enter_context(master.lender(256 << 20))
        held = ExitStack()
        faults = {
            "killed, restarted": (master.kill, master.start),
            "stops for seconds": (lambda: held.enter_context(master.hanging()), held.close),
        }
        under = Under(
            "mooncake",
            {
                "mooncake_master": master.address, "mooncake_metadata": master.metadata, "mooncake_bytes": 0,
            },
            {},
        )  # fmt: skip
        rows[fault, "mooncake"] = _run(world_of(under), *faults[fault])


def test_the_table_in_the_docs_is_what_was_found(rows: dict[tuple[str, str], str]) -> None:
    found = [f"| {fault} | {tier} | {row} |" for (fault, tier), row in sorted(rows.items())]
    lines = TABLE.read_text().splitlines()
    assert [line for line in found if line not in lines] == [], "\n".join(found)
    assert sum(line.startswith("| ") for line in lines) == len(found) + 1
