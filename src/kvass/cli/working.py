"""kvass worker: holds a model, and does what engines leave to it in the queue of jobs."""

import contextlib
import logging
import os
import signal
import sqlite3
from types import FrameType
from typing import Annotated, Literal

import typer
from prometheus_client import start_http_server
from rich.markup import escape

from kvass import metrics
from kvass.cache import KVCache
from kvass.cli.output import Model, needs_transformers, out
from kvass.config import Settings
from kvass.errors import ConfigError, TierError
from kvass.jobs import Jobs, Worker, model_digest


def worker(
    model: Model = "smollm2-135m",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32, as who asks runs it.")] = (
        "bfloat16"
    ),
    log_level: Annotated[
        Literal["info", "warning", "error"],
        typer.Option(help="info: a line for each job; warning: only for those that failed; error: none."),
    ] = "info",
    metrics_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of 127.0.0.1 that shows /metrics.")
    ] = None,
) -> None:
    """Do what others leave to a worker of this model, from the queue in jobs_path (docs/worker.md).

    Any number of workers may share a queue. Ctrl-C or SIGTERM ends it; the job under way is given back.

    Example: kvass worker --model smollm2-135m
    """
    needs_transformers()
    settings = Settings.load()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("kvass").setLevel(log_level.upper())
    with contextlib.closing(_queue(settings)) as jobs, KVCache.open(settings) as cache:
        _check_shared(cache)  # what is wrong is said before the seconds that a model takes to load
        if metrics_port is not None:
            _show_metrics(metrics_port)

        from kvass.engines.transformers import Engine, load_model
        from kvass.engines.transformers.hosting import kept_under
        from kvass.serve.worker import reading

        loaded = load_model(model, dtype=dtype, models_path=settings.models_path)  # type: ignore[arg-type]
        shared = kept_under(loaded, settings, settings.tenant_salt)
        engine = Engine(loaded.model, cache, tenant_salt=settings.tenant_salt, shared=shared)
        one = Worker(jobs, model_digest(engine.namespace), reading(engine))
        _stop_by_signals(one)
        what = f"kvass worker of {loaded.name} takes jobs from {settings.jobs_path}"
        out.print(escape(what), soft_wrap=True)
        one.work()


def _queue(settings: Settings) -> Jobs:
    jobs = Jobs.open(settings)
    try:
        jobs.check()
    except (OSError, sqlite3.Error, TierError) as error:
        jobs.close()
        raise ConfigError(f"the queue in jobs_path {settings.jobs_path} cannot be used: {error}") from error
    return jobs


def _check_shared(cache: KVCache) -> None:
    if not cache.tiers or not cache.tiers[0].shared:
        why = cache.unavailable.get("host", "no tier is turned on")
        raise ConfigError(
            f"others could not load what a worker stores: {why}; correct host_path, or turn it off with "
            "host_bytes = 0 and let disk_path do"
        )


def _show_metrics(port: int) -> None:
    try:
        start_http_server(port, "127.0.0.1", registry=metrics.registry)
    except OSError as error:
        raise ConfigError(f"cannot listen on --metrics-port {port}: {error.strerror}") from error


def _stop_by_signals(one: Worker) -> None:
    """The first one asks, the second does not: stores are whole or absent at any instant."""

    def end(number: int, frame: FrameType | None) -> None:
        if one.stopping:
            os._exit(128 + number)
        one.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
