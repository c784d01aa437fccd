"""The settings of the S3 store: whose keys go where, and what is said of wrong ones."""

import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from obstore.store import S3Store as Bucket

from harness.s3_server import BUCKET, NastyS3, nasty_s3
from harness.s3_store import credentials, only_these_keys, opened
from kvass.errors import ConfigError, TierError, TierUnavailableError
from kvass.testing.stores import put
from kvass.tiers.s3 import S3Store
from kvass.tiers.s3.bucket import Target


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    only_these_keys(monkeypatch)


@pytest.fixture
def nasty() -> Iterator[NastyS3]:
    with nasty_s3() as server:
        server.objects["pre/fix/one"] = b"1"
        yield server


def serve_with_tls(server: NastyS3, folder: Path) -> Path:
    """Make it answer https only; the certificate of the issuer that vouches for it."""
    steps = (
        "req -x509 -newkey rsa:2048 -nodes -keyout issuer.key -out issuer.pem -days 2 -subj /CN=kvass-issuer",
        "req -newkey rsa:2048 -nodes -keyout key.pem -out request.pem -subj /CN=127.0.0.1",
        "x509 -req -in request.pem -CA issuer.pem -CAkey issuer.key -CAcreateserial -days 2 -out own.pem "
        "-extfile names",
    )
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1")
    for step in steps:
        subprocess.run(["openssl", *step.split()], cwd=folder, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "own.pem", folder / "key.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.endpoint = server.endpoint.replace("http://", "https://")
    return folder / "issuer.pem"


def test_keys_of_a_file_go_alone_though_the_environment_has_others(
    nasty: NastyS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token-of-the-environment")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    for number, line in enumerate(["", 'session_token = "token-of-the-file"']):
        path = credentials(tmp_path, f"key-{number}", "secret", line)
        opened(nasty.endpoint, s3_credentials_file=path, s3_region="eu-west-9").exists(["one"])
    first, second = (headers for _, _, headers in nasty.received)
    assert "Credential=key-0/" in first["authorization"] and "/eu-west-9/s3/" in first["authorization"]
    assert "x-amz-security-token" not in first
    assert "Credential=key-1/" in second["authorization"]
    assert second["x-amz-security-token"] == "token-of-the-file"


def test_a_body_is_signed_whatever_the_environment_says(
    nasty: NastyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_UNSIGNED_PAYLOAD", "true")
    put(opened(nasty.endpoint), "new", b"new")
    assert len(nasty.received[-1][2]["x-amz-content-sha256"]) == 64


def test_the_endpoint_may_come_from_the_environment(nasty: NastyS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", nasty.endpoint)
    assert opened("").exists(["one"]) == [True]
    monkeypatch.setenv("AWS_ENDPOINT_URL", "127.0.0.1:1")
    with pytest.raises(ConfigError, match="AWS_ENDPOINT_URL"):
        opened("")


def test_half_of_the_keys_is_an_error_that_says_which_to_set(
    nasty: NastyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(ConfigError, match="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        opened(nasty.endpoint)


def test_a_machine_that_gives_no_keys_is_an_error_that_says_which_to_set(
    nasty: NastyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", nasty.endpoint)
    nasty.fault = "403 Forbidden"
    store = opened(nasty.endpoint)
    with pytest.raises(TierError, match=r"for want of keys.*set AWS_ACCESS_KEY_ID"):
        store.exists(["one"])
    assert nasty.received[0][1] == "/latest/api/token"


def test_a_library_that_is_not_installed_is_an_error_that_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvass\[s3\]'"):
        opened("http://127.0.0.1:1")


@pytest.mark.parametrize(
    "url",
    [
        "bucket",
        "http://bucket/x",
        "S3//bucket",
        "s3://",
        "s3:///prefix",
        "s3://ab/x",
        "s3://Upper/x",
        "s3://KEY:hidden@bucket/x",
        "s3://bucket/a//b",
        "s3://bucket/../b",
        "s3://bucket/a?hidden=1",
        "s3://bucket/ü",
    ],
)
def test_a_bad_url_is_a_config_error_that_does_not_show_it(url: str) -> None:
    with pytest.raises(ConfigError, match="s3_url") as caught:
        opened("http://127.0.0.1:1", url)
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    "endpoint",
    [
        "127.0.0.1:8333",
        "host",
        "ftp://host",
        "http://",
        "http://host:port",
        "http://host:70000",
        "http://key:hidden@host",
        "http://host?hidden=1",
        "http://ho st",
        "http://[::1",
    ],
)
def test_a_bad_endpoint_is_a_config_error_that_does_not_show_it(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="s3_endpoint") as caught:
        opened(endpoint)
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "access_key_id = hidden",
        'access_key_id = "hidden"',
        'access_key_id = "a"\nsecret_access_key = ""',
        'access_key_id = "a"\nsecret_access_key = 17',
        'access_key_id = "a"\nsecret_access_key = "hidden\\n"',
        'access_key_id = "a"\nsecret_access_key = "hidden"\nsecret = "x"',
        'access_key_id = "a"\nsecret_access_key = "hidden"\nsession_token = 5',
        b"\xff\xfe",
    ],
)
def test_a_bad_credentials_file_is_a_config_error_that_shows_no_secret(tmp_path: Path, text: str) -> None:
    path = tmp_path / "s3.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match="s3_credentials_file") as caught:
        opened("http://127.0.0.1:1", s3_credentials_file=path)
    assert "hidden" not in str(caught.value)
    assert caught.value.__suppress_context__ or not caught.value.__context__


def test_a_credentials_file_that_cannot_be_read_is_a_config_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.toml"):
        with pytest.raises(ConfigError, match="s3_credentials_file"):
            opened("http://127.0.0.1:1", s3_credentials_file=path)


def test_http_is_used_only_where_it_is_written(nasty: NastyS3) -> None:
    store = opened(nasty.endpoint.replace("http://", "https://"), remote_call_seconds=1)
    with pytest.raises(TierUnavailableError):
        store.exists(["one"])
    assert nasty.received == []


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"])
@pytest.mark.parametrize("value", ["", "hidden\n", "two words", "hiddén"])
def test_a_key_in_the_environment_that_cannot_be_one_is_a_config_error(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=name) as caught:
        opened("http://127.0.0.1:1")
    assert "hidd" not in str(caught.value)


@pytest.mark.parametrize("region", ["", "us east", "us-east-1\n", "é"])
def test_a_region_that_cannot_be_one_is_a_config_error(region: str) -> None:
    with pytest.raises(ConfigError, match="s3_region"):
        opened("http://127.0.0.1:1", s3_region=region)


def test_a_panic_of_the_library_is_an_error_of_the_tier(nasty: NastyS3) -> None:
    bucket = Bucket(
        BUCKET,
        config={"endpoint": nasty.endpoint, "access_key_id": "a\n", "secret_access_key": "b"},
        client_options={"allow_http": True},
    )
    store = S3Store(Target(BUCKET, "", nasty.endpoint), bucket, 5)
    with pytest.raises(TierError, match=r"AWS_\*"):
        store.exists(["one", "two"])
    store.close()


def test_a_certificate_is_trusted_where_aws_ca_bundle_names_its_issuer(
    nasty: NastyS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    issuer = serve_with_tls(nasty, tmp_path)
    with pytest.raises(TierError, match="AWS_CA_BUNDLE") as caught:
        opened(nasty.endpoint).exists(["one"])
    assert not isinstance(caught.value, TierUnavailableError)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(issuer))
    assert opened(nasty.endpoint).exists(["one"]) == [True]
    for path in (tmp_path, tmp_path / "none"):
        monkeypatch.setenv("AWS_CA_BUNDLE", str(path))
        with pytest.raises(ConfigError, match="AWS_CA_BUNDLE"):
            opened(nasty.endpoint)
