"""What `kv_connector_extra_config` may hold: kvass's own settings, and a few of the connector's."""

from dataclasses import dataclass
from typing import Any, Final

from kvass.config import Settings
from kvass.errors import ConfigError, UnsupportedModelError

_OWN: Final = ("on_unsupported", "allow_unknown_vllm")
KNOWN_VLLM: Final = "0.32."


@dataclass(frozen=True)
class Options:
    """The connector's settings.

    `off_if_unsupported`: a model that cannot be cached is served without kvass instead of not at all.
    """

    settings: Settings
    off_if_unsupported: bool = False
    allow_unknown_vllm: bool = False


def read_options(extra: dict[str, Any]) -> Options:
    """Read the connector's settings. Raises ConfigError naming each one that is unknown or wrong."""
    own = {name: value for name, value in extra.items() if name in _OWN}
    unsupported = own.get("on_unsupported", "refuse")
    if unsupported not in ("refuse", "off"):
        raise ConfigError(f"on_unsupported is {unsupported!r}; it may be 'refuse' or 'off'")
    allow = own.get("allow_unknown_vllm", False)
    if not isinstance(allow, bool):
        raise ConfigError(f"allow_unknown_vllm is {allow!r}; it may be true or false")
    settings = Settings.load(**{name: value for name, value in extra.items() if name not in _OWN})
    return Options(settings, unsupported == "off", allow)


def check_version(version: str, options: Options) -> str:
    """Refuse a vLLM whose connector interface and KV layout nobody looked at.

    What to add to the layout's name: nothing for a vLLM we know; else its version, so that one whose layout
    differs never finds the other's KV. Raises UnsupportedModelError, which names the version.
    """
    if version.startswith(KNOWN_VLLM):
        return ""
    if options.allow_unknown_vllm:
        return f"/{version}"
    raise UnsupportedModelError(
        f"this kvass knows vLLM {KNOWN_VLLM}x, not {version}: install one it knows, or set "
        "allow_unknown_vllm to true at your own risk"
    )
