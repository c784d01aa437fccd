"""Which codecs there are: our own, and those that other packages offer as `kvass.codecs` entry points."""

from importlib.metadata import entry_points

from kvass.codecs.base import Codec
from kvass.codecs.raw import Raw
from kvass.errors import ConfigError

_BUILT_IN: dict[str, type[Codec]] = {"raw": Raw}


def codec(name: str) -> Codec:
    """The codec of that name. Raises ConfigError, naming those there are."""
    if name in _BUILT_IN:
        return _BUILT_IN[name]()
    outside = entry_points(group="kvass.codecs")
    for point in outside:
        if point.name == name:
            made: Codec = point.load()()
            return made
    known = sorted({*_BUILT_IN, *(point.name for point in outside)})
    raise ConfigError(f"no codec is called {name!r}; there are: {', '.join(known)}")
