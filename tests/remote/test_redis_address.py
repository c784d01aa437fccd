"""What redis_url and its fellows may say, what is said of wrong ones, and that no password is ever shown."""

import logging
import sys
import traceback
from pathlib import Path

import pytest

from harness.ports import free_ports
from harness.redis_server import redis_server, tls_server
from kvass.config import Settings
from kvass.errors import ConfigError, KvassError, TierError, TierUnavailableError
from kvass.tiers.redis import RedisStore
from kvass.tiers.redis.address import Address

SECRET = "hunter2"


def _read(url: str, **settings: object) -> Address:
    return Address.read(Settings.load(redis_url=url, **settings))


def test_every_part_of_a_url_is_read() -> None:
    one = _read("rediss://me:a%2Fb%40c@cache.example:7000/5")
    assert (one.hosts, one.database, one.tls, one.cluster) == ((("cache.example", 7000),), 5, True, False)
    assert (one.username, one.password) == ("me", "a/b@c")
    assert _read("redis://host").hosts == (("host", 6379),)
    assert _read("redis://[::1]:7000/").hosts == (("::1", 7000),)
    assert _read("redis+cluster://:p@a,b:7001").hosts == (("a", 6379), ("b", 7001))
    assert _read("unix:///run/redis.sock?db=2").path == "/run/redis.sock"
    assert _read("unix://:p@/run/redis.sock?db=2").database == 2


@pytest.mark.parametrize(
    ("url", "said"),
    [
        (f"http://:{SECRET}@host", "scheme"),
        (f":{SECRET}@host", "scheme"),
        (f"{SECRET}://host", "scheme"),
        (f"redis://:{SECRET}@", "no host"),
        (f"redis://:{SECRET}@:6379", "no host"),
        (f"redis://:{SECRET}@host:port", "port"),
        (f"redis://:{SECRET}@host:0", "port"),
        (f"redis://:{SECRET}@host:99999", "port"),
        (f"redis://:pass/{SECRET}@host", "/"),
        (f"redis://:pass#{SECRET}@host", "#"),
        (f"redis://:pass?{SECRET}@host", "?"),
        (f"redis://host:{SECRET}", "port"),
        (f"redis://:{SECRET}@host/one", "database"),
        (f"redis://:{SECRET}@host/-1", "database"),
        (f"redis://:{SECRET}@host/0?db=1", "?"),
        (f"redis://:{SECRET}@one,two", "several hosts"),
        (f"redis+cluster://:{SECRET}@host/1", "database"),
        (f"redis+cluster://:{SECRET}@host,", "no host"),
        (f"unix://:{SECRET}@host/run/redis.sock", "socket"),
        ("unix://", "socket"),
        ("", "scheme"),
    ],
)
def test_a_wrong_url_is_named_but_not_shown(url: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RedisStore.open(Settings.load(redis_url=url))
    message = str(caught.value)
    assert message.startswith("redis_url: ") and said in message.partition(";")[0]
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_a_wrong_file_is_named(tmp_path: Path) -> None:
    url, file = "rediss://host", tmp_path / "file"
    for setting in ("redis_password_file", "redis_ca_file"):
        with pytest.raises(ConfigError, match=rf"{setting}: cannot read .*No such file"):
            _read(url, **{setting: file})
    file.write_text("\n")
    with pytest.raises(ConfigError, match=r"redis_password_file: .* is empty"):
        _read(url, redis_password_file=file)
    with pytest.raises(ConfigError, match=r"redis_ca_file: .* PEM"):
        _read(url, redis_ca_file=file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"redis_password_file: .* UTF-8"):
        _read(url, redis_password_file=file)


def test_settings_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("other")
    with pytest.raises(ConfigError, match="keep one"):
        _read(f"redis://:{SECRET}@host", redis_password_file=file)
    with pytest.raises(ConfigError, match="redis_ca_file"):
        _read("redis://host", redis_ca_file=file)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigError, match=r"redis_url .* pip install 'kvass\[redis\]'"):
        RedisStore.open(Settings.load(redis_url="redis://host"))


def _refused(url: str, error: type[KvassError], caplog: pytest.LogCaptureFixture, **settings: object) -> str:
    """The message of a call that fails; no trace of the secret is anywhere."""
    caplog.set_level(logging.DEBUG)
    store = RedisStore.open(Settings.load(redis_url=url, **settings))
    with pytest.raises(error) as caught:
        store.put("one", [memoryview(b"x")])
    assert type(caught.value) is error
    with pytest.raises(error):
        list(store.advice())
    store.close()
    shown = "".join(traceback.format_exception(caught.value)) + caplog.text + repr(store) + str(store)
    assert SECRET not in shown + repr(Address.read(Settings.load(redis_url=url)))
    return str(caught.value)


def test_a_wrong_password_names_the_setting_and_is_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    with redis_server(requirepass="right") as server:
        place = f"127.0.0.1:{server.port}"
        for login in (f":{SECRET}@", f"nobody:{SECRET}@", ""):
            said = _refused(f"redis://{login}{place}", TierError, caplog)
            assert place in said and "redis_password_file" in said


def test_a_password_that_no_server_asked_for_is_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    with redis_server() as server:
        assert "redis_url" in _refused(f"redis://:{SECRET}@127.0.0.1:{server.port}", TierError, caplog)
    # nobody listens there now
    _refused(f"redis://:{SECRET}@127.0.0.1:{server.port}", TierUnavailableError, caplog)
    _refused(f"redis+cluster://:{SECRET}@127.0.0.1:{free_ports(1)[0]}", TierUnavailableError, caplog)


def test_a_server_that_repeats_what_it_was_sent_does_not_show_a_password(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with redis_server(rename_command="AUTH,unheard-of") as server:
        _refused(f"redis://:{SECRET}@127.0.0.1:{server.port}", TierError, caplog)


def test_a_user_without_the_right_is_told_so(caplog: pytest.LogCaptureFixture) -> None:
    with redis_server() as server:
        server.admin.execute_command("ACL", "SETUSER", "reader", "on", f">{SECRET}", "~*", "+get")
        said = _refused(f"redis://reader:{SECRET}@127.0.0.1:{server.port}", TierError, caplog)
        assert "redis_url" in said and "permission" in said


def test_a_certificate_that_is_not_trusted_names_the_setting(caplog: pytest.LogCaptureFixture) -> None:
    with tls_server() as (server, _):
        assert "redis_ca_file" in _refused(server.url, TierError, caplog)
