"""One turn of all rANS lanes as vector instructions: integers alone, so the same everywhere."""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvass.codecs import lanes
from kvass.codecs.lanes import I8, I16, I32, I64, splat

LANES = 64
_WIDTH = 16
_DTYPES = (types.uint32, types.uint8, types.uint16, types.uint32, types.uint8)


def _turn(
    context: Any, tables: Any, contexts: Any, words: Any, states: Any, symbols: Any, i: Any, at: Any
) -> tuple[Any, Callable[..., Any]] | None:
    """Decode symbols i .. i + 63, taking words from `at` on, 64 at most; returns how many were taken.

    See `kvass.codecs.rans.decode` for the arrays.
    """
    arrays = (tables, contexts, words, states, symbols)
    if not lanes.are_flat(arrays, _DTYPES):
        return None
    return types.int64(*arrays, types.int64, types.int64), _generate


turn = intrinsic(_turn)


def _generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
    *arrays, i, at = arguments
    tables, contexts, words, states, symbols = lanes.pointers(context, builder, signature.args[:5], arrays)
    wide = ir.VectorType(I32, _WIDTH)
    twelve, slots = splat(I32, 12, _WIDTH), splat(I32, 0xFFF, _WIDTH)
    half, one = splat(I32, 16, _WIDTH), splat(I32, 1, _WIDTH)
    found, place = [], at
    for lane in range(0, LANES, _WIDTH):
        first = ir.Constant(I64, lane)
        state = lanes.load(builder, states, first, I32, _WIDTH)
        which = builder.zext(lanes.load(builder, contexts, builder.add(i, first), I8, _WIDTH), wide)
        slot = builder.or_(builder.shl(which, twelve), builder.and_(state, slots))
        entry = lanes.gather(builder, tables, slot)
        frequency = builder.add(builder.and_(builder.lshr(entry, twelve), slots), one)
        state = builder.mul(frequency, builder.lshr(state, twelve))
        state = builder.add(state, builder.and_(entry, slots))
        low = builder.icmp_unsigned("<", state, splat(I32, 1 << 16, _WIDTH))
        taken = builder.zext(lanes.expand(builder, words, place, low), wide)
        state = builder.select(low, builder.or_(builder.shl(state, half), taken), state)
        lanes.store(builder, state, states, first)
        place = builder.add(place, builder.zext(builder.ctpop(builder.bitcast(low, I16)), I64))
        found.append(builder.lshr(entry, splat(I32, 24, _WIDTH)))
    # narrowed together: storing the narrowed sixteen takes several times as long on some CPUs
    together = builder.trunc(lanes.joined(builder, found), ir.VectorType(I8, LANES))
    lanes.store(builder, together, symbols, i)
    return builder.sub(place, at)
