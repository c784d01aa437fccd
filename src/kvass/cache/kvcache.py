"""KVCache: lookup, load, store, prefetch, pin, forget, explain over an ordered list of tiers."""

import logging
from typing import Self

from kvass.cache.anywhere import Anywhere
from kvass.cache.converting import Converting
from kvass.cache.storing import Storing
from kvass.cache.upkeep import Upkeep
from kvass.config import Settings
from kvass.errors import ConfigError, TierError
from kvass.quality import Budget, Gate
from kvass.tiers.base import Tier
from kvass.tiers.directory import DirectoryTier, on_tmpfs
from kvass.tiers.memory import MemoryTier
from kvass.tiers.remote import FAR_THREADS, RemoteTier
from kvass.tiers.remotes import configured

log = logging.getLogger("kvass.cache")


class KVCache(Storing, Converting, Upkeep, Anywhere):
    """Keeps KV in tiers, fastest first. Safe for several threads; several processes may share tiers.

    Nothing here raises because of a tier: what cannot be read is a miss, what cannot be stored is
    dropped, both counted in `kvass.metrics`. Only unusable arguments raise (InputError).
    """

    @classmethod
    def open(
        cls,
        settings: Settings | None = None,
        *,
        chunk_tokens: int | None = None,
        shards: tuple[int, ...] = (0,),
    ) -> Self:
        """A cache with the tiers that the settings name. A tier of this machine that cannot be used is left
        out, with a warning; `unavailable` says why. Raises ConfigError for contradictory settings."""
        settings = settings or Settings.load()
        if settings.host_bytes and settings.disk_bytes and settings.host_path == settings.disk_path:
            raise ConfigError("host_path and disk_path are the same directory; give each tier its own")
        remotes = list(configured(settings))  # before anything is opened that would have to be closed
        if remotes and not (settings.host_bytes or settings.disk_bytes):
            raise ConfigError(f"the {remotes[0][0]} tier needs one on this machine; set host_bytes above 0")
        tiers: list[Tier] = []
        unavailable = {}
        if settings.host_bytes:
            if on_tmpfs(settings.host_path):
                try:
                    tiers.append(DirectoryTier(settings.host_path, settings.host_bytes, name="host"))
                except TierError as error:
                    unavailable["host"] = str(error)
            else:
                unavailable["host"] = f"host_path {settings.host_path} is not on a tmpfs"
            if not tiers:
                log.warning(
                    "kvass: %s; memory of this process is used, which no other shares", unavailable["host"]
                )
                tiers.append(MemoryTier(settings.host_bytes))
        if settings.disk_bytes:
            try:
                tiers.append(DirectoryTier(settings.disk_path, settings.disk_bytes, name="disk"))
            except TierError as error:
                unavailable["disk"] = str(error)
                log.warning("kvass: no SSD tier: %s", error)
        threads = max(FAR_THREADS, settings.io_threads)
        tiers += [
            RemoteTier(name, store, call_seconds=settings.remote_call_seconds, threads=threads)
            for name, store in remotes
        ]
        codecs = {"host": settings.host_codec, "disk": settings.disk_codec}
        codecs |= {name: settings.remote_codec for name, _ in remotes}
        try:
            cache = cls(
                tiers,
                chunk_tokens=chunk_tokens or settings.chunk_tokens,
                io_threads=settings.io_threads,
                store_deadline=settings.store_deadline,
                shards=shards,
                exists_seconds=settings.remote_exists_seconds,
                lane_objects=settings.remote_queue_objects,
                codecs=codecs,
                gate=Gate(settings.models_path),
                budget=Budget.of(settings),
            )
        except ConfigError:
            for tier in tiers:
                tier.close()
            raise
        cache.unavailable = unavailable
        return cache
