"""The error tree: everything kvass raises on purpose derives from `KvassError`.

    KvassError
    ├── ConfigError              a setting is unknown, unparsable or contradictory
    ├── InputError               the caller's tokens, arrays or names are unusable (also a ValueError)
    ├── UnsupportedModelError    a model has a layer kind or RoPE that kvass does not handle yet
    ├── ModelFilesError          a model's files are missing or unreadable
    ├── TierError                a tier could not do what it was asked
    │   ├── TierUnavailableError     it is missing, read-only, of another format or was closed
    │   └── TierFullError            its budget or its disk has no room that may be freed
    └── CorruptObjectError       stored bytes failed verification; always treated as a miss

A cache never lets these reach an engine's forward path: there, any of them is a miss.
"""


class KvassError(Exception):
    """Base of every error that kvass raises on purpose."""


class ConfigError(KvassError):
    """A setting is unknown, unparsable or contradictory; the message names it."""


class InputError(KvassError, ValueError):
    """The caller's tokens, arrays or names are unusable; the message says which and why."""


class UnsupportedModelError(KvassError):
    """The model has a layer kind or RoPE that kvass does not handle yet; nothing was stored."""


class ModelFilesError(KvassError):
    """A model's files are missing or unreadable; the message says what to install or where to look."""


class TierError(KvassError):
    """A tier could not do what it was asked; what it held before is unchanged."""


class TierUnavailableError(TierError):
    """The tier is missing, read-only, of another format version, or was closed."""


class TierFullError(TierError):
    """The tier's budget or its disk has no room that may be freed; nothing was stored."""


class CorruptObjectError(KvassError):
    """Stored bytes failed verification. The object is to be quarantined and counted as a miss."""
