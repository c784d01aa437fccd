"""How a write of many objects is cut: the parts of one key belong together."""

from collections.abc import Iterable, Iterator, Sequence

from kvass.keys import KEY_BYTES
from kvass.tiers.base import WriteItem


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
