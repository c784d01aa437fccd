"""The lossless codec's inner loops: sign and exponent by rANS, mantissas as they are, eight tokens at a time.

All floats come as 16 bits: sign, 8 bits of exponent, 7 of mantissa, which is bfloat16 itself. Of narrower
mantissas the upper `width` bits are kept. A symbol is sign and level: how far the exponent lies below its
channel's top one. Eight rows of 7-bit mantissas are packed into seven rows of bytes.
"""

import numpy as np
import numpy.typing as npt

from kvass.codecs import rans
from kvass.codecs.kernel import kernel
from kvass.codecs.rans import UInt8, UInt16, UInt32

ROWS = 8
"""Tokens that are coded together."""
FULL_WIDTH = 7
FLIP = 128
"""Set in a channel's table number where its signs are turned round."""

Int32 = npt.NDArray[np.int32]

_LEVEL = 15
_USUAL = 4
"""How far the top exponent mostly lies above the mean one."""
_SIGN = 16


@kernel
def choose(rows: UInt16, costs: Int32, chosen: UInt8, tops: UInt8) -> None:
    """For each channel of `rows` `[tokens, channels]`, a cheap table (with FLIP) and top exponent.

    `costs` `[symbols, tables]`. Signs are turned round where most are negative; the top exponent is looked
    for upwards and downwards from where it mostly lies, as long as it gets cheaper.
    """
    tokens, channels = rows.shape
    even, odd = np.zeros(512, np.int32), np.zeros(512, np.int32)
    counts = np.empty((2, 256), np.int32)
    totals = np.empty(costs.shape[1], np.int32)
    for c in range(channels):
        for t in range(0, tokens - 1, 2):  # in turn: what was just written is slow to read
            even[rows[t, c] >> np.uint16(7)] += 1
            odd[rows[t + 1, c] >> np.uint16(7)] += 1
        if tokens % 2:
            even[rows[tokens - 1, c] >> np.uint16(7)] += 1
        low, high, mass, negative = 255, 0, 0, 0
        for exponent in range(256):
            counts[0, exponent] = even[exponent] + odd[exponent]
            counts[1, exponent] = even[256 + exponent] + odd[256 + exponent]
            both = counts[0, exponent] + counts[1, exponent]
            if both > 0:
                low, high = min(low, exponent), exponent
                mass += exponent * both
                negative += counts[1, exponent]
        even[:] = 0
        odd[:] = 0
        flip = int(2 * negative > tokens)
        start = min(mass // tokens + _USUAL, 255)
        price(counts, costs, low, high, start, flip, totals)
        best, table, top = totals.min(), np.argmin(totals), start
        for step in (-1, 1):
            near = start + step
            while 0 <= near <= 255:
                price(counts, costs, low, high, near, flip, totals)
                if totals.min() >= best:
                    break
                best, table, top = totals.min(), np.argmin(totals), near
                near += step
        chosen[c] = table + flip * FLIP
        tops[c] = top


@kernel
def price(counts: Int32, costs: Int32, low: int, high: int, top: int, flip: int, totals: Int32) -> None:
    """What a channel with `counts` `[sign, exponent]`, none outside `low` .. `high`, costs by table."""
    tables = np.uint64(costs.shape[1])
    totals[:] = 0
    for exponent in range(low, high + 1):
        level = top - exponent
        if level < 0 or level > _LEVEL:
            level = _LEVEL
        for sign in range(2):
            count = counts[sign, exponent]
            if count > 0:
                symbol = np.uint64((sign ^ flip) * _SIGN + level)
                for k in range(tables):
                    totals[k] = np.int32(totals[k] + np.int32(count * costs[symbol, k]))


@kernel
def fold(rows: UInt16, chosen: UInt8, tops: UInt8, symbols: UInt8, escapes: UInt8) -> int:
    """Symbols of `rows` `[tokens, channels]`, token by token; returns how many exponents were escaped."""
    tokens, channels = rows.shape
    escaped = 0
    for t in range(tokens):
        for c in range(channels):
            value = rows[t, c]
            exponent = (value >> 7) & 255
            sign = (value >> 15) ^ (chosen[c] >> 7)
            level = int(tops[c]) - int(exponent)
            if level < 0 or level >= _LEVEL:
                level = _LEVEL
                escapes[escaped] = exponent
                escaped += 1
            symbols[t * channels + c] = sign * _SIGN + level
    return escaped


@kernel
def packed_size(tokens: int, channels: int, width: int) -> int:
    """Bytes that mantissas of `width` bits take up."""
    return (tokens // ROWS * width + min(tokens % ROWS, width)) * channels


@kernel
def pack(rows: UInt16, width: int, packed: UInt8) -> None:
    """Write the upper `width` bits of each mantissa into `packed` `[packed_size]`."""
    tokens, channels = rows.shape
    at, spare = 0, 7 - width
    for first in range(0, tokens, ROWS):
        count = min(ROWS, tokens - first)
        if count <= width:
            for t in range(first, first + count):
                for c in range(channels):
                    packed[at + c] = (rows[t, c] & 127) >> spare
                at += channels
        elif width == FULL_WIDTH:
            for k in range(FULL_WIDTH):
                for c in range(channels):
                    last = (rows[first + FULL_WIDTH, c] >> k) & 1
                    packed[at + c] = (rows[first + k, c] & 127) | (last << 7)
                at += channels
        else:
            for k in range(width):
                for c in range(channels):
                    packed[at + c] = 0
                for t in range(count):
                    for c in range(channels):
                        packed[at + c] |= ((rows[first + t, c] >> (spare + k)) & 1) << t
                at += channels


@kernel
def unpack(packed: UInt8, at: int, count: int, width: int, channels: int, mantissas: UInt8) -> int:
    """Mantissas of the next `count` tokens (8 at most) from `packed[at:]`; returns where it goes on."""
    spare = np.uint8(7 - width)
    size = count * channels
    if count <= width:
        for i in range(size):
            mantissas[i] = (packed[at + i] << spare) & np.uint8(127)
        return at + size
    if width == FULL_WIDTH:
        bytes_ = packed[at : at + FULL_WIDTH * channels]
        first, last = mantissas[: len(bytes_)], mantissas[len(bytes_) : size]
        for i in range(len(bytes_)):
            first[i] = bytes_[i] & np.uint8(127)
        for c in range(channels):
            last[c] = (
                bytes_[c] >> 7
                | (bytes_[channels + c] & 128) >> 6
                | (bytes_[2 * channels + c] & 128) >> 5
                | (bytes_[3 * channels + c] & 128) >> 4
                | (bytes_[4 * channels + c] & 128) >> 3
                | (bytes_[5 * channels + c] & 128) >> 2
                | (bytes_[6 * channels + c] & 128) >> 1
            )
        return at + len(bytes_)
    for i in range(size):
        mantissas[i] = 0
    for k in range(width):
        for t in range(count):
            for c in range(channels):
                bit = (packed[at + k * channels + c] >> np.uint8(t)) & np.uint8(1)
                mantissas[t * channels + c] |= bit << np.uint8(spare + k)
    return at + width * channels


@kernel
def unfold(
    tables: UInt32,
    chosen: UInt8,
    tops: UInt8,
    words: UInt16,
    escapes: UInt8,
    packed: UInt8,
    width: int,
    rows: UInt16,
) -> bool:
    """Fill `rows` `[layers, tokens, channels]`; false where streams do not end as they should.

    `chosen` and `tops` `[layers, channels]`; every number in `chosen` must be one of a table. `words`: the
    stream, of `STATE_WORDS` at least, and `PADDING`. `packed` has `packed_size` bytes a layer.
    """
    layers, tokens, channels = rows.shape
    together = ROWS
    while together * channels % rans.LANES:
        together *= 2
    contexts = np.empty(together * channels, np.uint8)
    symbols = np.empty(together * channels, np.uint8)
    mantissas = np.empty(ROWS * channels, np.uint8)
    signs = np.empty(channels, np.uint16)
    exponents = np.empty(channels, np.uint16)
    states = np.empty(rans.LANES, np.uint32)
    at = rans.begin(words, 0, states)
    place, taken = 0, 0
    for layer in range(layers):
        for c in range(channels):
            signs[c] = np.uint16(chosen[layer, c] >> np.uint8(7)) << np.uint16(15)
            exponents[c] = np.uint16(tops[layer, c]) << np.uint16(7)
        for t in range(together):
            for c in range(channels):
                contexts[t * channels + c] = chosen[layer, c] & np.uint8(FLIP - 1)
        for first in range(0, tokens, together):
            count = min(together, tokens - first)
            size = (count * channels + rans.LANES - 1) // rans.LANES * rans.LANES
            at = rans.decode(tables, contexts, words, at, states, symbols, size)
            for t in range(0, count, ROWS):
                some = min(ROWS, count - t)
                place = unpack(packed, place, some, width, channels, mantissas)
                block = rows[layer, first + t : first + t + some]
                part = symbols[t * channels : (t + some) * channels]
                escaped = merge(part, signs, exponents, mantissas, block)
                if escaped > 0:
                    if taken + escaped > len(escapes):
                        return False
                    taken = restore(block, part, escapes, taken)
    return bool(at == len(words) - rans.PADDING and taken == len(escapes) and rans.ended(states))


@kernel
def merge(symbols: UInt8, signs: UInt16, exponents: UInt16, mantissas: UInt8, rows: UInt16) -> int:
    """Put `rows` `[tokens, channels]` together; returns how many of the exponents were escaped."""
    tokens, channels = rows.shape
    escaped = 0
    for t in range(tokens):
        row = rows[t]
        some = symbols[t * channels : (t + 1) * channels]
        rest = mantissas[t * channels : (t + 1) * channels]
        for c in range(channels):
            symbol = np.uint16(some[c])
            level = np.uint16((symbol & np.uint16(_LEVEL)) << np.uint16(7))
            exponent = np.uint16(exponents[c] - level) & np.uint16(0x7F80)
            sign = np.uint16((symbol & np.uint16(_SIGN)) << np.uint16(11)) ^ signs[c]
            row[c] = sign | exponent | np.uint16(rest[c])
    for symbol in symbols:
        escaped += (symbol & np.uint8(_LEVEL)) == np.uint8(_LEVEL)
    return escaped


@kernel
def restore(rows: UInt16, symbols: UInt8, escapes: UInt8, taken: int) -> int:
    """Put escaped exponents into `rows` `[tokens, channels]`; returns how many were taken in all."""
    tokens, channels = rows.shape
    for t in range(tokens):
        for c in range(channels):
            if symbols[t * channels + c] & _LEVEL == _LEVEL:
                rows[t, c] = (rows[t, c] & 0x807F) | (np.uint16(escapes[taken]) << 7)
                taken += 1
    return taken
