"""Where fingerprints of stored texts stand: two tables of a directory tier's index.

Databases:  marks       beginning of the root + fingerprint -> key and place of each chunk that has it, the
                        latest last, at most `MOST_MARKS`
            marked      address -> the fingerprints that lead to it, and go with it

A row may be wrong, where the beginnings of two roots or two fingerprints are equal: whoever reads compares.
"""

import struct
from collections.abc import Sequence

import numpy as np

from kvass.chunks import Tokens
from kvass.fingerprints import SHORTEST, Fingerprints, fingerprints_of_parts
from kvass.keys import KEY_BYTES, Namespace, address, split_address
from kvass.tiers.base import MOST_MARKS, Mark
from kvass.tiers.environment import Txn
from kvass.tiers.index import Index, unpack_tokens

_ROOT_BYTES = 8
_VALUE = np.dtype(">u8")
_PLACE = struct.Struct(f"<{KEY_BYTES}si")


def is_marked(namespace: Namespace, one: bytes) -> bool:
    """Whether fingerprints lead to an object: to the main part of exact state's chunks."""
    return namespace.state == "exact" and split_address(one)[1:] == (0, 0)


def insert(index: Index, txn: Txn, one: bytes, root: bytes, marks: Fingerprints) -> None:
    """Let fingerprints lead to an object, which is in the index."""
    key, values = one[:KEY_BYTES], marks.values.astype(_VALUE)
    for row, place in zip(_rows(root, values.tobytes()), marks.places.tolist(), strict=True):
        places = _read(index, txn, row)
        _write(index, txn, row, [*places, (key, place)][-MOST_MARKS:])
    if values.size:
        txn.put(one, values.tobytes(), db=index.marked)


def remove(index: Index, txn: Txn, one: bytes, root: bytes) -> None:
    """Let nothing lead to an object any more."""
    values = txn.get(one, None, index.marked)
    if values is None:
        return
    for row in _rows(root, bytes(values)):
        _write(index, txn, row, [place for place in _read(index, txn, row) if place[0] != one[:KEY_BYTES]])
    txn.delete(one, db=index.marked)


def seen(index: Index, txn: Txn, root: bytes, values: Sequence[int]) -> list[Mark]:
    """See `kvass.tiers.base.Marking`."""
    there: dict[bytes, bool] = {}
    found = []
    rows = _rows(root, np.array(values, _VALUE).tobytes())
    for value, row in zip(values, rows, strict=True):
        for key, place in _read(index, txn, row):
            one = address(key, 0)
            if one not in there:
                record = index.get(txn, one)
                there[one] = record is not None and record.root == root
            if there[one]:
                found.append(Mark(value, one, place))
    return found


def marks_of(index: Index, txn: Txn, parent: bytes, tokens: Tokens) -> Fingerprints:
    """The fingerprints of a chunk behind one that is in the index (empty: behind none)."""
    parts, size = [tokens], 0
    while parent and size < SHORTEST:
        record, packed = index.get(txn, parent), txn.get(parent, None, index.tokens)
        if record is None or packed is None:
            break
        parts.append(unpack_tokens(bytes(packed)))
        size += parts[-1].size
        parent = record.parent
    (marks,) = fingerprints_of_parts(np.concatenate(parts[::-1]), [size])
    return marks


def _rows(root: bytes, values: bytes) -> list[bytes]:
    width = _VALUE.itemsize
    return [root[:_ROOT_BYTES] + values[at : at + width] for at in range(0, len(values), width)]


def _read(index: Index, txn: Txn, row: bytes) -> list[tuple[bytes, int]]:
    raw = txn.get(row, None, index.marks)
    return [] if raw is None else list(_PLACE.iter_unpack(raw))


def _write(index: Index, txn: Txn, row: bytes, places: Sequence[tuple[bytes, int]]) -> None:
    if places:
        txn.put(row, b"".join(_PLACE.pack(*one) for one in places), db=index.marks)
    else:
        txn.delete(row, db=index.marks)
