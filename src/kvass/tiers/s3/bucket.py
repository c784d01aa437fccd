"""The bucket that the settings name, and what its server's refusals mean."""

import os
import re
import tomllib
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvass.config import Settings
from kvass.errors import ConfigError, CorruptObjectError, TierError, TierFullError, TierUnavailableError

if TYPE_CHECKING:
    from obstore.store import ClientConfig, S3Config, S3Credential, S3Store

_CONNECT_SECONDS = 2.0
_IDLE_SECONDS = 20.0
"""Servers close idle connections after a minute or so; a request on one that is just being closed fails."""

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_SEGMENT = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]+")
_ENDPOINT = re.compile(r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?(/[A-Za-z0-9._/-]*)?")
_REGION_NAME = re.compile(r"[A-Za-z0-9._-]+")
_KEY = re.compile(r"[!-~]+")
_KEY_VARIABLES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_TOKEN")
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>|\(code: (\w{1,64})\)")
_NOT_THE_RANGE = re.compile(r"non-partial response|content.range|requested \d+", re.IGNORECASE)
_NO_KEYS = re.compile(r"/latest/(api|meta-data)|Missing ?(Access|Secret)|//169\.254\.|AssumeRole")
_FULL = re.compile(r"Quota|StorageFull|InsufficientStorage")
_PASSING = {"RequestTimeout", "SlowDown", "InternalError", "ServiceUnavailable", "OperationAborted"}

_KEYS = "correct s3_credentials_file, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
_REGION = "set s3_region to the bucket's region"
_NO_KEYS_REMEDY = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or s3_credentials_file; "
    "or AWS_SKIP_SIGNATURE=true where all may use the bucket"
)
_CERTIFICATE = "set AWS_CA_BUNDLE to the file of the certificates to trust"
_RIGHTS = (
    "allow these keys s3:GetObject, s3:PutObject, s3:DeleteObject and s3:ListBucket on the bucket of s3_url, "
    f"or {_KEYS}"
)
_REMEDIES = {
    "SignatureDoesNotMatch": f"{_KEYS}; or set s3_region to the server's",
    "InvalidAccessKeyId": _KEYS,
    "ExpiredToken": f"the session token is too old: {_KEYS}, and the token",
    "InvalidToken": f"the session token is not the server's: {_KEYS}, and the token",
    "RequestTimeTooSkewed": "set the clock of this machine, or the server's",
    "AccessDenied": _RIGHTS,
    "NoSuchBucket": "create the bucket that s3_url names, or correct s3_url",
    "AuthorizationHeaderMalformed": _REGION,
    "PermanentRedirect": _REGION,
}


class Target(NamedTuple):
    """Where objects are kept. `endpoint` is empty where the region says it."""

    bucket: str
    prefix: str
    endpoint: str

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}" + (f" at {self.endpoint}" if self.endpoint else "")


def open_bucket(settings: Settings) -> tuple[Target, "S3Store"]:
    """The bucket, with connections still to be made. Raises ConfigError, and shows no secret in it."""
    try:
        from obstore.exceptions import BaseError
        from obstore.store import S3Store
    except ImportError as error:
        raise ConfigError("s3_url needs the s3 extra: pip install 'kvass[s3]'") from error
    target = _target(settings)
    credential = _credential(settings.s3_credentials_file)
    seconds = settings.remote_call_seconds
    config: S3Config = {
        "region": settings.s3_region,
        "virtual_hosted_style_request": not target.endpoint and "." not in target.bucket,
        "conditional_put": "etag",
        # Bytes that change under a request that was given up must not become an object: the server
        # compares them with the signature.
        "unsigned_payload": False,
    }
    if target.endpoint:
        config |= {"endpoint": target.endpoint, "aws_endpoint_url_s3": target.endpoint}
    if credential:
        config |= {"skip_signature": False}
    client: ClientConfig = {
        "allow_http": target.endpoint.startswith("http://"),
        "connect_timeout": timedelta(seconds=min(_CONNECT_SECONDS, seconds)),
        "timeout": timedelta(seconds=seconds),
        "pool_idle_timeout": timedelta(seconds=_IDLE_SECONDS),
    }
    if not client["allow_http"] and (certificates := _certificates()):
        client["root_certificate"] = certificates
    try:
        return target, S3Store(
            target.bucket,
            prefix=target.prefix or None,
            config=config,
            client_options=client,
            retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=seconds)},
            # Given in this way so that a session token in the environment, which belongs to the keys there,
            # does not go with the file's.
            credential_provider=(lambda: credential) if credential else None,
        )
    except (BaseError, ValueError) as error:
        remedy = _NO_KEYS_REMEDY if _NO_KEYS.search(str(error)) else "correct or unset them"
        raise ConfigError(f"s3_url: unusable AWS_* variables in the environment; {remedy}") from None


