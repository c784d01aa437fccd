"""The S3 store and servers that misbehave: never a wrong byte, and never a long wait."""

import time
from collections.abc import Callable, Iterator

import pytest

from harness.s3_server import NastyS3, nasty_s3
from harness.s3_store import calls, only_these_keys, opened
from kvass.errors import CorruptObjectError, TierError, TierFullError, TierUnavailableError
from kvass.testing.stores import LIMIT, get, put
from kvass.testing.tiers import content
from kvass.tiers.s3 import S3Store

SECONDS = 0.4
"""How long an impatient store lets one request take."""


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    only_these_keys(monkeypatch)


@pytest.fixture
def nasty() -> Iterator[NastyS3]:
    with nasty_s3() as server:
        for name in ("one", "big"):
            size = 1000 if name == "one" else 20_000_000
            server.objects[f"pre/fix/{name}"] = content(name.encode(), size)
        yield server


@pytest.fixture
def victim(nasty: NastyS3) -> Iterator[S3Store]:
    made = opened(nasty.endpoint)
    yield made
    made.close()


@pytest.fixture
def impatient(nasty: NastyS3) -> Iterator[S3Store]:
    made = opened(nasty.endpoint, remote_call_seconds=SECONDS)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("500 InternalError", TierUnavailableError),
        ("503 SlowDown", TierUnavailableError),
        ("429 TooManyRequests", TierUnavailableError),
        ("409 ConditionalRequestConflict", TierUnavailableError),
        ("garbage", TierUnavailableError),
        ("400 InvalidRequest", TierError),
        ("401 Unauthorized", TierError),
        ("403 AccessDenied", TierError),
        ("403 RequestTimeTooSkewed", TierError),
        ("301 PermanentRedirect", TierError),
        ("507 XMinioStorageFull", TierFullError),
    ],
)
def test_every_call_says_what_a_servers_error_is(
    nasty: NastyS3, victim: S3Store, fault: str, error: type[TierError]
) -> None:
    nasty.fault = fault
    for call in calls(victim):
        with pytest.raises(TierError) as caught:
            call()
        assert type(caught.value) is error
    assert len(nasty.received) <= 8  # nothing was tried again
    assert [remedy for _, remedy in victim.advice() if remedy]
    nasty.fault = ""
    assert get(victim, "one") == nasty.objects["pre/fix/one"]
    assert victim.exists(["new"]) == [False]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("403 RequestTimeTooSkewed", "clock"),
        ("301 PermanentRedirect", "s3_region"),
        ("403 SignatureDoesNotMatch", "s3_region"),
        ("403 QuotaExceeded", "quota"),
        ("403 AccessDenied", "s3:ListBucket"),
    ],
)
def test_the_remedy_is_the_errors(nasty: NastyS3, victim: S3Store, fault: str, words: str) -> None:
    nasty.fault = fault
    with pytest.raises(TierError, match=words):
        put(victim, "new", b"new")
    assert any(words in (remedy or "") for _, remedy in victim.advice())


@pytest.mark.parametrize("name", ["one", "big"])
@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("cut the body", TierUnavailableError),
        ("no ranges", CorruptObjectError),
        ("next range", CorruptObjectError),
        ("short range", CorruptObjectError),
    ],
)
def test_a_body_that_is_not_what_was_asked_for_is_never_returned(
    nasty: NastyS3, victim: S3Store, name: str, fault: str, error: type[Exception]
) -> None:
    nasty.fault = fault
    with pytest.raises(error):
        victim.get(name, LIMIT)
    with pytest.raises(error):
        victim.head(name, 100)
    nasty.fault = ""
    assert get(victim, name) == nasty.objects[f"pre/fix/{name}"]


@pytest.mark.parametrize("fault", ["cut the body", "short range", "500 InternalError"])
def test_a_later_part_that_fails_fails_the_object(nasty: NastyS3, victim: S3Store, fault: str) -> None:
    nasty.fault, nasty.spared = fault, 1
    with pytest.raises((TierUnavailableError, CorruptObjectError)):
        victim.get("big", LIMIT)


