"""The vLLM connector: prompts of an unpatched vLLM hit KV that any process stored.

vLLM finds it through its own setting, `--kv-transfer-config` with `"kv_connector": "KvassConnector"` and
`"kv_connector_module_path": "kvass.engines.vllm"`. Nothing of vLLM is imported before that name is asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvass.engines.vllm.connector import KvassConnector

__all__ = ["KvassConnector"]


def __getattr__(name: str) -> Any:
    if name == "KvassConnector":
        from kvass.engines.vllm.connector import KvassConnector

        return KvassConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
