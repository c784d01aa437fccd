"""Real Redis servers on this machine's loopback: one, or a cluster of six."""

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from harness.ports import free_ports
from kvass.config import Settings
from kvass.tiers.redis import RedisStore

_OPTIONS = {
    "bind": "127.0.0.1", "save": "", "appendonly": "no", "loglevel": "warning", "enable-debug-command": "yes",
    "repl-diskless-sync-delay": "0",
}  # fmt: skip


class RedisServer:
    """A server that can be killed and started again on its port."""

    def __init__(self, folder: Path, **options: str):
        """`options` with `_` for `-`, such as `maxmemory_policy`. A comma stands between two values."""
        self.folder = folder
        (self.port,) = free_ports(1)
        self.process: subprocess.Popen[bytes] | None = None
        self._options = {name.replace("_", "-"): value for name, value in options.items()}
        self._tls = "tls-cert-file" in self._options
        login = f":{options['requirepass']}@" if "requirepass" in options else ""
        self.url = f"redis{'s' if self._tls else ''}://{login}127.0.0.1:{self.port}"
        self.admin = redis.Redis(
            "127.0.0.1", self.port, password=options.get("requirepass"), ssl=self._tls, protocol=2,
            ssl_ca_certs=self._options.get("tls-cert-file"), retry=Retry(NoBackoff(), 0),
        )  # fmt: skip

    def start(self) -> None:
        """Returns once it answers."""
        ports = {"port": "0", "tls-port": str(self.port)} if self._tls else {"port": str(self.port)}
        options = _OPTIONS | ports | {"dir": str(self.folder)} | self._options
        words = [word for name, value in options.items() for word in (f"--{name}", *value.split(","))]
        self.process = subprocess.Popen(["redis-server", *words], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 10
        while True:
            with contextlib.suppress(redis.ConnectionError):
                if self.admin.ping():
                    return
            assert self.process.poll() is None, "redis-server did not start"
            assert time.monotonic() < deadline, "redis-server does not answer"
            time.sleep(0.01)

    def kill(self) -> None:
        """As the kernel does when memory is short."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def close(self) -> None:
        self.kill()
        self.admin.close()


@contextmanager
def redis_server(**options: str) -> Iterator[RedisServer]:
    """A running server, gone with its folder at the end of the block."""
    with tempfile.TemporaryDirectory(prefix="kvass-redis-") as folder:
        server = RedisServer(Path(folder), **options)
        try:
            server.start()
            yield server
        finally:
            server.close()


@contextmanager
def opened(server: "RedisServer | RedisCluster", **settings: object) -> Iterator[RedisStore]:
    """A store over a server, closed at the end of the block."""
    store = RedisStore.open(Settings.load(redis_url=server.url, **settings))
    try:
        yield store
    finally:
        store.close()


@contextmanager
def tls_server(**options: str) -> Iterator[tuple[RedisServer, Path]]:
    """A server that speaks TLS only, and the certificate that its clients are to trust."""
    with tempfile.TemporaryDirectory(prefix="kvass-tls-") as folder:
        key, certificate = Path(folder, "key.pem"), Path(folder, "certificate.pem")
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
             "-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", "/CN=kvass-test",
             "-addext", "subjectAltName=IP:127.0.0.1"],
            check=True, capture_output=True,
        )  # fmt: skip
        files = {"tls_cert_file": str(certificate), "tls_key_file": str(key)}
        with redis_server(
            **files, tls_auth_clients="no", tls_ca_cert_file=str(certificate), **options
        ) as one:
            yield one, certificate


class RedisCluster:
    """Three masters, and a replica of each."""

    def __init__(self, masters: list[RedisServer], replicas: list[RedisServer]):
        self.masters = masters
        self.replicas = replicas
        self.url = f"redis+cluster://127.0.0.1:{masters[0].port},127.0.0.1:{masters[1].port}"

    def join(self) -> None:
        """Make one cluster of six servers. Returns once each of them knows all, and all is in sync."""
        everyone = self.masters + self.replicas
        for number, server in enumerate(self.masters):
            first, last = number * 16384 // 3, (number + 1) * 16384 // 3 - 1
            server.admin.execute_command("CLUSTER ADDSLOTSRANGE", first, last)
        for number, server in enumerate(everyone):
            server.admin.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
        for server in everyone[1:]:
            server.admin.execute_command(
                "CLUSTER MEET", "127.0.0.1", everyone[0].port, everyone[0].admin.config_get()["cluster-port"]
            )
        for server in everyone:
            self._wait(lambda server=server: _cluster(server)["cluster_known_nodes"] == "6")
        for master, replica in zip(self.masters, self.replicas, strict=True):
            identity = master.admin.execute_command("CLUSTER MYID")
            replica.admin.execute_command("CLUSTER REPLICATE", identity)
        for replica in self.replicas:
            self._wait(lambda replica=replica: replica.admin.info()["master_link_status"] == "up")
        for server in everyone:
            self._wait(lambda server=server: _cluster(server)["cluster_state"] == "ok")

    @staticmethod
    def _wait(reached: Any) -> None:
        deadline = time.monotonic() + 20
        while not reached():
            assert time.monotonic() < deadline, "the cluster does not come together"
            time.sleep(0.02)


def _cluster(server: RedisServer) -> dict[str, str]:
    found = server.admin.execute_command("CLUSTER INFO")
    return found if isinstance(found, dict) else dict(line.split(":") for line in found.decode().split())


@contextmanager
def redis_cluster() -> Iterator[RedisCluster]:
    """A running cluster of six local processes; a master is given up after two seconds."""
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                redis_server(
                    cluster_enabled="yes", cluster_node_timeout="2000", cluster_port=str(free_ports(1)[0]),
                    cluster_replica_validity_factor="0",
                )
            )
            for _ in range(6)
        ]  # fmt: skip
        cluster = RedisCluster(servers[:3], servers[3:])
        cluster.join()
        yield cluster
