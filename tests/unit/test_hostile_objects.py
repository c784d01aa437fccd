"""Whatever stands in place of an object: a miss, at once, in little memory, and the tier goes on working."""

import ctypes
import json
import os
import shutil
import socket
import struct
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import xxhash

from harness.kv import CHUNK, load, namespace, store, text, values
from kvass import metrics
from kvass.cache import KVCache, Pool
from kvass.chunks import MAX_TOKEN_ID, Tokens
from kvass.container import MAX_HEADER_BYTES, read_header
from kvass.keys import address, address_text, content_key
from kvass.spec import KVSpec
from kvass.tiers.directory import DirectoryTier
from kvass.tiers.files import charge, open_object

BUDGET = 32 << 20
SECONDS = 0.05
MEMORY = 8 << 20

HEADS = 4
SPACE = namespace(HEADS)
OTHER_TENANT = namespace(HEADS, tenant="t" * 64)
TEXT = text(1, 0, 3 * CHUNK + 5)
OTHER = text(2, 0, 3 * CHUNK + 5)
BRANCH = text(1, 1, 3 * CHUNK + 5, fork=CHUNK + 3)

_AT = 8 + len(b'{"__metadata__":{"kvass":"{\\"digest\\":\\"')
DIGITS = slice(_AT, _AT + 32)
"""Where the header's digest stands in an object."""


def opened(tier: DirectoryTier) -> KVCache:
    """A cache that keeps house only when told to: a file that is being replaced is gone for a moment."""
    cache = KVCache([tier], chunk_tokens=CHUNK)
    cache._executor._stop.set()
    return cache


class Bench(NamedTuple):
    """A cache over one directory tier in memory, with two texts, a branch and another tenant's in it."""

    cache: KVCache
    tier: DirectoryTier

    def file(self, chunk: int, group: int = 0, tokens: Tokens = TEXT) -> Path:
        """The object file of a chunk of a text."""
        pieces = self.cache.lookup(tokens, SPACE).pieces(unseen=True)
        return self.tier._path(
            next(piece.address for piece in pieces if (piece.chunk, piece.group) == (chunk, group))
        )

    def fill(self) -> None:
        """Store everything that is not there."""
        for tokens in (TEXT, OTHER, BRANCH):
            store(self.cache, tokens, SPACE)
        store(self.cache, TEXT, OTHER_TENANT)

    def refill(self) -> None:
        """Everything is there, and hits to its last token."""
        self.fill()
        for tokens in (TEXT, OTHER, BRANCH):
            assert load(self.cache, tokens, SPACE) == tokens.size

    def corrupt(self) -> float:
        """How many objects were counted as corrupt in this tier."""
        return metrics.corrupt_objects.labels(self.tier.name)._value.get()

    def assert_usage_is_right(self) -> None:
        """What is charged is what the files take, and every row has its file."""
        files = list((self.tier.path / "objects").glob("*/*"))
        kept = list((self.tier.path / "quarantine").iterdir())
        usage = self.tier.usage()
        index = self.tier._live().bytes_on_disk()
        assert usage.bytes - index == sum(charge(path.lstat().st_size) for path in [*files, *kept])
        assert usage.objects == len(files)
        assert usage.bytes <= BUDGET
        assert {address_text(entry.address) for entry in self.tier.scan()} == {
            path.name.removesuffix(".safetensors") for path in files
        }


@pytest.fixture(scope="module")
def _shared() -> Iterator[Bench]:
    path = Path(tempfile.mkdtemp(prefix="kvass-test-", dir="/dev/shm"))
    tier = DirectoryTier(path, BUDGET, name="hostile", seed=1)
    with opened(tier) as cache:
        yield Bench(cache, tier)
    shutil.rmtree(path)


@pytest.fixture
def bench(_shared: Bench) -> Bench:
    """One tier for all tests: it has to go on working."""
    _shared.fill()
    return _shared


Hostile = Callable[[Path], None]
"""Puts something else in place of an object file."""


def assert_harmless(
    bench: Bench, hostile: Hostile, *, chunk: int = 1, group: int = 0, refused: str = "", kept: bool = True
) -> None:
    """The file of a chunk is replaced: the load ends where that chunk begins, is quick (best of three) and
    small, and everything is there again after a store. `refused`: the reason that is given."""
    for attempt in range(3):
        if _loses(bench, hostile, chunk, group, refused, kept) < SECONDS:
            break
        assert attempt < 2, "too slow"
    _loses(bench, hostile, chunk, group, refused, kept, traced=True)


