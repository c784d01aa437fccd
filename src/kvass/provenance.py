"""Provenance: what was done to a state, and the class under whose root it is stored."""

from typing import Annotated

import msgspec

CODEC_NAME = "[a-z0-9][a-z0-9._-]{0,31}"
_LOSSY = "lossy-"

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
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind", tag="lossy"
):
    """It went through a lossy codec, or was computed upon state that did.

    `tables`: digest of the tables that the codec used. How it is stored now stands in the codec chain.
    """

    codec: CodecName
    tables: TablesDigest

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
