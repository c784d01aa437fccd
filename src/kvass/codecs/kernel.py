"""How the codecs' inner loops are compiled: the same arithmetic on every CPU, cached on disk."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from blake3 import blake3

F = TypeVar("F", bound=Callable[..., Any])


def _revision() -> str:
    """Digest of the codecs' sources."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return blake3(b"\0".join(path.read_bytes() for path in sources)).hexdigest(length=8)


_REVISION = _revision()


def kernel(function: F) -> F:
    """Compile for arrays and numbers, without the interpreter's lock.

    No reordering of floating-point sums and no fused multiply-add: a twin in plain numpy gives the same bits.
    Indexes are not checked: whatever they come from must be bounded before.
    """
    # numba's cache looks at a function's own file alone, but what it calls is compiled into it
    function.__qualname__ = f"{function.__qualname__}_{_REVISION}"
    try:
        return cast(F, numba.njit(cache=True, nogil=True, fastmath=False, error_model="numpy")(function))
    except RuntimeError:  # there is no folder that it may write to: each process compiles anew
        return cast(F, numba.njit(nogil=True, fastmath=False, error_model="numpy")(function))
