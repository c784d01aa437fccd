"""Undoing what dead owners left in a directory tier: looks at intents and folders, never at the objects."""

import contextlib
import shutil
from pathlib import Path

from kvass.tiers import rebuild
from kvass.tiers.environment import Txn
from kvass.tiers.files import charge, discard
from kvass.tiers.index import Index
from kvass.tiers.owners import Owner, dead_owner


def reconcile(base: Path, index: Index, living: Owner) -> None:
    """Take back the intents of all owners that are gone, and remove what they left."""
    owners = base / "owners"
    for folder in list(owners.iterdir()):
        if folder == living.folder:
            continue
        with dead_owner(folder) as owner:
            if owner is None:
                continue
            for name in ("tmp", "leases"):  # files before their charge
                shutil.rmtree(folder / name, ignore_errors=True)
            _undo_all(base, index, owner)
            shutil.rmtree(folder, ignore_errors=True)
    for owner in _writers(index):
        if not (owners / owner.hex()).exists():
            _undo_all(base, index, owner)
    _count_quarantine(base, index)


def undo_intent(base: Path, index: Index, txn: Txn, one: bytes, owner: bytes) -> None:
    """Take back what `owner` began, unless somebody else has begun the same since."""
    found = index.intent(txn, one)
    if found is not None and found[0] != owner:
        return
    record = index.get(txn, one)
    if record is None:
        discard(rebuild.object_path(base, one))
    else:  # it was being replaced: the file may be the new one already
        with contextlib.suppress(OSError):
            size = charge(rebuild.object_path(base, one).stat().st_size)
            index.put(txn, one, record._replace(size=size))
            index.add_usage(txn, size - record.size, 0)
    index.settle(txn, one, keep=False)


def _undo_all(base: Path, index: Index, owner: bytes) -> None:
    if owner in _writers(index):
        with index.write() as txn:
            for one in index.intents_of(txn, owner):
                undo_intent(base, index, txn, one, owner)


def _writers(index: Index) -> set[bytes]:
    with index.read() as txn:
        return index.writers(txn)


def _count_quarantine(base: Path, index: Index) -> None:
    """Rows and files of the quarantine, should somebody have died between the two."""
    folder = base / "quarantine"
    if _in_quarantine(index) == {path.name for path in folder.iterdir()}:
        return
    with index.write() as txn:
        rows = index.in_quarantine(txn)
        files = {path.name for path in folder.iterdir()}
        for name in rows.keys() - files:
            index.release_quarantined(txn, name, rows[name])
        for name in files - rows.keys():
            discard(folder / name)


def _in_quarantine(index: Index) -> set[str]:
    with index.read() as txn:
        return set(index.in_quarantine(txn))
