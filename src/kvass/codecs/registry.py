"""Which codecs there are: our own, and those that other packages offer as `kvass.codecs` entry points."""

import functools
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, NamedTuple

from kvass.codecs.base import Codec
from kvass.codecs.tables import Tables
from kvass.container import CodecStep
from kvass.errors import ConfigError, CorruptObjectError


class _BuiltIn(NamedTuple):
    """Where a codec's class is, imported when the codec is first used, what it is made with, and what it says
    of itself: that must be known where it cannot be imported, too."""

    module: str
    made_as: str
    lossless: bool
    setting: int | str | None = None
    end_aware: bool = False


_BUILT_IN = {
    "raw": _BuiltIn("raw", "Raw", True),
    "lossless": _BuiltIn("lossless", "Lossless", True),
    "int8": _BuiltIn("int8", "Int8", False),
    "kivi4": _BuiltIn("kivi", "Kivi", False, 4),
    "kivi2": _BuiltIn("kivi", "Kivi", False, 2),
    "q1": _BuiltIn("transform", "Transform", False, "q1", end_aware=True),
    "q2": _BuiltIn("transform", "Transform", False, "q2", end_aware=True),
    "q3": _BuiltIn("transform", "Transform", False, "q3", end_aware=True),
    "q4": _BuiltIn("transform", "Transform", False, "q4", end_aware=True),
}

LOSSY = tuple(name for name, line in _BUILT_IN.items() if not line.lossless)
"""Names of our own lossy codecs, the best first in each family."""


class NotDecodableError(CorruptObjectError):
    """Nothing here decodes an object: its codec or its tables are not at hand. It may be sound itself."""


class _UnknownCodecError(ConfigError):
    """No codec has that name."""


def codec(name: str, tables: Tables | None = None) -> Codec:
    """The codec of that name; lossy ones with a model's tables.

    Raises ConfigError, naming those there are, or what is missing for this one.
    """
    make, lossless = _found(name)
    if lossless:
        lossless_one: Codec = make()
        return lossless_one
    if tables is None:
        raise ConfigError(f"the codec {name!r} needs a model's tables; `kvass calibrate` makes them")
    made: Codec = make(tables)
    return made


def is_lossless(name: str) -> bool:
    """Whether a codec gives the same bits back. Raises ConfigError where there is no such codec, or it cannot
    be used in this installation."""
    return _found(name)[1]


def is_end_aware(name: str) -> bool:
    """Whether a codec spends less on chunks with more tokens behind them (see `Codec.end_aware`). Of one that
    is not here nobody knows, and its state may be: true, as that is the careful answer."""
    line = _BUILT_IN.get(name)
    if line is not None:
        return line.end_aware
    try:
        made, _ = _found(name)
    except (ConfigError, ImportError, AttributeError):  # there is none, or its package is broken
        return True
    return bool(getattr(made, "end_aware", False))


def codec_of(chain: Sequence[CodecStep], tables: Tables | None = None) -> Codec:
    """The codec that wrote an object with this chain.

    Raises CorruptObjectError where it was written by no known codec, with other parameters or with another
    model's tables, and NotDecodableError where no tables, or not what the codec needs, are at hand.
    """
    if len(chain) != 1:
        raise CorruptObjectError("object has a codec chain that this version cannot read")
    try:
        made = codec(chain[0].name, tables)
    except _UnknownCodecError as error:
        raise CorruptObjectError(str(error)) from error
    except ConfigError as error:
        raise NotDecodableError(str(error)) from error
    if made.step() != chain[0]:
        raise CorruptObjectError(f"object was written by {made.name!r} with other tables or parameters")
    return made


def _found(name: str) -> tuple[Callable[..., Any], bool]:
    """What makes a codec, and whether it is lossless: that takes no tables."""
    line = _BUILT_IN.get(name)
    if line is not None:
        make = getattr(_imported(name, line.module), line.made_as)
        return make if line.setting is None else functools.partial(_with, make, line.setting), line.lossless
    outside = entry_points(group="kvass.codecs")
    for point in outside:
        if point.name == name:
            loaded = point.load()
            return loaded, getattr(loaded, "lossless", True)
    known = sorted({*_BUILT_IN, *(point.name for point in outside)})
    raise _UnknownCodecError(f"no codec is called {name!r}; there are: {', '.join(known)}")


def _with(make: Callable[..., Any], setting: int | str, tables: Tables) -> Any:
    return make(tables, setting)


def _imported(name: str, module: str) -> Any:
    try:
        return import_module(f"kvass.codecs.{module}")
    except ModuleNotFoundError as error:
        if error.name == f"kvass.codecs.{module}":
            raise ConfigError(f"the codec {name!r} is not part of this installation") from error
        raise ConfigError(
            f"the codec {name!r} needs {error.name}, which is not installed: pip install 'kvass[codecs]'"
        ) from error
