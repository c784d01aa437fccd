"""kvass worker: holds a model, and reads what engines without kvass' means ask for in the queue."""

import logging
import os
import signal
import sqlite3
from types import FrameType
from typing import Annotated, Literal

import typer
from rich.markup import escape

from kvass.cache import KVCache
from kvass.cli.output import Model, needs_transformers, out
from kvass.config import Settings
from kvass.errors import ConfigError, TierError


def worker(
    model: Model = "smollm2-135m",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32, as who asks runs it.")] = (
        "bfloat16"
    ),
    log_level: Annotated[
        Literal["info", "warning", "error"],
        typer.Option(help="info: a line for each job; warning: only for those that failed; error: none."),
    ] = "info",
) -> None:
    """Do what others leave to a worker of this model, from the queue in jobs_path (docs/worker.md).

    Any number of workers may share a queue. Ctrl-C or SIGTERM ends it; the job under way is given back.

    Example: kvass worker --model smollm2-135m
    """
    needs_transformers()
    from kvass.jobs import Jobs, Worker, model_digest

    settings = Settings.load()
    jobs = Jobs.open(settings)
    try:  # before the seconds that a model takes to load
        jobs.check()
    except (OSError, sqlite3.Error, TierError) as error:
        raise ConfigError(f"the queue in jobs_path {settings.jobs_path} cannot be used: {error}") from error
    logging.basicConfig(format="%(message)s")
    logging.getLogger("kvass").setLevel(log_level.upper())

    from kvass.engines.transformers import Engine, load_model
    from kvass.engines.transformers.hosting import kept_under
    from kvass.serve.worker import reading

    loaded = load_model(model, dtype=dtype, models_path=settings.models_path)  # type: ignore[arg-type]
    with KVCache.open(settings) as cache:
        if not cache.tiers or not cache.tiers[0].shared:
            why = cache.unavailable.get("host", "no tier is turned on")
            raise ConfigError(
                f"others could not load what a worker stores: {why}; correct host_path, or turn it off with "
                "host_bytes = 0 and let disk_path do"
            )
        shared = kept_under(loaded, settings, settings.tenant_salt)
        engine = Engine(loaded.model, cache, tenant_salt=settings.tenant_salt, shared=shared)
        one = Worker(jobs, model_digest(engine.namespace), reading(engine))

        def end(number: int, frame: FrameType | None) -> None:
            """The first signal asks, the second does not: stores are whole or absent at any instant."""
            if one.stopping:
                os._exit(128 + number)
            one.stop()

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, end)
        out.print(
            f"kvass worker of {escape(loaded.name)} takes jobs from {escape(str(settings.jobs_path))}",
            soft_wrap=True,
        )
        one.work()
    jobs.close()
