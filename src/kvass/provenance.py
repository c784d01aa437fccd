"""Provenance: what was done to a state, and the class under whose root it is stored."""

from typing import Annotated

import msgspec

CODEC_NAME = "[a-z0-9][a-z0-9._-]{0,31}"
_LOSSY = "lossy-"

GUARD_TOKENS = 256
"""How many of the last tokens of a hit are computed again, where state was coded for a sequence that went on
further: attention looks mostly at the last tokens, and those were coded for standing far from the end."""

StateClass = Annotated[str, msgspec.Meta(pattern=rf"\A(exact|{_LOSSY}{CODEC_NAME})\Z")]
"""`exact`, or `lossy-<codec>`. Each has roots of its own, so that none but exact state answers for exact."""

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


Provenance = Exact | Lossy
EXACT = Exact()


def lossy_class(codec: str) -> str:
    """The class of what went through that codec."""
    return _LOSSY + codec


def codec_of_class(state: str) -> str | None:
    """The codec that a class is named after; None for exact state."""
    return state.removeprefix(_LOSSY) if state.startswith(_LOSSY) else None
