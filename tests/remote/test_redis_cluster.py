"""Redis clusters: slots that move, masters that die, and a URL of the other kind."""

import contextlib
import time
from collections.abc import Iterator

import pytest
from redis.crc import key_slot

from harness.redis_server import RedisCluster, RedisServer, opened, redis_cluster
from kvass.config import Settings
from kvass.errors import TierError, TierUnavailableError
from kvass.testing.stores import LIMIT, get, put
from kvass.testing.tiers import content
from kvass.tiers.redis import RedisStore

BODY = content(b"body", 3_500_000)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    with redis_cluster() as one:
        yield one


def test_parts_lie_on_all_masters(cluster: RedisCluster) -> None:
    with opened(cluster) as store:
        for number in range(10):
            put(store, f"spread/{number}", BODY)
        assert all(master.admin.dbsize() > 5 for master in cluster.masters)
        assert store.held().objects == 50
        assert store.delete([f"spread/{number}" for number in range(10)]) == 10
        assert [master.admin.dbsize() for master in cluster.masters] == [0, 0, 0]


def test_an_object_is_found_while_its_slot_moves_and_after(cluster: RedisCluster) -> None:
    with opened(cluster) as store:
        put(store, "moving", BODY)
        slot = key_slot(b"kvass:moving")
        source = cluster.masters[slot * 3 // 16384]
        target = next(one for one in cluster.masters if one is not source)
        identities = [one.admin.execute_command("CLUSTER MYID").decode() for one in (source, target)]
        source.admin.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", identities[1])
        target.admin.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", identities[0])
        source.admin.execute_command("MIGRATE", "127.0.0.1", target.port, "kvass:moving", 0, 5000)
        assert get(store, "moving") == BODY  # its parts are where they were
        for one in (target, source):
            one.admin.execute_command("CLUSTER SETSLOT", slot, "NODE", identities[1])
        assert get(store, "moving") == BODY
        assert store.delete(["moving"]) == 1
        assert put(store, "moving", BODY) is True
        assert target.admin.exists("kvass:moving")


def test_a_url_of_the_other_kind_is_named(cluster: RedisCluster, server: RedisServer) -> None:
    for url, right in (
        (cluster.masters[0].url, "redis+cluster://"),
        (server.url.replace("redis://", "redis+cluster://"), "redis://"),
    ):
        store = RedisStore.open(Settings.load(redis_url=url))
        with pytest.raises(TierError) as caught:
            store.exists([f"one/{number}" for number in range(50)])
        assert type(caught.value) is TierError
        assert f"redis_url must be {right}" in str(caught.value)
        store.close()


def test_a_master_that_dies_costs_no_more_than_misses() -> None:
    with redis_cluster() as cluster, opened(cluster, remote_call_seconds=1) as store:
        bodies = {f"a/{number}": content(bytes([number]), 2_500_000) for number in range(12)}
        for name, body in bodies.items():
            put(store, name, body)
        cluster.masters[0].kill()  # the first that the URL names, too
        with pytest.raises(TierUnavailableError):
            store.exists(list(bodies))
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(TierUnavailableError):
                store.exists(list(bodies))
                break
            assert time.monotonic() < deadline, "a replica took over, but the store does not find it"
            time.sleep(0.1)
        for name, body in bodies.items():
            with contextlib.suppress(KeyError):
                assert b"".join(store.get(name, LIMIT).parts) == body
        for name, body in bodies.items():
            put(store, name, body)
            assert get(store, name) == body
