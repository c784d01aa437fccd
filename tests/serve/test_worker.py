"""kvass worker: what it read for one process, another finds by an ordinary lookup."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2 as httpx
import msgspec
import pytest

from harness.ports import free_ports
from harness.servers import end, environment, host_path
from kvass.cache import KVCache
from kvass.chunks import as_tokens
from kvass.config import Settings
from kvass.engines.transformers import Engine, Sampling, encode_text, load_model
from kvass.engines.transformers.load import LoadedModel
from kvass.errors import InputError
from kvass.jobs import Job, Jobs
from kvass.keys import Namespace, tenant_digest
from kvass.serve.worker import reading
from kvass.tiers.directory import DirectoryTier

TEXT = "The keeper of the lighthouse wrote down every ship that passed, and where it went. "


def run(job: Job, engine: Engine, cancelled: bool = False) -> str | None:
    event = threading.Event()
    if cancelled:
        event.set()
    return reading(engine)(job, event)


def of_tenant(space: Namespace, salt: str) -> Namespace:
    return msgspec.structs.replace(space, tenant=tenant_digest(salt))


# -- what it does for a job -------------------------------------------------------------------------


@pytest.fixture
def engine(tiny_model: str, models_path: Path, tmp_path: Path) -> Iterator[Engine]:
    loaded = load_model(tiny_model, dtype="float32", models_path=models_path)
    with KVCache([DirectoryTier(tmp_path / "disk", 256 << 20, name="disk")], chunk_tokens=64) as cache:
        yield Engine(loaded.model, cache, tenant_salt="the operator's")


def test_a_job_is_read_in_its_tenants_name_though_nobody_told_the_salt(engine: Engine) -> None:
    space, tokens = of_tenant(engine.namespace, "a"), list(range(100, 400))
    assert run(Job.of(space, tokens), engine)
    assert engine.cache.lookup(tokens, space).length == 300
    assert engine.cache.lookup(tokens, engine.namespace).length == 0
    assert engine.cache.lookup(tokens, of_tenant(engine.namespace, "b")).length == 0


def test_what_public_tenants_stored_is_used_and_kept_again(engine: Engine) -> None:
    public, own = of_tenant(engine.namespace, "public"), of_tenant(engine.namespace, "own")
    tokens = list(range(100, 400))
    run(Job.of(public, tokens), engine)
    words = run(Job.of(own, [*tokens, 7, 8, 9], public=(public.tenant,)), engine)
    assert words.startswith("303 tokens, 300 were stored")
    assert engine.cache.lookup([*tokens, 7, 8, 9], own).length == 303


def test_a_job_that_is_cancelled_is_not_done(engine: Engine) -> None:
    assert run(Job.of(engine.namespace, list(range(100, 400))), engine, cancelled=True) is None


def test_a_job_that_the_model_cannot_read_is_refused(engine: Engine) -> None:
    with pytest.raises(InputError, match="vocabulary"):
        run(Job.of(engine.namespace, [engine.vocabulary]), engine)
    with pytest.raises(InputError, match="the model takes"):
        run(Job.of(engine.namespace, [1] * 5000), engine)
    with pytest.raises(InputError, match="budget"):
        run(Job.of(engine.namespace, [1, 2], budget=(0.1,)), engine)


# -- the command ------------------------------------------------------------------------------------


@pytest.fixture
def begin(tmp_path: Path, models_path: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Starts workers over the tiers and the queue of one folder."""
    with ExitStack() as stack:

        def started(*arguments: str, **settings: str) -> "subprocess.Popen[str]":
            own = {"jobs_path": str(tmp_path / "jobs"), "models_path": str(models_path)}
            process = subprocess.Popen(
                [sys.executable, "-m", "kvass", "worker", *arguments],
                env=environment(tmp_path, **(own | settings)), stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
            stack.callback(end, process)
            return process

        yield started


@contextlib.contextmanager
def asking(folder: Path, loaded: LoadedModel) -> Iterator[tuple[KVCache, Jobs, Engine]]:
    """What an engine in another process has: the same tiers and the same queue."""
    settings = Settings.load(
        host_path=Path(host_path(folder)), disk_path=folder / "disk", chunk_tokens=64
    )  # fmt: skip
    with KVCache.open(settings) as cache, contextlib.closing(Jobs(folder / "jobs", put_seconds=30)) as jobs:
        yield cache, jobs, Engine(loaded.model, cache)


def test_what_a_worker_read_another_process_finds(
    begin: Callable[..., "subprocess.Popen[str]"], smollm2_bf16: LoadedModel, tmp_path: Path
) -> None:
    port = free_ports(1)[0]
    worker = begin("--model", "smollm2-135m", "--metrics-port", str(port))
    with asking(tmp_path, smollm2_bf16) as (cache, jobs, engine):
        space = of_tenant(engine.namespace, "a tenant")
        short = as_tokens(encode_text(smollm2_bf16, TEXT * 20))
        assert jobs.wait(jobs.put(Job.of(space, short), 60), 60) == "no worker", "none is ready yet"
        assert "takes jobs from" in worker.stdout.readline()
        name = jobs.put(Job.of(space, short), 60)
        _until_there(jobs, name)
        assert cache.lookup(short, space).length == short.size
        assert cache.lookup(short, engine.namespace).length == 0, "it is the tenant's alone"

        long = as_tokens(encode_text(smollm2_bf16, TEXT * 70))
        began = time.monotonic()
        name = jobs.put(Job.of(engine.namespace, long), 0.2)
        assert jobs.wait(name, 0.2) == "timeout"
        assert time.monotonic() - began < 1.5, "who asks gives up at its deadline"
        _until_there(jobs, name)
        usage = _answered(engine, long)
        assert usage.cached_tokens == long.size - 1, "the result serves the next request"

        bad = jobs.put(Job.of(engine.namespace, [engine.vocabulary]), 60)
        assert jobs.wait(bad, 60) == "failed"
        told = httpx.get(f"http://127.0.0.1:{port}/metrics").text
        assert 'kvass_jobs_total{outcome="done"} 2.0' in told
        assert 'kvass_jobs_total{outcome="failed"} 1.0' in told
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(20) == 0
        assert jobs.wait(jobs.put(Job.of(space, [1, 2, 3]), 60), 60) == "no worker"
    lines = worker.stderr.read().splitlines()
    assert len(lines) == 3, lines
    assert f"{short.size:,} tokens, 0 were stored" in lines[0]
    assert "done" in lines[1]
    assert "failed" in lines[2]
    assert "vocabulary" in lines[2]


def test_a_worker_that_is_stopped_or_killed_leaves_its_job_to_the_next(
    begin: Callable[..., "subprocess.Popen[str]"], smollm2_bf16: LoadedModel, tmp_path: Path
) -> None:
    with asking(tmp_path, smollm2_bf16) as (cache, jobs, engine):
        tokens = as_tokens(encode_text(smollm2_bf16, TEXT * 150))
        name = jobs.put(Job.of(engine.namespace, tokens), 100)
        stopped = begin("--log-level", "info")
        assert "takes jobs from" in stopped.stdout.readline()
        time.sleep(1)
        stopped.send_signal(signal.SIGINT)
        began = time.monotonic()
        assert stopped.wait(20) == 0
        assert time.monotonic() - began < 10
        assert "given back" in stopped.stderr.read()
        assert cache.lookup(tokens, engine.namespace).length < tokens.size

        killed = begin("--log-level", "warning")
        assert "takes jobs from" in killed.stdout.readline()
        time.sleep(0.5)
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
        assert jobs.wait(name, 0) in ("timeout", "no worker")
        next_one = begin("--log-level", "warning")
        assert "takes jobs from" in next_one.stdout.readline()
        _until_there(jobs, name)
        assert cache.lookup(tokens, engine.namespace).length == tokens.size
        next_one.send_signal(signal.SIGTERM)
        assert next_one.wait(20) == 0
        assert next_one.stderr.read() == "", "quiet"


@pytest.mark.parametrize("where", ["jobs_path", "host_path"])
def test_a_mistake_is_said_before_anything_is_loaded(
    begin: Callable[..., "subprocess.Popen[str]"], tiny_model: str, tmp_path: Path, where: str
) -> None:
    (tmp_path / "file").touch()
    place = tmp_path / ("file" if where == "jobs_path" else "no-tmpfs")
    worker = begin("--model", tiny_model, **{where: str(place)})
    assert worker.wait(120) == 2
    said = worker.stderr.read()
    assert where in said
    assert "Traceback" not in said


def _until_there(jobs: Jobs, name: str | None, seconds: float = 120) -> None:
    stop = time.monotonic() + seconds
    while (found := jobs.wait(name, 1.0)) != "done":
        assert found in ("timeout", "no worker")
        assert time.monotonic() < stop, "nobody did it"
        time.sleep(0.02)


def _answered(engine: Engine, tokens: Any) -> Any:
    from kvass.engines.transformers import Usage

    usage = Usage()
    for _ in engine.generate(tokens, Sampling(max_tokens=1), usage=usage):
        pass
    return usage
