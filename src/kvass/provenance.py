"""Provenance: what was done to a state, and the class under whose root it is stored."""

from typing import Literal

import msgspec

StateClass = Literal["exact"]


class Provenance(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a state came to be. `exact`: an unmodified forward of the model computed it.

    Approximate classes join when the first approximate path with a certificate does; each then gets
    a root of its own, so that none of them can ever answer for exact state.
    """

    kind: StateClass = "exact"


EXACT = Provenance()
