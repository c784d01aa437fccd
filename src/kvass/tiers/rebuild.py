"""Opening a directory tier: its note of the format, its index, and that index made anew from the files."""

import contextlib
import fcntl
import json
import logging
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from kvass.chunks import Tokens, as_tokens
from kvass.container import read_header
from kvass.errors import CorruptObjectError, InputError, TierError, TierUnavailableError
from kvass.keys import FORMAT_VERSION, address_text, next_key, parse_address, split_address
from kvass.tiers import index as index_module
from kvass.tiers import marks
from kvass.tiers.environment import IndexDamagedError, Txn, destroy
from kvass.tiers.files import charge, discard, open_object
from kvass.tiers.index import Index, Record

log = logging.getLogger("kvass.tiers")

_SUFFIX = ".safetensors"
_SETUP_SECONDS = 10.0
_ROWS = 1000
"""Rows that are written in one transaction."""


def object_path(base: Path, one: bytes) -> Path:
    """Where an object's file stands in a tier."""
    text = address_text(one)
    return base / "objects" / text[:2] / (text + _SUFFIX)


@contextlib.contextmanager
def setup_lock(base: Path) -> Iterator[None]:
    """Held by whoever opens a tier. Raises TierUnavailableError when somebody else holds it for long."""
    with (base / "setup.lock").open("a") as file:
        deadline = time.monotonic() + _SETUP_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TierUnavailableError(
                        f"the index of {base} is being rebuilt by another process; try again later"
                    ) from None
                time.sleep(0.01)
        yield


def check_format(base: Path) -> None:
    """Note the format in a new tier. Raises TierUnavailableError for another one."""
    note = base / "kvass.json"
    text = note.read_text(errors="replace") if note.exists() else ""
    if not text:  # new, or the machine lost its power before the note reached the disk
        fresh = base / "kvass.json.new"
        fresh.write_text(json.dumps({"format": FORMAT_VERSION}) + "\n")
        fresh.rename(note)
        return
    try:
        found = json.loads(text)["format"]
    except (ValueError, KeyError, TypeError, RecursionError):
        found = "unreadable"
    if found != FORMAT_VERSION:
        raise TierUnavailableError(
            f"{base} is of format {found}, not {FORMAT_VERSION}; use another directory or remove it"
        )


def open_index(base: Path, name: str, *, durable: bool) -> Index:
    """The index of a tier, rebuilt where it is missing or damaged. Call it under `setup_lock`.

    Raises TierUnavailableError; an index that others may be using is not touched then.
    """
    try:
        return _open_ready(base, name, durable=durable)
    except IndexDamagedError as error:
        log.warning("kvass: %s: %s; rebuilding it from the files", name, error)
        destroy(base / "index")
        return _open_ready(base, name, durable=durable)


def _open_ready(base: Path, name: str, *, durable: bool) -> Index:
    index = index_module.acquire(base / "index", durable=durable)
    try:
        if not _ready(index):
            _rebuild(base, name, index)
    except BaseException:
        index_module.release(index)
        raise
    return index


def _ready(index: Index) -> bool:
    with index.read() as txn:
        return index.ready(txn)


def _rebuild(base: Path, name: str, index: Index) -> None:
    """Fill an index from the object files: two header reads and a row for each, parents first."""
    with index.write() as txn:
        index.clear(txn)  # somebody may have died while doing this
    found = []
    for path in (base / "objects").glob(f"*/*{_SUFFIX}"):
        try:
            found.append((_describe(base, path)[1].position, path))
        except FileNotFoundError:
            continue
        except (CorruptObjectError, InputError, TierError) as error:
            log.warning("kvass: %s: %s is set aside: %s", name, path.name, error)
            set_aside(base, path)
    found.sort()
    for start in range(0, len(found), _ROWS):
        with index.write() as txn:
            for _, path in found[start : start + _ROWS]:
                _enter(base, index, txn, path)
    with index.write() as txn:
        for path in (base / "quarantine").iterdir():
            index.charge_quarantined(txn, path.name, charge(path.stat(follow_symlinks=False).st_size))
        index.set_ready(txn)


def _enter(base: Path, index: Index, txn: Txn, path: Path) -> None:
    try:
        one, record, tokens, marked = _describe(base, path)
    except (FileNotFoundError, CorruptObjectError, InputError, TierError):
        return  # evicted or quarantined meanwhile, by a process that has the old index
    if record.parent:
        above = index.get(txn, record.parent)
        if above is None or above.root != record.root or above.position + above.length != record.position:
            discard(path)
            return
    # What an object supersedes stays: its children come only later.
    index.insert(txn, one, record, tokens)
    if marked and tokens is not None:
        marks.insert(index, txn, one, record.root, marks.marks_of(index, txn, record.parent, tokens))
    index.add_usage(txn, record.size, 0)


def _describe(base: Path, path: Path) -> tuple[bytes, Record, Tokens | None, bool]:
    """Address, record and tokens of an object file, and whether fingerprints lead to it. Raises
    CorruptObjectError or InputError for one whose name, place and content do not belong together."""
    with open_object(path) as reader:
        header = read_header(reader).header
        size = reader.size
    one = parse_address(path.name.removesuffix(_SUFFIX))
    key, group, shard = split_address(one)
    if (header.key, header.group, header.shard) != (key.hex(), group, shard) or object_path(
        base, one
    ) != path:
        raise CorruptObjectError("object is not the one its file name says")
    parent = parse_address(header.parent) if header.parent else b""
    root = header.namespace.root()
    tokens = as_tokens(header.tokens)
    if next_key(split_address(parent)[0] if parent else root, tokens.tobytes(), tokens.size) != key:
        raise CorruptObjectError("object's key is not that of its tokens")
    changed = path.stat(follow_symlinks=False).st_mtime
    record = Record(
        charge(size), tokens.size, header.position, 0, changed, changed, 0.0, parent, root
    )  # fmt: skip
    return one, record, tokens if group == 0 else None, marks.is_marked(header.namespace, one)


def set_aside(base: Path, path: Path) -> Path | None:
    """Move a file into quarantine; its new path, or None where nothing is left of it to keep."""
    target = base / "quarantine" / f"{path.name}.{time.time_ns()}"
    try:
        status = path.stat(follow_symlinks=False)
        if stat.S_ISREG(status.st_mode):
            path.rename(target)
            return target
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("kvass: %s cannot be set aside and is removed: %s", path, error)
    discard(path)
    return None
