"""API keys and tenants: who may ask, and under which salt a tenant's KV is kept."""

import hashlib
import hmac
import re
import secrets
import tomllib
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from kvass.config import Settings
from kvass.errors import ConfigError

OPERATOR = "operator"
"""The tenant whose key may read what concerns all tenants, such as the metrics."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_KEY = re.compile(r"[!-~]+")
"""What a header can carry as it is."""

_MIN_KEY = 16


class ApiKey(NamedTuple):
    """One key: whose it is, and its digest (SHA-256; keys are random, so nothing slower is needed)."""

    tenant: str
    digest: bytes


def new_key() -> tuple[str, str]:
    """A random API key, and what stands for it in the file of keys."""
    key = "kv-" + secrets.token_urlsafe(32)
    return key, "sha256:" + hashlib.sha256(key.encode()).hexdigest()


class Tenants:
    """The API keys that a server knows. With none, everybody is the one tenant of the settings' salt."""

    def __init__(self, keys: list[ApiKey], public: list[str]):
        """`public`: tenants whose stored state all may read."""
        self._keys = keys
        self.public = public

    @classmethod
    def load(cls, settings: Settings) -> "Tenants":
        """Keys of `api_keys_file` and `api_keys`, and `public_tenants`. Raises ConfigError naming what cannot
        be used."""
        keys = [_from_environment(*pair) for pair in _pairs(settings)]
        if settings.api_keys_file is not None:
            keys += _from_file(settings.api_keys_file)
        digests = [key.digest for key in keys]
        if len(set(digests)) != len(digests):
            raise ConfigError("an API key is listed twice; each belongs to one tenant, once")
        public = [check_name(one.strip()) for one in settings.public_tenants.split(",") if one.strip()]
        return cls(keys, public)

    def __bool__(self) -> bool:
        return bool(self._keys)

    def of_header(self, authorization: str) -> str | None:
        """The tenant of an `Authorization` header, None where it holds no key that is known."""
        kind, _, key = authorization.partition(" ")
        return self.of(key.strip()) if kind.lower() == "bearer" else None

    def of(self, key: str) -> str | None:
        """The tenant of an API key, None for a key that is not known. Takes the same time for any key."""
        digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
        found = None
        for known in self._keys:
            if hmac.compare_digest(known.digest, digest):
                found = known.tenant
        return found


def tenant_salt(settings: Settings, tenant: str | None) -> str:
    """The salt of a tenant's namespaces: of its name and the settings' `tenant_salt`. None: that alone."""
    if tenant is None:
        return settings.tenant_salt
    check_name(tenant)
    secret = blake3(settings.tenant_salt.encode(), derive_key_context="kvass tenant salt v1").digest()
    return blake3(tenant.encode(), key=secret).hexdigest()


def check_name(tenant: str) -> str:
    """Raises ConfigError for what cannot be a tenant's name."""
    if not _NAME.fullmatch(tenant):
        raise ConfigError(
            f"{tenant!r} cannot be a tenant's name: up to 64 letters, digits, '.', '_', '-', no sign first"
        )
    return tenant


def clear_key(settings: Settings, tenant: str) -> str | None:
    """A tenant's API key, where the setting `api_keys` holds it in clear."""
    pairs = _pairs(settings)
    return next((key for name, _, key in pairs if name == tenant and not _HASH.fullmatch(key)), None)


def _pairs(settings: Settings) -> list[tuple[str, str, str]]:
    """What `api_keys` lists: tenant, the sign between (empty where it is missing), key."""
    return [pair.strip().partition("=") for pair in settings.api_keys.split(",") if pair.strip()]


def _from_environment(tenant: str, equals: str, key: str) -> ApiKey:
    if not equals:
        raise ConfigError("api_keys must be tenant=key pairs with commas between")
    return ApiKey(check_name(tenant), _digest(key, f"api_keys, tenant {tenant}", plain=True))


def _from_file(path: Path) -> list[ApiKey]:
    try:
        read = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read api_keys_file {path}: {error}") from error
    keys = []
    for tenant, listed in read.items():
        check_name(tenant)
        hashes = [listed] if isinstance(listed, str) else listed
        if not isinstance(hashes, list) or not all(isinstance(one, str) for one in hashes):
            raise ConfigError(f'api_keys_file {path}: {tenant} must be "sha256:…" or a list of such')
        keys += [ApiKey(tenant, _digest(one, f"api_keys_file {path}, tenant {tenant}")) for one in hashes]
    return keys


def _digest(key: str, where: str, *, plain: bool = False) -> bytes:
    if _HASH.fullmatch(key):
        return bytes.fromhex(key.removeprefix("sha256:"))
    if not plain:
        raise ConfigError(
            f"{where}: only hashes stand in a file; `kvass key TENANT` makes a key and its hash"
        )
    if not _KEY.fullmatch(key):
        raise ConfigError(f"{where}: the key may have letters, digits and signs of ASCII only, and no blanks")
    if len(key) < _MIN_KEY:
        raise ConfigError(f"{where}: the key has {len(key)} characters; it must have {_MIN_KEY} at least")
    return hashlib.sha256(key.encode()).digest()