@pytest.mark.alone
def test_a_server_that_hangs_is_unavailable_within_the_time(nasty: NastyS3, impatient: S3Store) -> None:
    def late(call: Callable[[], object]) -> None:
        began = time.monotonic()
        with pytest.raises(TierUnavailableError, match="within"):
            call()
        assert SECONDS / 2 < time.monotonic() - began < SECONDS + 1

    nasty.fault = "hang"
    for call in calls(impatient):
        late(call)
    nasty.fault = "hang in the body"
    late(lambda: impatient.get("one", LIMIT))
    late(lambda: impatient.get("big", LIMIT))
    nasty.spared = 1
    late(lambda: impatient.get("big", LIMIT))


def test_an_object_that_is_replaced_while_it_is_read_is_a_miss(nasty: NastyS3, victim: S3Store) -> None:
    nasty.fault, nasty.spared = "412 PreconditionFailed", 1
    with pytest.raises(KeyError):
        victim.get("big", LIMIT)
    nasty.fault, nasty.spared = "404 NoSuchKey", 1
    with pytest.raises(KeyError):
        victim.get("big", LIMIT)


def test_parts_are_asked_of_the_object_that_was_begun(nasty: NastyS3, victim: S3Store) -> None:
    victim.get("big", LIMIT)
    tags = [headers.get("if-match") for method, _, headers in nasty.received if method == "GET"]
    assert tags == [None, '"1"', '"1"']


@pytest.mark.parametrize("tag", ['W/"1"', ""])
def test_an_object_without_a_strong_tag_is_read(nasty: NastyS3, victim: S3Store, tag: str) -> None:
    nasty.tag = tag
    assert get(victim, "big") == nasty.objects["pre/fix/big"]
    assert not [headers for _, _, headers in nasty.received if "if-match" in headers]


def test_an_object_above_the_limit_costs_no_more_than_its_head(nasty: NastyS3, victim: S3Store) -> None:
    nasty.fault = "hang in the body"
    with pytest.raises(CorruptObjectError, match="more than 999"):
        victim.get("one", 999)


def test_a_server_without_conditional_writes_is_asked_first(nasty: NastyS3, victim: S3Store) -> None:
    nasty.fault = "no conditions"
    assert put(victim, "new", b"new") is True
    assert put(victim, "new", b"other") is False
    assert get(victim, "new") == b"new"
    assert sum("conditional writes" in found for found, remedy in victim.advice() if remedy) == 1


def test_the_doctor_finds_a_server_that_replaces_objects(nasty: NastyS3, victim: S3Store) -> None:
    nasty.fault = "replaces"
    assert [found for found, remedy in victim.advice() if remedy] == [
        "the server does not know conditional writes (If-None-Match)"
    ]
    assert sorted(nasty.objects) == ["pre/fix/big", "pre/fix/one"]


@pytest.mark.parametrize("fault", ["no ranges", "next range", "short range", "wrong bytes"])
def test_the_doctor_finds_a_server_with_wrong_ranges(nasty: NastyS3, victim: S3Store, fault: str) -> None:
    nasty.fault = fault
    assert len([found for found, remedy in victim.advice() if remedy]) == 1
    assert sorted(nasty.objects) == ["pre/fix/big", "pre/fix/one"]


def test_many_names_are_asked_for_over_few_connections(nasty: NastyS3, victim: S3Store) -> None:
    for _ in range(2):
        assert victim.exists([f"none-{number}" for number in range(200)]) == [False] * 200
    assert len(nasty.received) == 400
    assert nasty.connections < 100


@pytest.mark.alone
def test_a_server_that_is_not_there_is_unavailable_at_once() -> None:
    store = opened("http://127.0.0.1:1", remote_call_seconds=5)
    for call in calls(store):
        began = time.monotonic()
        with pytest.raises(TierUnavailableError, match="s3_endpoint"):
            call()
        assert time.monotonic() - began < 1
    (found,) = store.advice()
    assert found[1] == "is the server up, and s3_endpoint right?"