def _loses(
    bench: Bench,
    hostile: Hostile,
    chunk: int,
    group: int,
    refused: str,
    kept: bool,
    *,
    traced: bool = False,
) -> float:
    file = bench.file(chunk, group)
    counted = bench.corrupt()
    known = set((bench.tier.path / "quarantine").iterdir())
    hostile(file)
    if refused:
        assert refused in reason(file)
    match = bench.cache.lookup(TEXT, SPACE)
    assert match.length == TEXT.size
    pool = Pool(SPACE.spec, match.length)
    pool.fill(0xA5)
    if traced:
        tracemalloc.start()
    began = time.perf_counter()
    loaded = bench.cache.load(match, pool).tokens
    seconds = time.perf_counter() - began
    if traced:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MEMORY
    assert loaded == chunk * CHUNK
    assert_right(pool, TEXT, loaded)
    bench.cache.flush()
    assert bench.corrupt() == counted + 1
    assert not os.path.lexists(file)
    fresh = set((bench.tier.path / "quarantine").iterdir()) - known
    assert len(fresh) == kept
    assert all(path.name.startswith(file.name) for path in fresh)
    bench.assert_usage_is_right()
    assert bench.cache.lookup(TEXT, SPACE).length <= chunk * CHUNK + 3  # the branch agrees so far
    assert load(bench.cache, OTHER, SPACE) == OTHER.size
    bench.refill()
    bench.assert_usage_is_right()
    return seconds


def assert_right(pool: Pool, tokens: Tokens, count: int) -> None:
    for number, group in enumerate(SPACE.spec.groups):
        first = group.first_needed(count)
        for name, array in pool.arrays(number, first, count).items():
            assert np.array_equal(
                np.ascontiguousarray(array).view(np.uint8),
                values(group, name, tokens, first, count).view(np.uint8),
            )


def reason(file: Path) -> str:
    """Why the container, or what it opens with, refuses a file; empty where neither does."""
    from kvass.container import empty_arrays, read_arrays
    from kvass.errors import KvassError

    try:
        with open_object(file) as reader:
            parsed = read_header(reader)
            read_arrays(reader, parsed, empty_arrays(parsed))
    except KvassError as error:
        return str(error)
    return ""


# -- forging ------------------------------------------------------------------------------------------


class Forged:
    """An object taken apart, to be put together again with other contents and a header digest that fits."""

    def __init__(self, file: Path):
        raw = file.read_bytes()
        length = 8 + struct.unpack_from("<Q", raw)[0]
        self.outer = json.loads(raw[8:length])
        self.inner = json.loads(self.outer.pop("__metadata__")["kvass"])
        self.data = raw[length:]

    def bytes(self) -> bytes:
        """The object as kvass itself would have written it."""
        self.inner["digest"] = "0" * 32
        inner = compact(self.inner)
        return sealed(compact({"__metadata__": {"kvass": inner}, **self.outer})) + self.data


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def sealed(body: str | bytes) -> bytes:
    """A header around its JSON: length, padding and digest fit."""
    raw = body.encode("utf-8", "surrogatepass") if isinstance(body, str) else body
    raw += b" " * (-(8 + len(raw)) % 4096)
    raw = struct.pack("<Q", len(raw)) + raw
    raw = raw[: DIGITS.start] + b"0" * 32 + raw[DIGITS.stop :]
    return raw[: DIGITS.start] + xxhash.xxh3_128_hexdigest(raw).encode() + raw[DIGITS.stop :]


def replaced(change: Callable[[bytes], bytes]) -> Hostile:
    """The bytes of the file are changed; it is another file, as damage on a disk is not."""

    def hostile(file: Path) -> None:
        raw = change(file.read_bytes())
        file.unlink()
        file.write_bytes(raw)

    return hostile


def forged(change: Callable[[Forged], None]) -> Hostile:
    """The object is taken apart, changed, and put together with digests that fit."""

    def hostile(file: Path) -> None:
        made = Forged(file)
        change(made)
        raw = made.bytes()
        file.unlink()
        file.write_bytes(raw)

    return hostile


def rewritten(old: str, new: str) -> Hostile:
    """A piece of the header's text (as it stands within the outer JSON) is replaced; digests fit."""

    def change(raw: bytes) -> bytes:
        length = 8 + struct.unpack_from("<Q", raw)[0]
        body = raw[8:length].rstrip(b" ")
        assert old.encode() in body, body
        body = body.replace(old.encode(), new.encode("utf-8", "surrogatepass"), 1)
        return sealed(body) + raw[length:]

    return replaced(change)


def inner(field: str, value: Any) -> Hostile:
    """A field of the header has another value."""

    def change(made: Forged) -> None:
        made.inner[field] = value

    return forged(change)


def tensor(field: str, change: Callable[[list[int]], Any], name: str = "v") -> Hostile:
    """A field of a safetensors entry has another value."""

    def harm(made: Forged) -> None:
        made.outer[name][field] = change(made.outer[name][field])

    return forged(harm)


def test_the_forgery_itself_is_accepted(bench: Bench) -> None:
    """Else the tests below would say nothing."""
    for group in (0, 1):
        file = bench.file(1, group)
        before = file.read_bytes()
        forged(lambda made: None)(file)
        assert file.read_bytes() == before
        assert reason(file) == ""
    assert load(bench.cache, TEXT, SPACE) == TEXT.size


# -- headers that lie about sizes and places ----------------------------------------------------------

GIGA = 4 << 30


