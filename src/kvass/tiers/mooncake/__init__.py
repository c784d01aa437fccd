"""Mooncake Store as a remote tier."""

from kvass.tiers.mooncake.store import MooncakeStore

__all__ = ["MooncakeStore"]
