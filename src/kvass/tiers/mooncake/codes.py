"""Mooncake's return codes, and the errors that they mean."""

from kvass.errors import TierError, TierFullError, TierUnavailableError


class Codes:
    """Mooncake's return codes, as far as they are told apart."""

    ABSENT = (-703, -704, -710, -712)
    """Not there, or written half."""
    EXISTS = -705
    WRONG_CALL = -600
    FULL = -200
    BROKEN_OFF = (-800, -801)
    NO_MASTER = (-900, -901)
    PASSING = (*ABSENT, -101, -103, -707, -714, -1010)
    """Master restarted, lease ended, object in use, master starting."""


class BrokenOffError(TierUnavailableError):
    """A transfer failed on its way, and may not be over."""


def translated(code: int, what: str) -> TierError:
    """The error for a code."""
    if code == Codes.FULL:
        return TierFullError(
            f"cannot {what}: no member of Mooncake has room; raise mooncake_bytes, or let more members join"
        )
    if code in Codes.NO_MASTER:
        return TierUnavailableError(f"cannot {what}: Mooncake's master does not answer (code {code})")
    if code in Codes.BROKEN_OFF:
        return BrokenOffError(
            f"cannot {what}: a member of Mooncake does not answer (code {code}); see that it runs, and that "
            "members reach each other's ports"
        )
    kind = TierUnavailableError if code in Codes.PASSING else TierError
    return kind(f"cannot {what}: Mooncake says code {code}; MC_LOG_LEVEL=INFO shows more")
