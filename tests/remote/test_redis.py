"""Redis passes the conformance suite of stores: plain, over a Unix socket, with TLS, and as a cluster."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.redis_server import RedisCluster, RedisServer, redis_cluster, redis_server, tls_server
from kvass.config import Settings
from kvass.testing.stores import MakeStore, StoreConformance
from kvass.tiers.redis import RedisStore


def _maker(**settings: object) -> MakeStore:
    return lambda: RedisStore.open(Settings.load(**settings))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(unixsocket=str(tmp_path_factory.mktemp("socket") / "redis.sock")) as one:
        yield one


@pytest.fixture(scope="module")
def with_tls() -> Iterator[tuple[RedisServer, Path]]:
    with tls_server(requirepass="correct horse/@#") as found:
        yield found


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    with redis_cluster() as one:
        yield one


class TestRedis(StoreConformance):
    @pytest.fixture
    def make_store(self, server: RedisServer) -> MakeStore:
        return _maker(redis_url=server.url)


class TestRedisOverAUnixSocket(StoreConformance):
    rounds = 2

    @pytest.fixture
    def make_store(self, server: RedisServer) -> MakeStore:
        return _maker(redis_url=f"unix://{server.admin.config_get()['unixsocket']}?db=1")


class TestRedisWithTlsAndAPassword(StoreConformance):
    rounds = 2

    @pytest.fixture
    def make_store(self, with_tls: tuple[RedisServer, Path], tmp_path: Path) -> MakeStore:
        server, certificate = with_tls
        file = tmp_path / "password"
        file.write_text("correct horse/@#\n")
        url = f"rediss://127.0.0.1:{server.port}"
        return _maker(redis_url=url, redis_ca_file=certificate, redis_password_file=file)


class TestRedisCluster(StoreConformance):
    @pytest.fixture
    def make_store(self, cluster: RedisCluster) -> MakeStore:
        return _maker(redis_url=cluster.url)
