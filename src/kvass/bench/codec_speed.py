"""Encode and decode speed of codecs, on one thread, beside zstd, lz4 and a kernel that only moves bytes."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvass.bench.report import interleaved, ratio_interval, ratios
from kvass.codecs.base import Chunk, Codec
from kvass.codecs.tables import Tables
from kvass.container import Array
from kvass.errors import ModelFilesError
from kvass.runner import KV
from kvass.spec import KVSpec

CHUNK_TOKENS = 256
ENTROPY = "entropy"
FLOOR = "floor"
INTO = "int8-into"

_Arrays = Mapping[str, Array]
_Pass = Callable[[], float]


class Piece(NamedTuple):
    """One chunk of one layer group, its canonical arrays contiguous."""

    chunk: Chunk
    arrays: _Arrays

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


def pieces(kv: KV, spec: KVSpec) -> list[Piece]:
    """A sequence's KV as the store cuts it, whole chunks only."""
    made = []
    tokens = kv[0]["k"].shape[1]
    for start in range(0, tokens - CHUNK_TOKENS + 1, CHUNK_TOKENS):
        for number, group in enumerate(spec.groups):
            cut = {
                name: np.ascontiguousarray(array[:, start : start + CHUNK_TOKENS])
                for name, array in kv[number].items()
            }
            made.append(Piece(Chunk(group, number, start, CHUNK_TOKENS), cut))
    return made


def last_level_cache() -> int:
    """Bytes of this processor's largest cache; 0 where the kernel does not say."""
    found = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
        found.append(int(text.rstrip("KM")) * unit)
    return max(found)


def speeds(
    codecs: Mapping[str, Codec], tables: Tables, held: Sequence[Piece], rounds: int,
    progress: Callable[[int, int], None],
) -> dict[str, Any]:  # fmt: skip
    """Passes over all pieces, interleaved; ratios are the other side's seconds over the codec's.

    `decode_vs_zstd1`, `entropy_vs_zstd1`, `encode_vs_zstd1` of q2 and `int8_decode_vs_floor`, None where
    there is no such codec; `<codec>_decode_vs_zstd1` of each; MB of raw KV a second. Raises ModelFilesError
    where zstandard or lz4 are not installed.
    """
    size = sum(piece.nbytes for piece in held)
    sides = _general(held)
    for name, one in codecs.items():
        sides |= _of_codec(name, one, tables, held)
    for side in sides.values():  # compiles, and gives every side memory
        side()
    done, total = 0, rounds * len(sides)

    def step() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    seconds = interleaved(sides, rounds, step)
    pairs = {
        "decode_vs_zstd1": ("zstd1 decode", "q2 decode"),
        "entropy_vs_zstd1": ("zstd1 decode", f"q2 {ENTROPY}"),
        "int8_decode_vs_floor": (FLOOR, INTO),
        "encode_vs_zstd1": ("zstd1 encode", "q2 encode"),
    }
    report: dict[str, Any] = {key: _ratio(seconds, *pair) for key, pair in pairs.items()}
    report["intervals95"] = {
        key: [round(end, 3) for end in ratio_interval(seconds[one], seconds[other])]
        for key, (one, other) in pairs.items()
        if other in seconds
    }
    for name in codecs:
        report[f"{name}_decode_vs_zstd1"] = _ratio(seconds, "zstd1 decode", f"{name} decode")
        report[f"{name}_encode_vs_zstd1"] = _ratio(seconds, "zstd1 encode", f"{name} encode")
    report["megabytes_per_second"] = {
        name: round(size / statistics.median(took) / 1e6, 1) for name, took in seconds.items()
    }
    report["speed_setting"] = {
        "threads": 1, "rounds": rounds, "raw_bytes": size, "last_level_cache_bytes": last_level_cache(),
        "note": "every pass goes over all chunks, raw KV of raw_bytes; floor reads int8's stored bytes and "
        "writes bf16, and int8-into decodes, both into arrays that were allocated and touched beforehand; "
        "all others hand out new arrays, on both sides",
    }  # fmt: skip
    return report