def thousands(made: Forged) -> None:
    """As many arrays as a header has room for, each of a byte, all with their digests."""
    made.outer.clear()
    for number in range(2_500):
        made.outer[f"a{number:04}"] = {"dtype": "U8", "shape": [1], "data_offsets": [number, number + 1]}
    made.inner["digests"] = {name: [xxhash.xxh3_128_hexdigest(made.data[:1])] for name in made.outer}
    made.data = made.data[:1] * len(made.outer)


SIZES = {
    "gigabytes of data": tensor("data_offsets", lambda offsets: [offsets[0], GIGA]),
    "gigabytes in the shape": tensor("shape", lambda shape: [shape[0], GIGA, *shape[2:]]),
    "gigabytes in both": forged(
        lambda made: made.outer["v"].update(
            shape=[2, GIGA, 2, 8], data_offsets=[made.outer["v"]["data_offsets"][0],
                                                  made.outer["v"]["data_offsets"][0] + 2 * GIGA * 64]
        )
    ),
    "a shape whose product overflows": tensor("shape", lambda shape: [shape[0], 1 << 62, 1 << 62, 1 << 62]),
    "a product of 2**64": tensor("shape", lambda shape: [2, 1 << 31, 1 << 31, 1]),
    "a size over 64 bits": tensor("data_offsets", lambda offsets: [offsets[0], 1 << 80]),
    "a size of 4,000 digits": tensor("shape", lambda shape: [int("9" * 4000), *shape[1:]]),
    "overlapping": tensor("data_offsets", lambda offsets: [0, offsets[1] - offsets[0]]),
    "partly overlapping": tensor("data_offsets", lambda offsets: [offsets[0] - 1, offsets[1] - 1]),
    "a hole": tensor("data_offsets", lambda offsets: [offsets[0] + 8, offsets[1] + 8]),
    "negative offsets": tensor("data_offsets", lambda offsets: [-8, offsets[1] - offsets[0] - 8], "k"),
    "reversed offsets": tensor("data_offsets", lambda offsets: offsets[::-1]),
    "three offsets": tensor("data_offsets", lambda offsets: [*offsets, offsets[1]]),
    "one offset": tensor("data_offsets", lambda offsets: offsets[:1]),
    "float offsets": tensor("data_offsets", lambda offsets: [float(one) for one in offsets]),
    "float with a fraction": tensor("data_offsets", lambda offsets: [offsets[0], offsets[1] + 0.5]),
    "NaN": tensor("data_offsets", lambda offsets: [offsets[0], float("nan")]),
    "infinity": tensor("shape", lambda shape: [float("inf"), *shape[1:]]),
    "text for a number": tensor("shape", lambda shape: [str(one) for one in shape]),
    "no offsets": tensor("data_offsets", lambda offsets: []),
    "null": tensor("shape", lambda shape: None),
    "true for one": tensor("shape", lambda shape: [shape[0], shape[1], shape[2], True]),
    "a negative extent": tensor("shape", lambda shape: [shape[0], -shape[1], -shape[2], shape[3]]),
    "an extent of zero": tensor("shape", lambda shape: [shape[0], 0, *shape[2:]]),
    "no shape": tensor("shape", lambda shape: []),
    "ones without end": tensor("shape", lambda shape: [*shape, *[1] * 100_000]),
    "a layer more": tensor("shape", lambda shape: [shape[0] + 1, *shape[1:]]),
    "other tokens": tensor("shape", lambda shape: [shape[0], shape[1] * 2, shape[2] // 2, shape[3]]),
    "flat": tensor("shape", lambda shape: [shape[0], shape[1] * shape[2] * shape[3]]),
    "axes exchanged": tensor("shape", lambda shape: [shape[0], shape[2], shape[1], shape[3]]),
    "another dtype of that width": tensor("dtype", lambda dtype: "I32"),
    "a dtype that we know": forged(
        lambda made: made.outer["v"].update(dtype="F16", shape=[2, CHUNK * 2, HEADS, 8])
    ),
    "no dtype": tensor("dtype", lambda dtype: ""),
    "a field more": forged(lambda made: made.outer["v"].update(stride=1)),
    "a field less": forged(lambda made: made.outer["v"].pop("dtype") and None),
    "an empty array more": forged(
        lambda made: made.outer.update(
            w={"dtype": "F32", "shape": [0], "data_offsets": [len(made.data), len(made.data)]}
        )
    ),
    "an array that digests do not name": forged(lambda made: made.outer.update(w=made.outer.pop("v"))),
    "an array less": forged(lambda made: made.outer.pop("v") and None),
    "no arrays": forged(lambda made: (made.outer.clear(), made.inner.update(digests={}), None)[-1]),
    "arrays by the thousand": forged(thousands),
    "the order exchanged": forged(lambda made: made.outer.update(k=made.outer.pop("k"))),
    "names exchanged": forged(
        lambda made: (
            made.outer.update(k=made.outer["v"], v=made.outer["k"]),
            made.inner["digests"].update(k=made.inner["digests"]["v"], v=made.inner["digests"]["k"]),
            None,
        )[-1]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_sizes_and_places_that_lie(bench: Bench, name: str) -> None:
    assert_harmless(bench, SIZES[name])


# -- JSON that is meant to hurt -----------------------------------------------------------------------

DEEP = 100_000

JSON = {
    "deep lists": rewritten('"k":{', '"a":' + "[" * DEEP + "]" * DEEP + ',"k":{'),
    "deep objects": rewritten('"k":{', '"a":' + '{"a":' * DEEP + "1" + "}" * DEEP + ',"k":{'),
    "deep in the header": rewritten('\\"condensed\\":null', '\\"condensed\\":' + "[" * DEEP + "]" * DEEP),
    "deep in parameters": rewritten(
        '\\"parameters\\":{}', '\\"parameters\\":{\\"a\\":' + "[" * DEEP + "]" * DEEP + "}"
    ),
    "a duplicate key": rewritten('"k":{', '"k":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"k":{'),
    "the same key twice": rewritten('"dtype":"F32"', '"dtype":"F32","dtype":"F32"'),
    "a duplicate field": rewritten('\\"format\\":1', '\\"format\\":1,\\"format\\":1'),
    "a duplicate field that differs": rewritten('\\"format\\":1', '\\"format\\":2,\\"format\\":1'),
    "a duplicate metadata entry": rewritten('},"k":{', ',"kvass":"{}"},"k":{'),
    "another metadata entry": rewritten('},"k":{', ',"other":"text"},"k":{'),
    "metadata twice": rewritten('"k":{', '"__metadata__":{},"k":{'),
    "an unknown field": inner("more", 1),
    "an unknown field in the namespace": rewritten('\\"tenant\\":\\"\\"', '\\"tenant\\":\\"\\",\\"more\\":1'),
    "a field less": forged(lambda made: made.inner.pop("codec") and None),
    "white space": rewritten('\\"format\\":1', '\\"format\\": 1'),
    "an escape that stands for itself": rewritten('\\"attention\\"', '\\"\\\\u0061ttention\\"'),
    "a number written otherwise": rewritten('\\"format\\":1', '\\"format\\":1.0'),
    "a number with an exponent": rewritten('\\"position\\":16', '\\"position\\":16e0'),
    "minus zero": rewritten('\\"group\\":0', '\\"group\\":-0'),
    "NaN": rewritten('\\"position\\":16', '\\"position\\":NaN'),
    "theta is NaN": rewritten('\\"theta\\":10000.0', '\\"theta\\":NaN'),
    "theta is infinite": rewritten('\\"theta\\":10000.0', '\\"theta\\":1e999'),
    "invalid UTF-8": replaced(lambda raw: sealed(raw[8:4096].replace(b"tiny", b"ti\xff\xfe")) + raw[4096:]),
    "invalid UTF-8 in a key": replaced(
        lambda raw: sealed(raw[8:4096].replace(b'"k":{', b'"\xc3":{')) + raw[4096:]
    ),
    "an overlong NUL": replaced(lambda raw: sealed(raw[8:4096].replace(b"tiny", b"t\xc0\x80y")) + raw[4096:]),
    "half a surrogate": rewritten('\\"tiny\\"', '\\"\ud800\\"'),
    "half a surrogate, escaped": rewritten('\\"tiny\\"', '\\"\\\\ud800\\"'),
    "a NUL in the padding": replaced(lambda raw: sealed(raw[8:4095] + b"\0") + raw[4096:]),
    "a second document": replaced(lambda raw: sealed(raw[8:4090] + b"{}    ") + raw[4096:]),
    "a header that ends early": replaced(lambda raw: sealed(raw[8:1000]) + raw[4096:]),
    "a page more of padding": replaced(lambda raw: sealed(raw[8:4096] + b" " * 4096) + raw[4096:]),
    "another opening": replaced(lambda raw: sealed(raw[8:4096].replace(b'"digest', b'"tigest')) + raw[4096:]),
}


@pytest.mark.parametrize("name", JSON)
def test_json_that_is_meant_to_hurt(bench: Bench, name: str) -> None:
    assert_harmless(bench, JSON[name])


@pytest.mark.parametrize(
    "fill",
    [
        lambda room: compact({"tokens": [300] * (room // 4)})[1:-1],
        lambda room: compact({"digests": {f"{n:x}": [] for n in range(room // 12)}})[1:-1],
        lambda room: compact({"digests": {"k": [f"{n % 4096:03x}" for n in range(room // 10)]}})[1:-1],
        lambda room: compact({"codec": [{"name": f"{n % 10}"} for n in range(room // 22)]})[1:-1],
        lambda room: compact({"parent": "-" * room})[1:-1],
        lambda room: compact({"parent": '"' * (room // 4)})[1:-1],
    ],
    ids=["tokens", "arrays of digests", "digests", "codecs", "text", "escapes"],
)
def test_a_header_as_large_as_may_be(bench: Bench, fill: Callable[[int], str]) -> None:
    """Everything that is read may be full of anything; then it still takes a bounded multiple of that."""

    def change(raw: bytes) -> bytes:
        room = MAX_HEADER_BYTES - 16_384
        made = raw[8 : DIGITS.start].decode() + "0" * 32 + '\\",' + compact(fill(room))[1:-1] + '}"}}'
        return sealed(made) + raw[4096:]

    assert_harmless(bench, replaced(change))


# -- digests ------------------------------------------------------------------------------------------


def flipped(at: int) -> Hostile:
    return replaced(lambda raw: raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])


def exchanged_layers(raw: bytes) -> bytes:
    half = (len(raw) - 4096) // 4
    return raw[:4096] + raw[4096 + half : 4096 + 2 * half] + raw[4096 : 4096 + half] + raw[4096 + 2 * half :]


DIGESTS = {
    "of the header": (flipped(DIGITS.start), "header digest"),
    "of the header, in capitals": (
        replaced(lambda raw: raw[: DIGITS.start] + b"ABCDEF" + raw[DIGITS.start + 6 :]), "header digest",
    ),
    "of the header, all zeros": (
        replaced(lambda raw: raw[: DIGITS.start] + b"0" * 32 + raw[DIGITS.stop :]), "header digest",
    ),
    "a bit of the header": (flipped(600), "header digest"),
    "a bit of the padding": (flipped(4095), "header digest"),
    "of the first layer": (
        forged(lambda made: made.inner["digests"]["k"].__setitem__(0, "0" * 32)), "fails its digest",
    ),
    "of the last layer": (
        forged(lambda made: made.inner["digests"]["v"].__setitem__(-1, "f" * 32)), "fails its digest",
    ),
    "of a layer, in capitals": (
        forged(
            lambda made: made.inner["digests"].update(k=[one.upper() for one in made.inner["digests"]["k"]])
        ),
        "fails its digest",
    ),
    "of a layer, empty": (forged(lambda made: made.inner["digests"]["v"].__setitem__(0, "")), "fails"),
    "one too few": (forged(lambda made: made.inner["digests"]["v"].pop() and None), "does not fit"),
    "one too many": (forged(lambda made: made.inner["digests"]["v"].append("0" * 32)), "does not fit"),
    "exchanged": (forged(lambda made: made.inner["digests"]["k"].reverse()), "fails its digest"),
    "layers exchanged": (replaced(exchanged_layers), "fails its digest"),
    "the first bit of the data": (flipped(4096), "fails its digest"),
    "the last bit of the data": (flipped(-1 + 12_288), "fails its digest"),
}  # fmt: skip


@pytest.mark.parametrize("name", DIGESTS)
def test_digests_that_do_not_match(bench: Bench, name: str) -> None:
    hostile, refused = DIGESTS[name]
    assert_harmless(bench, hostile, refused=refused)


# -- objects that are sound, but others ---------------------------------------------------------------


def other_file(bench: Bench, tokens: Tokens, chunk: int, group: int = 0) -> Hostile:
    def hostile(file: Path) -> None:
        raw = bench.file(chunk, group, tokens).read_bytes()
        file.unlink()
        file.write_bytes(raw)

    return hostile


def test_the_object_of_another_key(bench: Bench) -> None:
    assert_harmless(bench, other_file(bench, OTHER, 1))


def test_the_object_of_another_place_in_the_same_text(bench: Bench) -> None:
    assert_harmless(bench, other_file(bench, TEXT, 0))


def test_the_object_of_another_group(bench: Bench) -> None:
    assert_harmless(bench, other_file(bench, TEXT, 2, 0), chunk=2, group=1)


def test_the_object_of_a_branch(bench: Bench) -> None:
    assert_harmless(bench, other_file(bench, BRANCH, 1))


def test_the_object_of_another_tenant(bench: Bench) -> None:
    def hostile(file: Path) -> None:
        theirs = bench.cache.lookup(TEXT, OTHER_TENANT).pieces(unseen=True)
        raw = next(bench.tier._path(p.address) for p in theirs if (p.chunk, p.group) == (1, 0)).read_bytes()
        file.unlink()
        file.write_bytes(raw)

    assert_harmless(bench, hostile)


def renamed_tokens(made: Forged) -> None:
    tokens = text(2, 0, 2 * CHUNK)[CHUNK:]
    made.inner["tokens"] = tokens.tolist()
    made.inner["content_key"] = content_key(SPACE.root(), tokens.tobytes()).hex()


SAYS = {
    "another chunk's tokens": forged(renamed_tokens),
    "tokens in another order": forged(lambda made: made.inner["tokens"].reverse()),
    "a token fewer": forged(lambda made: made.inner["tokens"].pop() and None),
    "a token more": forged(lambda made: made.inner["tokens"].append(1)),
    "a token that is none": forged(lambda made: made.inner["tokens"].__setitem__(0, MAX_TOKEN_ID + 1)),
    "a negative token": forged(lambda made: made.inner["tokens"].__setitem__(0, -1)),
    "a token of 64 bits": forged(lambda made: made.inner["tokens"].__setitem__(0, 1 << 63)),
    "a token that wraps round": forged(
        lambda made: made.inner["tokens"].__setitem__(0, made.inner["tokens"][0] + (1 << 32))
    ),
    "a float token": forged(lambda made: made.inner["tokens"].__setitem__(0, float(made.inner["tokens"][0]))),
    "no tokens": inner("tokens", []),
    "another key": inner("key", "0" * 64),
    "a key in capitals": forged(lambda made: made.inner.update(key=made.inner["key"].upper())),
    "a key that is short": forged(lambda made: made.inner.update(key=made.inner["key"][:-2])),
    "a key with a line's end": forged(lambda made: made.inner.update(key=made.inner["key"] + "\n")),
    "another group": inner("group", 1),
    "a group that there is not": inner("group", 2),
    "a group out of range": inner("group", 256),
    "another shard": inner("shard", 1),
    "another parent": inner("parent", address_text(address(bytes(32), 0))),
    "no parent": inner("parent", ""),
    "a parent that is no address": inner("parent", "../../etc/passwd"),
    "another position": inner("position", 0),
    "a negative position": inner("position", -16),
    "a huge position": inner("position", 1 << 70),
    "another format": inner("format", 2),
    "format true": inner("format", True),
    "another codec": inner("codec", [{"name": "none", "parameters": {}}]),
    "a codec with parameters": inner("codec", [{"name": "raw", "parameters": {"bits": 4}}]),
    "a chain of codecs": inner("codec", [{"name": "raw", "parameters": {}}] * 2),
    "no codec": inner("codec", []),
    "another provenance": inner("provenance", {"kind": "approximate"}),
    "provenance with more": inner("provenance", {"kind": "exact", "by": "x"}),
    "lossy provenance": inner("provenance", {"kind": "lossy", "codec": "x", "tables": "0" * 64}),
    **{
        f"lossy provenance with {behind} behind": inner(
            "provenance", {"kind": "lossy", "codec": "x", "tables": "0" * 64, "behind": behind}
        )
        for behind in (0, -1, 1 << 31, 1.5)
    },
    "condensed": inner("condensed", {}),
    "another tenant": forged(lambda made: made.inner["namespace"].update(tenant="t" * 64)),
    "other weights": forged(lambda made: made.inner["namespace"].update(weights="v" * 64)),
    "an adapter": forged(lambda made: made.inner["namespace"].update(adapter="a")),
    "other numerics": forged(lambda made: made.inner["namespace"].update(numerics="x")),
    "another namespace format": forged(lambda made: made.inner["namespace"].update(format=2)),
    "a dtype of the spec that there is not": forged(
        lambda made: made.inner["namespace"]["spec"]["groups"][0].update(dtype="int3")
    ),
    "a spec without groups": forged(lambda made: made.inner["namespace"]["spec"].update(groups=[])),
    "a spec with fewer groups": forged(lambda made: made.inner["namespace"]["spec"]["groups"].pop() and None),
    "a RoPE of another kind": forged(
        lambda made: made.inner["namespace"]["spec"]["groups"][0]["rope"].update(theta=1e6)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAYS)
def test_a_header_that_says_something_else(bench: Bench, name: str) -> None:
    assert_harmless(bench, SAYS[name])


def test_the_text_behind_what_is_used_counts_too(bench: Bench) -> None:
    """Only the beginning of a stored chunk is used; it still must be the one that its key says."""
    asked = TEXT[: CHUNK + 7]
    assert load(bench.cache, asked, SPACE) == asked.size
    file = bench.tier._path(bench.cache.lookup(asked, SPACE).pieces()[-2].address)
    inner("tokens", [*TEXT[CHUNK : 2 * CHUNK - 1].tolist(), 1])(file)
    assert reason(file) == ""
    counted = bench.corrupt()
    assert load(bench.cache, asked, SPACE) == CHUNK
    bench.cache.flush()
    assert bench.corrupt() == counted + 1
    bench.assert_usage_is_right()


def test_the_name_of_the_model_is_for_people(bench: Bench) -> None:
    """It is the one thing of the header that may differ: it is no part of the root."""
    forged(lambda made: made.inner["namespace"].update(model="renamed"))(bench.file(1))
    assert load(bench.cache, TEXT, SPACE) == TEXT.size


# -- files that are cut, grown or no files ------------------------------------------------------------


def test_truncated_anywhere(bench: Bench) -> None:
    size = bench.file(1).stat().st_size
    assert size > 2 * 4096
    for end in [*range(0, size, 4096), 1, 7, 8, 9, 4095, 4097, size - 1]:
        bench.refill()
        file = bench.file(1)
        os.truncate(file, end)
        counted = bench.corrupt()
        assert load(bench.cache, TEXT, SPACE) == CHUNK
        bench.cache.flush()
        assert bench.corrupt() == counted + 1
        assert not file.exists()
        bench.assert_usage_is_right()


def grown(by: int) -> Hostile:
    return lambda file: os.truncate(file, file.stat().st_size + by)


def linked(target: Callable[[Path], Path]) -> Hostile:
    def hostile(file: Path) -> None:
        where = target(file)
        file.unlink(missing_ok=True)
        file.symlink_to(where)

    return hostile


def aside(file: Path) -> Path:
    """A sound copy of an object, elsewhere."""
    there = file.parents[2] / "aside"
    shutil.copy(file, there)
    return there


def special(make: Callable[[Path], Any]) -> Hostile:
    def hostile(file: Path) -> None:
        file.unlink()
        make(file)

    return hostile


def folder_with_things(file: Path) -> None:
    (file / "deeper").mkdir(parents=True)
    (file / "deeper" / "file").write_bytes(b"x" * 5000)


def listening(file: Path) -> None:
    """A socket; its own name would be too long for one."""
    name = Path(f"/dev/shm/.kvass-test-{os.getpid()}")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(name))
    name.rename(file)


def gigantic(file: Path) -> None:
    """Every size agrees, the file is all holes."""
    forged(
        lambda made: made.outer["v"].update(
            shape=[2, GIGA, HEADS, 8],
            data_offsets=[len(made.data) // 2, len(made.data) // 2 + 2 * GIGA * HEADS * 8 * 4],
        )
    )(file)
    os.truncate(file, 4096 + (file.stat().st_size - 4096) // 2 + 2 * GIGA * HEADS * 8 * 4)


FILES: dict[str, tuple[Hostile, bool]] = {
    "a byte more": (grown(1), True),
    "a page more": (grown(4096), True),
    "a megabyte more": (grown(1 << 20), True),
    "more than the budget": (grown(BUDGET), False),
    "as large as its header says": (gigantic, False),
    "a terabyte of nothing": (grown(1 << 40), False),
    "empty": (replaced(lambda raw: b""), True),
    "zeros": (replaced(lambda raw: bytes(len(raw))), True),
    "ones": (replaced(lambda raw: b"\xff" * len(raw)), True),
    "text": (replaced(lambda raw: b"The quick brown fox. " * 1000), True),
    "a header of 2**64 - 1 bytes": (replaced(lambda raw: b"\xff" * 8 + raw[8:]), True),
    "a header of 2**63 bytes": (replaced(lambda raw: struct.pack("<Q", 1 << 63) + raw[8:]), True),
    "a header of gigabytes": (replaced(lambda raw: struct.pack("<Q", GIGA - 8) + raw[8:]), True),
    "a header as large as the file": (
        replaced(lambda raw: struct.pack("<Q", len(raw) // 4096 * 4096 - 8) + raw[8:]), True,
    ),
    "a header without length": (replaced(lambda raw: struct.pack("<Q", 0) + raw[8:]), True),
    "a header that is not aligned": (replaced(lambda raw: struct.pack("<Q", 4087) + raw[8:]), True),
    "a link to a sound copy": (linked(aside), False),
    "a link to nothing": (linked(lambda file: Path("/nonexistent")), False),
    "a link to itself": (linked(lambda file: file), False),
    "a link to a device": (linked(lambda file: Path("/dev/zero")), False),
    "a link to a folder": (linked(lambda file: file.parent), False),
    "a fifo": (special(os.mkfifo), False),
    "a socket": (special(listening), False),
    "a folder": (special(Path.mkdir), False),
    "a folder with things in it": (special(folder_with_things), False),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_cut_grown_or_none(bench: Bench, name: str) -> None:
    hostile, kept = FILES[name]
    assert_harmless(bench, hostile, kept=kept)


def test_a_device(bench: Bench) -> None:
    def hostile(file: Path) -> None:
        file.unlink()
        os.mknod(file, 0o600 | 0o020000, os.makedev(1, 5))

    assert_harmless(bench, hostile, kept=False)


class _Capabilities(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


def without_privileges(function: Callable[[], None]) -> None:
    """Run it on a thread that may read no more than its modes allow, root or not; its threads neither."""
    failed: list[BaseException] = []

    def run() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)
        held = (_Capabilities * 2)()
        try:
            assert libc.capget(header, held) == 0
            for part in held:
                part.effective &= ~0b110  # DAC_OVERRIDE, DAC_READ_SEARCH
            held[1].effective = held[1].permitted
            assert libc.capset(header, held) == 0
            function()
        except BaseException as error:  # noqa: BLE001 - raised again below
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def test_no_permission(bench: Bench) -> None:
    def check() -> None:
        with opened(DirectoryTier(bench.tier.path, BUDGET, name="unprivileged")) as cache:
            mine = Bench(cache, cache.tiers[0])  # type: ignore[arg-type]
            with pytest.raises(PermissionError):
                file = bench.file(1)
                file.chmod(0)
                file.read_bytes()
            assert_harmless(mine, lambda file: file.chmod(0))

    without_privileges(check)
    bench.refill()
    bench.assert_usage_is_right()


def test_a_file_in_place_of_the_folder_of_objects(bench: Bench) -> None:
    """The objects in it are lost; nothing raises, and once it is gone everything can be stored again."""
    folder = bench.file(1).parent
    shutil.rmtree(folder)
    folder.write_bytes(b"")
    errors = metrics.errors.labels(bench.tier.name, "maintain")._value.get()
    assert load(bench.cache, TEXT, SPACE) <= CHUNK
    bench.cache._keep_house()
    store(bench.cache, TEXT, SPACE)
    assert load(bench.cache, TEXT, SPACE) <= CHUNK + 3
    assert load(bench.cache, OTHER, SPACE) in range(OTHER.size + 1)
    folder.unlink()
    for tokens in (TEXT, OTHER, BRANCH):
        load(bench.cache, tokens, SPACE)
        bench.cache._keep_house()
    assert metrics.errors.labels(bench.tier.name, "maintain")._value.get() == errors
    bench.refill()


# -- several at once, and an index made anew ----------------------------------------------------------


def test_every_object_hostile_at_once(bench: Bench) -> None:
    counted = bench.corrupt()
    files = sorted((bench.tier.path / "objects").glob("*/*"))
    for number, file in enumerate(files):
        (flipped(4096), grown(1), replaced(lambda raw: b""))[number % 3](file)
    for tokens in (TEXT, OTHER, BRANCH):
        assert load(bench.cache, tokens, SPACE) == 0
    bench.cache.flush()
    assert bench.corrupt() > counted
    bad = bench.cache.verify()[1]
    assert len(bad) + bench.corrupt() - counted >= 2
    assert not list((bench.tier.path / "objects").glob("*/*"))
    bench.assert_usage_is_right()
    bench.refill()


@pytest.mark.parametrize("hostile", [flipped(4096), SAYS["a codec with parameters"], gigantic, grown(1)])
def test_verify_finds_what_loads_would(bench: Bench, hostile: Hostile) -> None:
    file = bench.file(1)
    hostile(file)
    assert bench.cache.verify()[1] == [file.name.removesuffix(".safetensors")]
    assert not file.exists()
    bench.assert_usage_is_right()
    bench.refill()


EVERYTHING: dict[str, Hostile] = {
    **{f"sizes: {name}": hostile for name, hostile in SIZES.items()},
    **{f"json: {name}": hostile for name, hostile in JSON.items()},
    **{f"header: {name}": hostile for name, hostile in SAYS.items()},
    **{f"file: {name}": hostile for name, (hostile, _) in FILES.items() if hostile is not gigantic},
}


def test_an_index_is_made_anew_over_hostile_files() -> None:
    """Whatever lies there: the tier opens, serves nothing of it, and is filled again."""
    path = Path(tempfile.mkdtemp(prefix="kvass-test-", dir="/dev/shm"))
    try:
        _make_anew(path)
    finally:
        shutil.rmtree(path)


def _make_anew(path: Path) -> None:
    tier = DirectoryTier(path, BUDGET, name="hostile", seed=1)
    bench = Bench(opened(tier), tier)
    bench.refill()
    texts = [text(100 + number, 0, 2 * CHUNK) for number in range(len(EVERYTHING))]
    files = []
    for tokens in texts:
        store(bench.cache, tokens, SPACE)
        files.append(bench.file(1, 0, tokens))
    bench.cache.close()
    shutil.rmtree(path / "index")
    for hostile, file in zip(EVERYTHING.values(), files, strict=True):
        hostile(file)
    (files[0].parent / "nonsense.safetensors").write_bytes(b"nonsense")
    (files[0].parent / ("x" * 240 + ".safetensors")).write_bytes(b"nonsense")
    (files[0].parent / os.fsdecode(b"\xff\xfe.safetensors")).write_bytes(b"nonsense")
    tier = DirectoryTier(path, BUDGET, name="hostile", seed=1)
    with opened(tier) as cache:
        again = Bench(cache, tier)
        cache._keep_house()
        for name, tokens in zip(EVERYTHING, texts, strict=True):
            assert load(cache, tokens, SPACE) == CHUNK, name
        cache.flush()
        cache._keep_house()
        again.assert_usage_is_right()
        for tokens in texts:
            store(cache, tokens, SPACE)
            assert load(cache, tokens, SPACE) == tokens.size
        for tokens in (TEXT, OTHER, BRANCH):
            assert load(cache, tokens, SPACE) == tokens.size
        again.assert_usage_is_right()


@pytest.mark.parametrize("value", [0, -1, 1 << 24, 1 << 70, 1.5, True])
@pytest.mark.parametrize("field", ["kv_heads", "head_dim", "v_head_dim", "window"])
def test_a_spec_of_nonsense_is_no_spec(field: str, value: object) -> None:
    """Shapes are made of it, by whoever looks at the object."""
    group = msgspec.to_builtins(SPACE.spec.groups[0]) | {field: value}
    for groups in ([group], [group | {field: 1, "layers": []}]):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(msgspec.json.encode({"groups": groups}), type=KVSpec)
