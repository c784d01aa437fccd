"""Redis servers without room, without an answer, without a connection, or with another one's role."""

import contextlib
import os
import socket
import threading
import time

import pytest

from harness.redis_server import RedisServer, opened, redis_server
from kvass.config import Settings
from kvass.errors import TierError, TierFullError, TierUnavailableError
from kvass.testing.stores import get, put
from kvass.testing.tiers import content
from kvass.tiers.redis import RedisStore

BODY = content(b"body", 3_500_000)
"""Four parts."""


def test_a_server_that_was_killed_is_used_again_once_it_is_back() -> None:
    with redis_server() as server, opened(server) as store:
        put(store, "one", BODY)
        server.kill()
        for call in (
            lambda: store.exists(["one"]),
            lambda: get(store, "one"),
            lambda: put(store, "two", BODY),
        ):
            with pytest.raises(TierUnavailableError):
                call()
        server.start()
        assert store.exists(["one"]) == [False]
        assert put(store, "one", BODY) is True
        assert get(store, "one") == BODY


def test_a_connection_that_the_server_closed_is_opened_again(server: RedisServer, store: RedisStore) -> None:
    put(store, "one", BODY)
    server.admin.client_kill_filter(_type="normal", skipme=True)
    assert get(store, "one") == BODY


def test_a_full_server_is_said_to_be_full_and_keeps_nothing_of_what_failed() -> None:
    with redis_server(maxmemory="12mb", maxmemory_policy="noeviction") as server, opened(server) as store:
        put(store, "one", BODY)
        with pytest.raises(TierFullError):
            for number in range(9):
                put(store, f"a/{number}", BODY)
        held = [one.name for one in store.list("")]
        assert server.admin.dbsize() == 5 * len(held)
        assert get(store, "one") == BODY
        assert store.delete(held) == len(held)
        assert put(store, "two", BODY) is True


def test_a_write_that_fails_at_its_end_leaves_nothing(server: RedisServer) -> None:
    server.admin.execute_command("ACL", "SETUSER", "hasty", "on", "nopass", "~*", "+@all", "-persist")
    url = f"redis://hasty:x@127.0.0.1:{server.port}"
    store = RedisStore.open(Settings.load(redis_url=url))
    with pytest.raises(TierError, match="redis_url"):
        put(store, "one", BODY)
    assert server.admin.dbsize() == 0
    store.close()


@pytest.mark.alone
def test_a_server_that_does_not_answer_is_waited_for_no_longer_than_set(server: RedisServer) -> None:
    with opened(server, remote_call_seconds=0.3) as store:
        put(store, "one", b"1")
        put(store, "two", b"2")
        server.admin.client_pause(1500, all=True)
        began = time.monotonic()
        for call in (
            lambda: store.exists(["one"]),
            lambda: get(store, "one"),
        ):
            with pytest.raises(TierUnavailableError):
                call()
        assert time.monotonic() - began < 1.4
        # a reply that comes too late is nobody's
        time.sleep(began + 1.7 - time.monotonic())
        assert (get(store, "two"), get(store, "one")) == (b"2", b"1")


@pytest.mark.alone
def test_what_takes_connections_and_says_nothing_is_not_waited_for() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(5)
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}"
        store = RedisStore.open(Settings.load(redis_url=url, remote_call_seconds=0.2))
        began = time.monotonic()
        with pytest.raises(TierUnavailableError):
            store.exists(["one"])
        assert time.monotonic() - began < 2
        store.close()


def test_what_is_not_redis_is_an_error_of_the_tier() -> None:
    def answer() -> None:
        with contextlib.suppress(OSError):
            while True:
                with web.accept()[0] as connection:
                    connection.recv(1000)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as web:
        thread = threading.Thread(target=answer)
        thread.start()
        for scheme in ("redis", "redis+cluster"):
            url = f"{scheme}://127.0.0.1:{web.getsockname()[1]}"
            store = RedisStore.open(Settings.load(redis_url=url, remote_call_seconds=2))
            with pytest.raises(TierError, match=r"Redis at 127\.0\.0\.1"):
                store.exists(["one"])
            store.close()
        web.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_busy_server_is_tried_again_later() -> None:
    with redis_server(busy_reply_threshold="20") as server, opened(server) as store:
        put(store, "one", b"1")
        busy = threading.Thread(target=_run_for_ever, args=(server,))
        busy.start()
        with pytest.raises(TierUnavailableError, match="BUSY"):
            while busy.is_alive():
                get(store, "one")
        server.admin.script_kill()
        busy.join()
        assert get(store, "one") == b"1"


def _run_for_ever(server: RedisServer) -> None:
    import redis

    with redis.Redis(port=server.port) as client, contextlib.suppress(redis.ResponseError):
        client.eval("while true do end", 0)


def test_a_replica_is_unavailable_for_writing_and_the_doctor_says_so() -> None:
    with redis_server() as server, opened(server) as store:
        put(store, "one", b"1")
        server.admin.replicaof("127.0.0.1", "1")
        with pytest.raises(TierUnavailableError):
            put(store, "two", b"2")
        assert any(fix and "primary" in fix for _, fix in store.advice())
        server.admin.replicaof("NO", "ONE")
        assert put(store, "two", b"2") is True


def test_the_doctor_is_told_of_a_server_that_cannot_evict(server: RedisServer, store: RedisStore) -> None:
    def fixes() -> str:
        return " ".join(fix or "" for _, fix in store.advice())

    assert "set maxmemory," in fixes()
    for policy, told in (("noeviction", True), ("volatile-lru", True), ("allkeys-lru", False)):
        server.admin.config_set("maxmemory", "1gb")
        server.admin.config_set("maxmemory-policy", policy)
        assert ("allkeys-lru" in fixes()) is told
    assert store.held().budget == 1 << 30
    server.admin.config_set("maxmemory", "0")
    server.admin.config_set("maxmemory-policy", "noeviction")


def test_a_forked_child_uses_connections_of_its_own(server: RedisServer, store: RedisStore) -> None:
    put(store, "parent", BODY)
    child = os.fork()
    if child == 0:
        wrong = 1
        with contextlib.suppress(Exception):
            for number in range(20):
                put(store, f"child/{number}", bytes([number]) * 100_000)
                wrong = get(store, f"child/{number}") != bytes([number]) * 100_000
        os._exit(int(wrong))
    for _ in range(40):
        assert get(store, "parent") == BODY
    assert os.waitpid(child, 0)[1] == 0
    assert get(store, "parent") == BODY
    assert len(list(store.list("child/"))) == 20
