"""How a write of many objects is cut and sifted: the parts of one key belong together."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvass.keys import KEY_BYTES
from kvass.tiers.base import WriteItem
from kvass.tiers.environment import Txn
from kvass.tiers.files import charge
from kvass.tiers.index import Index


def batches(items: Sequence[WriteItem], least: int) -> Iterator[list[WriteItem]]:
    """Cut a write where one transaction should end: after `least` items, but not between a key's parts."""
    batch: list[WriteItem] = []
    for item in items:
        if len(batch) >= least and item.address[:KEY_BYTES] != batch[-1].address[:KEY_BYTES]:
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch


def by_key(items: Sequence[WriteItem]) -> Iterable[list[WriteItem]]:
    """The items with all parts of a key together; parents still come before their children."""
    found: dict[bytes, list[WriteItem]] = {}
    for item in items:
        found.setdefault(item.address[:KEY_BYTES], []).append(item)
    return found.values()


class Sifted(NamedTuple):
    """Items of a write: there already, to be stored (room is made for no others), larger than everything
    there could be, without a parent, being written by somebody else."""

    there: set[bytes]
    wanted: list[WriteItem]
    large: list[bytes]
    orphans: int
    taken: int


def sift(index: Index, txn: Txn, items: Sequence[WriteItem], most: int) -> Sifted:
    """Look at the items of a write; `most`: bytes that there could be room for at best."""
    there: set[bytes] = set()
    wanted: dict[bytes, WriteItem] = {}
    large: list[bytes] = []
    orphans = taken = 0
    for item in items:
        one, parent = item.address, item.parent
        if index.get(txn, one) is not None:
            there.add(one)
        elif index.intent(txn, one) is not None:
            taken += 1
        elif charge(item.blob.size) > most:
            large.append(one)
        elif parent is None or parent in wanted or index.get(txn, parent) is not None:
            wanted.setdefault(one, item)
        else:
            orphans += 1
    return Sifted(there, list(wanted.values()), large, orphans, taken)
