"""Redis, Valkey or Redis Cluster as a remote tier."""

from kvass.tiers.redis.store import RedisStore

__all__ = ["RedisStore"]
