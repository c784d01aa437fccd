"""Keys: who may use a stored state. Everything that changes its bytes goes into the root or the chain.

All hashes are BLAKE3 with 32-byte output. Fields are length-prefixed, so that no two field lists
collide; chunks carry their token count, so that no two cuts of one text do.
"""

import struct

import msgspec
from blake3 import blake3

from kvass.chunks import Tokens
from kvass.errors import InputError
from kvass.provenance import StateClass, blend_class, lossy_class
from kvass.spec import KVSpec

FORMAT_VERSION = 1

KEY_BYTES = 32
ADDRESS_BYTES = KEY_BYTES + 3

_COUNT = struct.Struct("<I")
_PART = struct.Struct(">BH")


class Namespace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Model identity, spec, adapter, tenant and format: what two states must share to be exchangeable.

    `weights`, `config` and `adapter` are content digests (`adapter` empty: none); `tenant` is a digest
    of the tenant's salt, never the salt; `numerics` such as `transformers/sdpa/bfloat16/cpu`;
    `model` is a name for people, and the only field that is not part of the root.
    """

    model: str
    weights: str
    config: str
    adapter: str
    spec: KVSpec
    tenant: str
    numerics: str
    layout: str = "canonical"
    state: StateClass = "exact"
    format: int = FORMAT_VERSION

    @property
    def arrays(self) -> tuple[str, ...]:
        """Names of the arrays of a chunk: `k` and `v`; in an engine's own layout one opaque `kv`."""
        return ("k", "v") if self.layout == "canonical" else ("kv",)

    def root(self) -> bytes:
        """The first key of every chain in this namespace, 32 bytes."""
        hasher = blake3(derive_key_context="kvass namespace root v1")
        for name in self.__struct_fields__:
            if name == "model":
                continue
            value = self.spec.digest().encode() if name == "spec" else str(getattr(self, name)).encode()
            hasher.update(_COUNT.pack(len(name)) + name.encode() + _COUNT.pack(len(value)) + value)
        return hasher.digest()


def lossy_namespace(namespace: Namespace, codec: str) -> Namespace:
    """Where state of `namespace` is kept that went through a lossy codec, or was computed upon such state."""
    return approximate_namespace(namespace, lossy_class(codec))


def blend_namespace(namespace: Namespace, prompt: Tokens) -> Namespace:
    """Where the state of one prompt is kept of which parts were read elsewhere, moved and repaired."""
    return approximate_namespace(namespace, blend_class(prompt.tobytes()))


def approximate_namespace(namespace: Namespace, state: str) -> Namespace:
    """Where state of that class is kept that stands for some of `namespace`.

    The same model, adapter and tenant; no numerics, no layout of an engine's own, and no RoPE in the spec,
    which follows from the configuration. Engines come to the same one, and a certificate covers it, where
    `namespace` is one that they share (`kvass.models.shared`).
    """
    groups = tuple(msgspec.structs.replace(group, rope=None) for group in namespace.spec.groups)
    return msgspec.structs.replace(
        namespace,
        spec=KVSpec(groups=groups),
        numerics="",
        layout="canonical",
        state=state,
    )


def tenant_digest(salt: str) -> str:
    """What stands for a tenant's salt in a namespace: empty for no salt, else a digest in hex."""
    return blake3(salt.encode(), derive_key_context="kvass tenant v1").hexdigest() if salt else ""


def next_key(previous: bytes, tokens: bytes, count: int) -> bytes:
    """Key of a chunk of `count` tokens (little-endian int32 bytes) that follows the chunk `previous`."""
    return blake3(previous + _COUNT.pack(count) + tokens).digest()


def chain(root: bytes, tokens: Tokens, chunk_tokens: int) -> list[bytes]:
    """Keys of the whole chunks of a sequence, in order; a last chunk that is not full has none here."""
    raw = tokens.tobytes()
    step = 4 * chunk_tokens
    count = _COUNT.pack(chunk_tokens)
    keys = []
    key = root
    for start in range(0, len(raw) - step + 1, step):
        key = blake3(key + count + raw[start : start + step]).digest()
        keys.append(key)
    return keys


def content_key(root: bytes, tokens: bytes) -> bytes:
    """Key of a chunk's tokens alone, wherever they stand, under `root`."""
    return blake3(root + tokens, derive_key_context="kvass content key v1").digest()


def address(key: bytes, group: int, shard: int = 0) -> bytes:
    """The 35 bytes that name one object: a key and the part of it (layer group, tensor-parallel shard)."""
    return key + _PART.pack(group, shard)


def split_address(raw: bytes) -> tuple[bytes, int, int]:
    """Key, group and shard of an address."""
    group, shard = _PART.unpack_from(raw, KEY_BYTES)
    return raw[:KEY_BYTES], group, shard


def address_text(raw: bytes) -> str:
    """An address for people and file names: `<key in hex>-<group>-<shard>`."""
    key, group, shard = split_address(raw)
    return f"{key.hex()}-{group}-{shard}"


def parse_address(text: str) -> bytes:
    """The address that `address_text` wrote. Raises InputError for anything else."""
    parts = text.split("-")
    try:
        if len(parts) == 3 and len(parts[0]) == 2 * KEY_BYTES:
            raw = address(bytes.fromhex(parts[0]), int(parts[1]), int(parts[2]))
            if address_text(raw) == text:
                return raw
    except (ValueError, struct.error):
        pass
    raise InputError(f"{text!r} is no object address; `kvass ls` lists them")
