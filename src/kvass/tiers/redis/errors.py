"""What a Redis error means to a tier, and what to do about it, without a password in it."""

from kvass.errors import TierError, TierFullError, TierUnavailableError
from kvass.tiers.redis.address import Address

_PASSES = ("BUSY", "MISCONF", "NOREPLICAS", "UNBLOCKED")
"""Codes of errors without a class of their own that may be over the next time."""


def in_our_terms(error: Exception, address: Address) -> TierError:
    """TierUnavailableError for what may pass, TierFullError where there is no room, or TierError."""
    import redis
    from redis import exceptions as kinds

    # an unknown command's error repeats its arguments
    text = str(error).partition(", with args")[0]
    if address.password:
        text = text.replace(address.password, "…")
    said = f"Redis at {address}: {text[:300]}"
    if isinstance(error, redis.OutOfMemoryError):
        return TierFullError(f"{said} (maxmemory is reached, and its policy evicts nothing)")
    if isinstance(error, kinds.NoPermissionError):
        return TierError(f"{said}; let the user of redis_url read, write and scan keys")
    if isinstance(error, redis.AuthenticationError | kinds.AuthenticationWrongNumberOfArgsError):
        return TierError(f"{said}; correct the user and password in redis_url or redis_password_file")
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return TierError(f"{said}; name its certificate authority in redis_ca_file")
    if not address.cluster and isinstance(error, kinds.AskError):
        return TierError(f"Redis at {address} is part of a cluster; redis_url must be redis+cluster://")
    if "cluster support disabled" in text:
        return TierError(f"Redis at {address} is no cluster; redis_url must be redis://")
    passing = (
        redis.ConnectionError, redis.TimeoutError, redis.ReadOnlyError, kinds.ClusterDownError,
        kinds.TryAgainError, kinds.AskError, OSError,
    )  # fmt: skip
    if isinstance(error, passing) or text.startswith(_PASSES):
        return TierUnavailableError(said)
    return TierError(said)
