"""S3, or a server that speaks it, as a remote tier."""

from kvass.tiers.s3.store import S3Store

__all__ = ["S3Store"]
