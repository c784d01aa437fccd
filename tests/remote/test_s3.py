"""The S3 store on a real server: conformance, keys, a server that dies, a fork."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.s3_server import BUCKET, KEY, READ_KEY, READ_SECRET, SeaweedFS, seaweedfs
from harness.s3_store import calls, credentials, only_these_keys, opened
from kvass.errors import CorruptObjectError, TierError, TierUnavailableError
from kvass.testing.stores import LIMIT, MakeStore, StoreConformance, get, put
from kvass.testing.tiers import content
from kvass.tiers.s3 import S3Store


@pytest.fixture(scope="module")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    with seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as server:
        yield server


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    only_these_keys(monkeypatch)


class TestSeaweedFS(StoreConformance):
    @pytest.fixture
    def make_store(self, weed: SeaweedFS) -> MakeStore:
        return lambda: opened(weed.endpoint)


@pytest.fixture
def store(weed: SeaweedFS) -> Iterator[S3Store]:
    made = opened(weed.endpoint, url=f"s3://{BUCKET}/{os.urandom(8).hex()}")
    yield made
    made.close()


@pytest.mark.parametrize("size", [(8 << 20) - 1, 8 << 20, (8 << 20) + 1, 40_000_001])
def test_an_object_of_many_parts_is_read_whole(store: S3Store, size: int) -> None:
    data = content(b"many", size)
    put(store, "one", data)
    assert get(store, "one", size) == data
    with pytest.raises(CorruptObjectError):
        store.get("one", size - 1)


def test_an_object_of_no_bytes_is_read(store: S3Store) -> None:
    assert store.put("none", [])
    assert get(store, "none", 0) == b""
    assert store.head("none", 10) == (0, b"")


def test_objects_lie_below_the_prefix_and_stores_of_other_prefixes_do_not_see_them(weed: SeaweedFS) -> None:
    folder = os.urandom(8).hex()
    inner, outer = (
        opened(weed.endpoint, f"s3://{BUCKET}/{folder}/in/"),
        opened(weed.endpoint, f"s3://{BUCKET}"),
    )
    put(inner, "a/one", b"1")
    assert get(outer, f"{folder}/in/a/one") == b"1"
    assert [one.name for one in inner.list("")] == ["a/one"]
    assert opened(weed.endpoint, f"s3://{BUCKET}/{folder}").exists(["a/one", "in/a/one"]) == [False, True]


def test_a_server_that_was_killed_and_comes_back_serves_the_same_store(
    weed: SeaweedFS, store: S3Store
) -> None:
    put(store, "one", b"1")
    weed.kill()
    try:
        for call in calls(store):
            with pytest.raises(TierUnavailableError, match="no connection"):
                call()
    finally:
        weed.start()
    end = time.monotonic() + 20
    while True:
        try:
            assert put(store, "two", b"2") or get(store, "two") == b"2"
            break
        except TierUnavailableError:
            assert time.monotonic() < end
            time.sleep(0.2)
    assert get(store, "two") == b"2"
    assert get(store, "one") == b"1"


def test_wrong_keys_are_refused_and_named_but_never_shown(
    weed: SeaweedFS, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret-abcdef")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "wrong-token-abcdef")
    store = opened(weed.endpoint)
    shown = [repr(store), str(vars(store))]
    for call in calls(store):
        with pytest.raises(TierError, match="AWS_SECRET_ACCESS_KEY") as caught:
            call()
        assert not isinstance(caught.value, TierUnavailableError)
        assert caught.value.__cause__ is None and caught.value.__suppress_context__
        shown.append(str(caught.value))
    shown += [f"{found} {remedy}" for found, remedy in store.advice()]
    assert not any(hidden in text for text in [*shown, caplog.text] for hidden in (KEY, "abcdef"))


def test_a_bucket_that_is_not_there_is_an_error_and_no_miss(weed: SeaweedFS) -> None:
    store = opened(weed.endpoint, "s3://no-such-bucket/x")
    for call in (lambda: store.get("one", LIMIT), lambda: put(store, "one", b"1")):
        with pytest.raises(TierError, match="create the bucket that s3_url names"):
            call()
    assert [remedy for _, remedy in store.advice() if remedy]


def test_keys_that_may_only_read_read(weed: SeaweedFS, store: S3Store, tmp_path: Path) -> None:
    put(store, "one", b"1")
    reads = credentials(tmp_path, READ_KEY, READ_SECRET)
    reader = opened(weed.endpoint, str(store._target).split(" ")[0], s3_credentials_file=reads)
    assert get(reader, "one") == b"1"
    with pytest.raises(TierError, match="s3:PutObject"):
        put(reader, "two", b"2")
    with pytest.raises(TierError, match="s3:DeleteObject"):
        reader.delete(["one"])
    assert get(reader, "one") == b"1"
    assert [bool(remedy) for _, remedy in reader.advice()] == [False, True]


def test_the_doctor_finds_all_well_and_leaves_nothing(store: S3Store) -> None:
    found = list(store.advice())
    assert len(found) == 5 and not any(remedy for _, remedy in found), found
    assert list(store.list("")) == []


def test_a_forked_child_is_refused_and_the_parent_goes_on(weed: SeaweedFS, store: S3Store) -> None:
    """Its library would wait for threads that only the parent has."""
    put(store, "one", b"1")
    pid = os.fork()
    if not pid:
        signal.alarm(20)  # a call that waits for ever ends the child
        try:
            for one in (store, opened(weed.endpoint)):
                for call in calls(one):
                    with pytest.raises(TierUnavailableError, match="fork"):
                        call()
                one.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    assert get(store, "one") == b"1"
