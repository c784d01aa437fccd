"""Settings: frozen, read from defaults < file < environment < arguments; an unknown key is an error."""

import os
import tomllib
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from kvass.errors import ConfigError

_PREFIX = "KVASS_"
_FILE_VARIABLE = "KVASS_CONFIG"
_CODEC = "^[a-z0-9][a-z0-9._-]{0,31}$"


def cache_home() -> Path:
    """Where kvass keeps what it can make again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvass"


def config_file() -> Path | None:
    named = os.environ.get(_FILE_VARIABLE)
    if named:
        if not Path(named).is_file():
            raise ConfigError(f"{_FILE_VARIABLE} names {named}, which is not a file; correct or unset it")
        return Path(named)
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    default = home / "kvass" / "kvass.toml"
    return default if default.is_file() else None


class Settings(BaseSettings):
    """What a user can set. Environment: `KVASS_` and the name in capitals; file: TOML with these keys."""

    model_config = SettingsConfigDict(env_prefix=_PREFIX, extra="forbid", frozen=True)

    host_path: Path = Field(
        default_factory=lambda: Path(f"/dev/shm/kvass-{os.getuid()}"),  # noqa: S108 - owner-only folder
        description="Directory of the shared host-memory tier; must lie on a tmpfs.",
    )
    host_bytes: int = Field(
        default=2 << 30, ge=0, description="Byte budget of the host tier over all processes; 0 turns it off."
    )
    disk_path: Path = Field(
        default_factory=lambda: cache_home() / "objects", description="Directory of the SSD tier."
    )
    disk_bytes: int = Field(
        default=20 << 30, ge=0, description="Byte budget of the SSD tier over all processes; 0 turns it off."
    )
    models_path: Path = Field(
        default_factory=lambda: cache_home() / "models",
        description="Directory for converted models, tokenizers and weight digests.",
    )
    host_codec: str = Field(
        default="raw",
        pattern=_CODEC,
        description="Codec of what the host tier stores: raw, lossless, or a lossy one with a certificate.",
    )
    disk_codec: str = Field(
        default="raw",
        pattern=_CODEC,
        description="Codec of what the SSD tier stores: raw, lossless, int8, kivi4, kivi2, q1 to q4.",
    )
    remote_codec: str = Field(
        default="raw",
        pattern=_CODEC,
        description="Codec of what remote tiers store: raw, lossless, int8, kivi4, kivi2, q1 to q4.",
    )
    allow_lossy: bool = Field(
        default=False,
        description="Whether requests that say nothing of it may use lossy state within the budget.",
    )
    reuse: Literal["prefix", "anywhere"] = Field(
        default="prefix",
        description="What requests that say nothing of it may reuse: beginnings of prompts, or passages that "
        "were read elsewhere too, wherever they stand.",
    )
    reuse_max_fraction: float = Field(
        default=0.15,
        gt=0,
        le=1,
        description="Of the layers of tokens that are reused anywhere, how much may be computed anew.",
    )
    lossy_max_kl: float = Field(
        default=0.01,
        ge=0,
        description="Mean KL per token to the exact model, in nats, over which a lossy codec is refused; "
        "also where a prompt leaves a stored text early.",
    )
    lossy_max_facts_lost: float = Field(
        default=0.025,
        ge=0,
        le=1,
        description="Share of facts lost, as an upper bound, over which a lossy codec is refused.",
    )
    chunk_tokens: int = Field(
        default=256, ge=16, le=4096, description="Tokens in a stored chunk; part of no key, but of every hit."
    )
    io_threads: int = Field(
        default_factory=lambda: max(2, min(8, os.cpu_count() or 2)),
        ge=1,
        le=64,
        description="Threads that read, verify and write objects.",
    )
    store_deadline: float = Field(
        default=5.0, gt=0, description="Seconds after which a store that is still waiting is given up."
    )
    tenant_salt: str = Field(
        default="", repr=False, description="Secret mixed into every root, so that tenants never share hits."
    )
    shared_numerics: str = Field(
        default="",
        pattern="^[A-Za-z0-9._-]{0,64}$",
        description="Name under which the numerics of several engines are declared equal: they share KV.",
    )
    redis_url: str = Field(
        default="",
        repr=False,
        description="Redis or Valkey as a tier: redis://, rediss:// (TLS), redis+cluster://, "
        "rediss+cluster:// or unix://; empty turns it off.",
    )
    redis_password_file: Path | None = Field(
        default=None, description="File with the Redis password, where redis_url does not hold it."
    )
    redis_ca_file: Path | None = Field(
        default=None, description="Certificates that a TLS connection to Redis trusts; the system's if unset."
    )
    redis_ttl_seconds: int = Field(
        default=0, ge=0, description="Seconds after which Redis drops an object; 0: it stays until evicted."
    )
    s3_url: str = Field(
        default="", description="S3 as a tier: s3://bucket/prefix; empty turns it off. Keys: AWS_* or a file."
    )
    s3_endpoint: str = Field(
        default="",
        description="Address of an S3-compatible server, such as https://host:port; "
        "empty: AWS_ENDPOINT_URL, or Amazon's of the region.",
    )
    s3_region: str = Field(default="us-east-1", description="Region that requests to S3 are signed for.")
    s3_credentials_file: Path | None = Field(
        default=None, description="TOML file with access_key_id and secret_access_key (and session_token)."
    )
    mooncake_master: str = Field(
        default="", description="Mooncake Store as a tier: host:port of its master; empty turns it off."
    )
    mooncake_metadata: str = Field(
        default="P2PHANDSHAKE",
        description="P2PHANDSHAKE, or the URL of Mooncake's metadata server: http://host:8080/metadata.",
    )
    mooncake_host: str = Field(
        default="127.0.0.1",
        description="This machine's name or address, as Mooncake's other members reach it.",
    )
    mooncake_protocol: str = Field(default="tcp", description="Mooncake's transport: tcp, or rdma.")
    mooncake_device: str = Field(default="", description="Mooncake's RDMA devices, with commas between.")
    mooncake_bytes: int = Field(
        default=0, ge=0, description="Bytes of this process's memory that join Mooncake's pool; 0: none."
    )
    remote_exists_seconds: float = Field(
        default=0.2, gt=0, description="Seconds that a lookup waits for remote tiers, all together."
    )
    remote_call_seconds: float = Field(
        default=10.0, gt=0, description="Seconds that one read or write of a remote tier may take."
    )
    remote_queue_objects: int = Field(
        default=4096,
        ge=1,
        description="Objects that may wait to be written to a lower tier; more are dropped.",
    )
    state_path: Path = Field(
        default_factory=lambda: cache_home() / "state",
        description="Directory for what a server remembers: the ids of its answers.",
    )
    api_keys_file: Path | None = Field(
        default=None, description="TOML file of a server's tenants and the hashes of their API keys."
    )
    api_keys: str = Field(
        default="", repr=False, description="API keys as tenant=key pairs with commas between, or hashes."
    )
    public_tenants: str = Field(
        default="",
        description="Tenants, with commas between, whose stored state every tenant of a server may read.",
    )
    serve_slots: int = Field(
        default=4, ge=1, le=256, description="Requests that a server works on in turn; others queue."
    )
    serve_queue: int = Field(
        default=64,
        ge=1,
        le=100_000,
        description="Requests of a tenant that may queue; past it a server answers 429.",
    )
    serve_body_bytes: int = Field(
        default=8 << 20, ge=1024, description="Bytes a request's body may have; past it a server answers 413."
    )
    serve_receive_seconds: float = Field(
        default=20.0,
        gt=0,
        description="Seconds in which a request's head, then its body, must arrive, and a piece be taken.",
    )
    serve_grace_seconds: float = Field(
        default=30.0, ge=0, description="Seconds that running requests get to finish when a server stops."
    )
    upstream_api_key_file: Path | None = Field(
        default=None, description="File with the API key that `kvass serve --upstream` sends to its upstream."
    )
    upstream_api_key: str = Field(
        default="", repr=False, description="That key itself, where upstream_api_key_file does not hold it."
    )

    jobs_path: Path = Field(
        default_factory=lambda: cache_home() / "jobs",
        description="Directory of the queue of jobs for `kvass worker`; on a disk of this machine.",
    )
    jobs_queue: int = Field(
        default=256, ge=1, le=100_000, description="Jobs that may be queued or under way."
    )
    jobs_bytes: int = Field(
        default=64 << 20, ge=1024, description="Bytes that those may have, 4 for each token of a prompt."
    )
    jobs_wait_share: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Share of the predicted time to compute a prompt for which a worker is waited for.",
    )

    @field_validator("host_path", "disk_path", "models_path", "state_path", "jobs_path")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return value.expanduser().absolute()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings, env_settings, _TomlFile(settings_cls))

    @classmethod
    def load(cls, **arguments: Any) -> Self:
        """Read all sources. Raises ConfigError naming each setting that is unknown or wrong."""
        known = {_PREFIX + name.upper() for name in cls.model_fields} | {_FILE_VARIABLE}
        stray = sorted(name for name in os.environ if name.startswith(_PREFIX) and name not in known)
        if stray:
            raise ConfigError(f"unknown setting in the environment: {', '.join(stray)}")
        try:
            return cls(**arguments)
        except ValidationError as error:
            wrong = "; ".join(
                f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}" for item in error.errors()
            )
            raise ConfigError(f"unusable settings: {wrong}") from error


class _TomlFile(PydanticBaseSettingsSource):
    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        raise AssertionError("unused: __call__ returns the whole file")

    def __call__(self) -> dict[str, Any]:
        path = config_file()
        if path is None:
            return {}
        try:
            return tomllib.loads(path.read_text())
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"cannot read the settings file {path}: {error}") from error