def _ratio(seconds: Mapping[str, list[float]], one: str, other: str) -> float | None:
    if one not in seconds or other not in seconds:
        return None
    return round(statistics.median(ratios(seconds[one], seconds[other])), 3)


def _timed(action: Callable[[Any], object], items: Sequence[Any]) -> _Pass:
    def one_pass() -> float:
        began = time.perf_counter()
        for item in items:
            action(item)
        return time.perf_counter() - began

    return one_pass


def _general(held: Sequence[Piece]) -> dict[str, _Pass]:
    try:
        import zstandard
        from lz4 import frame as lz4  # type: ignore[import-untyped]
    except ImportError as error:
        raise ModelFilesError(
            f"the codec benchmark compares with {error.name}: pip install zstandard lz4"
        ) from error
    raw = [b"".join(piece.arrays[name].tobytes() for name in ("k", "v")) for piece in held]
    compressor, decompressor = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
    zstd = [compressor.compress(one) for one in raw]
    fast = [lz4.compress(one) for one in raw]
    return {
        "zstd1 encode": _timed(compressor.compress, raw),
        "zstd1 decode": _timed(decompressor.decompress, zstd),
        "lz4 encode": _timed(lz4.compress, raw),
        "lz4 decode": _timed(lz4.decompress, fast),
    }


def _of_codec(name: str, codec: Codec, tables: Tables, held: Sequence[Piece]) -> dict[str, _Pass]:
    stored = [(codec.encode(piece.arrays, piece.chunk), piece.chunk) for piece in held]
    sides = {
        f"{name} encode": _timed(lambda piece: codec.encode(piece.arrays, piece.chunk), held),
        f"{name} decode": _timed(lambda one: codec.decode(*one), stored),
    }
    if name == "q2":
        sides[f"{name} {ENTROPY}"] = _entropy(codec, stored)
    if name == "int8" and all(piece.chunk.group.dtype == "bfloat16" for piece in held):
        sides |= _int8_and_floor(tables, stored)
    return sides


def _entropy(codec: Codec, stored: Sequence[tuple[_Arrays, Chunk]]) -> _Pass:
    """Entropy decoding fused with dequantising: all of decoding but the inverse transform and RoPE."""
    from kvass.codecs.transform import Transform

    assert isinstance(codec, Transform)

    def one_stream(one: tuple[_Arrays, Chunk]) -> None:
        for _ in codec.projections(*one):
            pass

    return _timed(one_stream, stored)


def _int8_and_floor(tables: Tables, stored: Sequence[tuple[_Arrays, Chunk]]) -> dict[str, _Pass]:
    from kvass.codecs import fixed, fixed_kernels
    from kvass.codecs.kernel import kernel

    @kernel
    def moved(source: Any, target: Any) -> None:
        for i in range(len(source)):
            target[i] = source[i]

    places = []
    for arrays, chunk in stored:
        out = {name: np.empty(chunk.group.shape(name, chunk.tokens), np.uint16) for name in ("k", "v")}
        for array in out.values():
            array.fill(1)  # or the first pass would wait for the kernel's pages
        places.append((arrays, chunk, out))

    def decoded(place: tuple[_Arrays, Chunk, dict[str, Any]]) -> None:
        arrays, chunk, out = place
        grids = {name: fixed.widened_grid(arrays[f"{name}_grid"]) for name in ("k", "v")}
        rope = tables.rope(chunk.number)
        rows = (
            np.concatenate(rope.rows(chunk.start, chunk.tokens), axis=1)
            if rope
            else np.empty((chunk.tokens, 0), np.float32)
        )
        fixed_kernels.keys(np.asarray(arrays["k"], np.uint8), grids["k"], 8, chunk.tokens, rows, out["k"])
        fixed_kernels.values(
            np.asarray(arrays["v"], np.uint8), grids["v"], 8, chunk.group.v_head_dim, out["v"]
        )

    def floor(place: tuple[_Arrays, Chunk, dict[str, Any]]) -> None:
        for name in ("k", "v"):
            moved(place[0][name].reshape(-1), place[2][name].reshape(-1))

    return {INTO: _timed(decoded, places), FLOOR: _timed(floor, places)}
