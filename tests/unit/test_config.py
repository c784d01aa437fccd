"""Settings: defaults < file < environment < arguments, and no mistake passes in silence."""

from pathlib import Path

import pytest

from kvass.config import Settings
from kvass.errors import ConfigError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_without_any_source_there_are_defaults(home: Path) -> None:
    settings = Settings.load()
    assert settings.chunk_tokens == 256
    assert settings.disk_path == home / "cache" / "kvass" / "objects"
    assert str(settings.host_path).startswith("/dev/shm/kvass-")
    assert settings.io_threads >= 2


def test_each_source_overrides_the_one_before(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(
        home / "config" / "kvass" / "kvass.toml", "chunk_tokens = 32\nio_threads = 3\nstore_deadline = 7.0\n"
    )
    assert Settings.load().chunk_tokens == 32
    monkeypatch.setenv("KVASS_CHUNK_TOKENS", "64")
    monkeypatch.setenv("KVASS_IO_THREADS", "4")
    settings = Settings.load(io_threads=5)
    assert (settings.store_deadline, settings.chunk_tokens, settings.io_threads) == (7.0, 64, 5)


def test_a_file_may_be_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(home / "config" / "kvass" / "kvass.toml", "chunk_tokens = 32\n")
    monkeypatch.setenv("KVASS_CONFIG", str(write(home / "mine.toml", "chunk_tokens = 48\n")))
    assert Settings.load().chunk_tokens == 48


def test_paths_become_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVASS_DISK_PATH", "~/kvass")
    monkeypatch.setenv("KVASS_HOST_PATH", "here")
    settings = Settings.load()
    assert settings.disk_path == Path.home() / "kvass"
    assert settings.host_path == Path.cwd() / "here"


@pytest.mark.parametrize("name", ["KVASS_HOST_BYTE", "KVASS_", "KVASS_CHUNKTOKENS", "KVASS_TIER"])
def test_an_unknown_variable_is_an_error_that_names_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match=name):
        Settings.load()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("chunk_token = 32\n", "chunk_token"),
        ("[host]\nbytes = 5\n", "host"),
        ("chunk_tokens = \n", "kvass.toml"),
        ("chunk_tokens = 'many'\n", "chunk_tokens"),
        ("chunk_tokens = 1\n", "chunk_tokens"),
        ("host_bytes = -1\n", "host_bytes"),
        ("store_deadline = 0\n", "store_deadline"),
        ("io_threads = 100000\n", "io_threads"),
        ("\x00", "kvass.toml"),
    ],
)
def test_a_mistake_in_the_file_is_an_error_that_names_it(home: Path, text: str, words: str) -> None:
    write(home / "config" / "kvass" / "kvass.toml", text)
    with pytest.raises(ConfigError, match=words):
        Settings.load()


def test_a_file_that_cannot_be_read_is_an_error(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "bytes.toml").write_bytes(b"\xff\xfe\xfd")
    monkeypatch.setenv("KVASS_CONFIG", str(home / "bytes.toml"))
    with pytest.raises(ConfigError, match=r"bytes\.toml"):
        Settings.load()
    monkeypatch.setenv("KVASS_CONFIG", str(home / "nowhere.toml"))
    with pytest.raises(ConfigError, match="KVASS_CONFIG"):
        Settings.load()


def test_a_mistake_in_an_argument_is_an_error() -> None:
    with pytest.raises(ConfigError, match="unheard_of"):
        Settings.load(unheard_of=1)
    with pytest.raises(ConfigError, match="chunk_tokens"):
        Settings.load(chunk_tokens=17.5)


def test_settings_do_not_change_and_keep_secrets() -> None:
    settings = Settings.load(tenant_salt="a secret")
    assert "a secret" not in repr(settings)
    with pytest.raises(ValueError, match="frozen"):
        settings.chunk_tokens = 5
