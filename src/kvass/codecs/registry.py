"""Which codecs there are: our own, and those that other packages offer as `kvass.codecs` entry points."""

from collections.abc import Sequence
from importlib.metadata import entry_points

from kvass.codecs.base import Codec
from kvass.codecs.raw import Raw
from kvass.container import CodecStep
from kvass.errors import ConfigError, CorruptObjectError

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


def codec_of(chain: Sequence[CodecStep]) -> Codec:
    """The codec that wrote an object with this chain. Raises CorruptObjectError where none here did."""
    if len(chain) != 1:
        raise CorruptObjectError("object has a codec chain that this version cannot read")
    try:
        made = codec(chain[0].name)
    except ConfigError as error:
        raise CorruptObjectError(str(error)) from error
    if made.step() != chain[0]:
        raise CorruptObjectError(f"object was written by {made.name!r} with other parameters")
    return made
