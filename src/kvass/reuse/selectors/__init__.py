"""Which tokens of reused segments are computed anew; one way to choose a file."""

from collections.abc import Callable, Mapping
from typing import Final

from kvass.errors import InputError
from kvass.reuse.selectors.all import Everything
from kvass.reuse.selectors.base import Choice, Selector
from kvass.reuse.selectors.boundary import Boundary
from kvass.reuse.selectors.deviation import Deviation
from kvass.reuse.selectors.none import Nothing
from kvass.reuse.selectors.query import Query
from kvass.reuse.selectors.random import Random
from kvass.reuse.selectors.view import View

SELECTORS: Final[Mapping[str, Callable[[], Selector]]] = {
    "query": Query,
    "view": View,
    "boundary": Boundary,
    "deviation": Deviation,
    "random": Random,
    "none": Nothing,
    "all": Everything,
}
DEFAULT: Final = "query"


def selector(name: str) -> Selector:
    """The selector of that name. Raises InputError where there is none."""
    try:
        return SELECTORS[name]()
    except KeyError:
        raise InputError(f"there is no selector {name!r}; one of {', '.join(SELECTORS)} is") from None


__all__ = ["DEFAULT", "SELECTORS", "Choice", "Selector", "selector"]