def _target(settings: Settings) -> Target:
    # What is wrong is not shown: people put keys into addresses.
    scheme, _, rest = settings.s3_url.partition("://")
    bucket, _, prefix = rest.partition("/")
    if scheme != "s3":
        raise ConfigError("s3_url: must begin with s3://, as in s3://bucket/prefix")
    if not _BUCKET.fullmatch(bucket):
        raise ConfigError(
            "s3_url: no bucket's name after s3:// (3 to 63 lower-case letters, digits, dots and hyphens); "
            "write s3://bucket/prefix, and keys into s3_credentials_file"
        )
    prefix = prefix.removesuffix("/")
    if prefix and not all(_SEGMENT.fullmatch(segment) for segment in prefix.split("/")):
        raise ConfigError("s3_url: the prefix may have letters, digits, '.', '_', '-' and single '/' between")
    named = next((n for n in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL") if os.environ.get(n)), "")
    endpoint = settings.s3_endpoint or os.environ.get(named, "")
    found = _ENDPOINT.fullmatch(endpoint)
    if endpoint and not (found and 0 < int((found[2] or ":1")[1:]) < 1 << 16):
        where = "s3_endpoint" if settings.s3_endpoint else named
        raise ConfigError(f"{where}: must be an address such as https://host:port, without keys or options")
    if not _REGION_NAME.fullmatch(settings.s3_region):
        raise ConfigError("s3_region: must be a region's name, such as us-east-1 or auto")
    return Target(bucket, prefix, endpoint.rstrip("/"))


def _credential(path: Path | None) -> "S3Credential | None":
    if path is None:
        for name in _KEY_VARIABLES:
            if not _KEY.fullmatch(os.environ.get(name, "-")):
                raise ConfigError(f"{name}: is empty, or has blanks or line ends; correct or unset it")
        return None
    setting = f"s3_credentials_file {path}"
    try:
        held = tomllib.loads(path.expanduser().read_text())
    except OSError as error:
        raise ConfigError(f"{setting}: cannot be read: {error.strerror}") from None
    except ValueError:  # what it says may show the secret
        raise ConfigError(f'{setting}: is not TOML; write access_key_id = "..." and so on') from None
    wanted = {"access_key_id", "secret_access_key"}
    if unknown := sorted(held.keys() - wanted - {"session_token"}):
        raise ConfigError(f"{setting}: unknown keys {', '.join(unknown)}; remove them")
    for key in sorted(wanted | held.keys()):
        if not isinstance(held.get(key), str) or not _KEY.fullmatch(held[key]):
            raise ConfigError(f"{setting}: {key} must be there, as text without blanks")
    return {
        "access_key_id": held["access_key_id"],
        "secret_access_key": held["secret_access_key"],
        "token": held.get("session_token"),
        "expires_at": None,
    }


def _certificates() -> str | None:
    """Those trusted besides the system's, as the variable of Amazon's own tools names them."""
    path = os.environ.get("AWS_CA_BUNDLE")
    try:
        return Path(path).read_text() if path else None
    except (OSError, ValueError) as error:
        raise ConfigError(f"AWS_CA_BUNDLE: {path} cannot be read: {error}; correct or unset it") from None


def status_of(error: Exception) -> int:
    """The HTTP status in an error of the library; 0 where there was no answer."""
    found = _STATUS.search(str(error))
    return int(found[1]) if found else 0


def translated(error: Exception, failed: str, seconds: float, *, reading: bool) -> Exception:
    """An error of kvass for the library's. `failed`: what could not be done; `seconds`: the time there was.

    KeyError, where an object was to be read: it is not there, or was replaced while it was read.

    The library's message holds the server's words and, where it fetched keys, their tokens: of all that,
    only the status and the code of the error are passed on.
    """
    said, _, details = str(error).partition("Debug source")
    status = status_of(error)
    code = next((a or b for a, b in _CODE.findall(said)), "")
    answer = " ".join(part for part in (str(status or ""), code) if part)
    if not status and _NOT_THE_RANGE.search(said):
        return CorruptObjectError(
            f"{failed}: the server sent another range than was asked for; "
            "let no proxy that knows no ranges stand before it"
        )
    if reading and status in (404, 412) and code != "NoSuchBucket":
        return KeyError(failed)
    if status == 507 or _FULL.search(code):
        return TierFullError(f"{failed}: {answer}; make room there, or raise the bucket's quota")
    remedy = _REMEDIES.get(code) or (_RIGHTS if status in (401, 403) else "see the server's log")
    if _NO_KEYS.search(_STATUS.split(said)[0]):
        failed, remedy = f"{failed}, for want of keys", _NO_KEYS_REMEDY
    elif "configured region" in said:
        remedy = _REGION
    if code in _PASSING or status in (408, 409, 429) or (status >= 500 and status != 501):
        return TierUnavailableError(f"{failed}: {answer}; see the server's log")
    if "InvalidCertificate" in details:
        return TierError(f"{failed}: the server's certificate is not trusted; {_CERTIFICATE}")
    if not status and "HTTP error" in said:
        why = f"no answer within {seconds:g} s" if "Timeout" in details else "no connection, or it broke"
        return TierUnavailableError(f"{failed}: {why}; is the server up, and s3_endpoint right?")
    return TierError(f"{failed}: {answer or 'the server does not answer as S3 does'}; {remedy}")
