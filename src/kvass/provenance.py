"""Provenance: what was done to a state, and the class under whose root it is stored."""

from typing import Annotated

import msgspec
from blake3 import blake3

CODEC_NAME = "[a-z0-9][a-z0-9._-]{0,31}"
_LOSSY = "lossy-"
BLEND = "blend"

GUARD_TOKENS = 256
"""How many of the last tokens of a hit are computed again, where state was coded for a sequence that went on
further: attention looks mostly at the last tokens, and those were coded for standing far from the end."""

StateClass = Annotated[str, msgspec.Meta(pattern=rf"\A(exact|{_LOSSY}{CODEC_NAME}|{BLEND}-[0-9a-f]{{32}})\Z")]
"""`exact`, `lossy-<codec>`, or `blend-<digest of a prompt>`. Each has roots of its own, so that none but
exact state answers for exact, and what was repaired for one prompt for none but that."""

CodecName = Annotated[str, msgspec.Meta(pattern=rf"\A{CODEC_NAME}\Z")]
TablesDigest = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]


class Exact(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind", tag="exact"
):
    """An unmodified forward of the model computed it, upon nothing but such state."""

    @property
    def kind(self) -> str:
        """`exact`."""
        return "exact"


class Lossy(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True,
    tag_field="kind", tag="lossy",
):  # fmt: skip
    """It went through a lossy codec, or was computed upon state that did.

    `tables`: digest of the tables that the codec used. How it is stored now stands in the codec chain.
    `behind`: how many tokens of its sequence came after it when it was coded, by a codec that is coarser
    where there are more; 0, which is not written: it was coded as an end, or by a codec that does not care.
    """

    codec: CodecName
    tables: TablesDigest
    behind: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] = 0

    @property
    def kind(self) -> str:
        """`lossy`."""
        return "lossy"


class Blended(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind", tag="blended"
):
    """Parts of it were read elsewhere, moved to where they stand and repaired, or it was computed upon such
    state.

    `method`: the selector that chose what to compute anew. Shares of the tokens that were reused: `chosen`,
    that were computed anew, and `fraction`, of their layers what was computed, choosing included.
    """

    method: CodecName
    chosen: Annotated[float, msgspec.Meta(ge=0, le=1)]
    fraction: Annotated[float, msgspec.Meta(ge=0)]

    @property
    def kind(self) -> str:
        """`blended`."""
        return "blended"


Provenance = Exact | Lossy | Blended
EXACT = Exact()


def lossy_class(codec: str) -> str:
    """The class of what went through that codec."""
    return _LOSSY + codec


def codec_of_class(state: str) -> str | None:
    """The codec that a class is named after; None for one that is not of a codec."""
    return state.removeprefix(_LOSSY) if state.startswith(_LOSSY) else None


APPROXIMATE_SALT = "kvass-approximate"
"""How the `cache_salt` of a vLLM request ends that may use approximate state. vLLM shares blocks within a
salt only, so that no other request gets what such a one loaded."""


def blend_class(prompt: bytes) -> str:
    """The class of what was repaired for a prompt of these tokens (little-endian int32): what is chosen
    depends on its question, so that two prompts that begin alike have no blended state in common."""
    digest = blake3(prompt, derive_key_context="kvass blend v1").hexdigest(16)
    return f"{BLEND}-{digest}"


def is_blend(state: str) -> bool:
    """Whether a class is of what was repaired for some prompt."""
    return state.startswith(BLEND)


def kind_of_class(state: str) -> str:
    """What people are told of a class: `exact`, `lossy-<codec>`, `blend`."""
    return BLEND if is_blend(state) else state
