"""The transform codec: kernels that agree with plain numpy, bounded errors, hostile streams and tables."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_like import POSITIONS, bits, kv_like
from transform_cases import CLASSES, CONTEXTS, SHAPES, STEPS, arrays_of, group_of, tables_of

from kvass.codecs import rans
from kvass.codecs import transform_basis as basis
from kvass.codecs import transform_kernels as kernels
from kvass.codecs import transform_plain as twin
from kvass.codecs.base import Chunk, Codec
from kvass.codecs.registry import codec
from kvass.codecs.tables import Tables, write_tables
from kvass.codecs.transform import ORIGIN, Transform
from kvass.codecs.transform_tables import Calibrated
from kvass.errors import CorruptObjectError, InputError
from kvass.spec import LayerGroup
from kvass.testing.codecs import CodecConformance

EXAMPLES = settings(deadline=None, max_examples=60)
NAMES = st.sampled_from([*SHAPES])
WIDTHS = st.sampled_from([1, 5, 16, 64, 70, 96, 144])
SEEDS = st.integers(0, 2**32 - 1)


@functools.cache
def made(name: str, level: str = "q1") -> Transform:
    return Transform(tables_of(SHAPES[name]), level)


def normal(random, *shape):
    """With zeros, which kernels leave out."""
    return (random.normal(size=shape) * (random.random(shape) < 0.8)).astype(np.float32)


class TestConformance(CodecConformance):
    group = group_of(SHAPES["small"])
    positions = POSITIONS

    def make_codec(self) -> Codec:
        return codec("q1", tables_of(SHAPES["small"]))

    def groups(self) -> st.SearchStrategy[LayerGroup]:
        kinds = st.sampled_from(["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2"])
        return kinds.map(lambda dtype: group_of(SHAPES["small"], dtype))


# -- kernels and plain numpy ------------------------------------------------------------------------------


@EXAMPLES
@given(st.integers(1, 9), st.integers(1, 3), WIDTHS, SEEDS)
def test_transforms_agree_with_plain_numpy(tokens, blocks, width, seed):
    random = np.random.default_rng(seed)
    n = blocks * width
    x, mean, matrix = normal(random, tokens, n), normal(random, n), normal(random, blocks, width, width)
    y = np.full((tokens, n + 5), 7, np.float32)
    basis.transformed(x.copy(), mean, matrix, 3, y)
    assert np.array_equal(bits(y[:, 3 : 3 + n]), bits(twin.transformed(x, mean, matrix)))
    assert (y[:, :3] == 7).all() and (y[:, 3 + n :] == 7).all()
    back = np.empty((tokens, n), np.float32)
    basis.restored(y, 2, mean, matrix, back)
    assert np.array_equal(bits(back), bits(twin.restored(y[:, 2 : 2 + n], mean, matrix)))


@EXAMPLES
@given(st.integers(1, 9), st.integers(1, 3), WIDTHS, WIDTHS, SEEDS)
def test_weights_and_classes_agree_with_plain_numpy(tokens, heads, dim, probes, seed):
    random = np.random.default_rng(seed)
    keys, lines = normal(random, tokens, heads, dim), normal(random, heads, dim, probes)
    keys[0] *= 1e30
    offsets = (random.normal(size=(heads, probes)) * 40).astype(np.float32)
    weights, classes = np.empty((tokens, heads), np.float32), np.empty((tokens, heads), np.uint8)
    basis.importance(keys, lines, offsets, weights)
    with np.errstate(all="ignore"):
        assert np.array_equal(bits(weights), bits(twin.importance(keys, lines, offsets)))
    thresholds = np.sort(random.choice(weights.reshape(-1), (heads, 4)))[:, ::-1].copy()
    kernels.classified(weights, thresholds, classes)
    assert np.array_equal(classes, twin.classified(weights, thresholds))


@EXAMPLES
@given(
    st.integers(1, 5), st.integers(1, 3), st.sampled_from([0, 1, 15, 16, 20, 48]), st.integers(0, 9), SEEDS
)
def test_turning_agrees_with_plain_numpy(tokens, heads, half, rest, seed):
    random = np.random.default_rng(seed)
    x = normal(random, tokens, heads, 2 * half + rest)
    cos, sin = normal(random, tokens, half), normal(random, tokens, half)
    wanted, out, kept = twin.turned(x, cos, sin), np.empty_like(x), x.copy()
    basis.turned(x, cos, sin, out)
    assert np.array_equal(bits(out), bits(wanted))
    assert np.array_equal(bits(x), bits(kept))
    basis.turned(x, cos, sin, x)
    assert np.array_equal(bits(x), bits(wanted))


def test_powers_of_two_are_near():
    exponents = np.linspace(-64, 61.9, 4001, dtype=np.float32)
    keys, offsets = np.zeros((1, 1, 1), np.float32), -exponents[:, None, None]
    weights = np.empty((1, 1), np.float32)
    for offset, exponent in zip(offsets, exponents, strict=True):
        basis.importance(keys, np.zeros((1, 1, 1), np.float32), offset, weights)
        assert abs(weights[0, 0] / 2.0 ** float(exponent) - 1) < 1e-4


@EXAMPLES
@given(st.integers(1, 9), st.integers(1, 3), st.sampled_from([(6, 4), (64, 64), (33, 80)]), SEEDS)
def test_levels_agree_with_plain_numpy(tokens, heads, dims, seed):
    random = np.random.default_rng(seed)
    split, n = heads * dims[0], heads * sum(dims)
    arrays = arrays_of(SHAPES["small"])
    y = normal(random, tokens, n) * np.exp2(random.integers(-3, 9, (tokens, n))).astype(np.float32)
    y[0, :4] = [np.inf, -np.inf, np.nan, 1e30]
    classes = random.integers(0, CLASSES, (tokens, heads)).astype(np.uint8)
    base = random.integers(-(1 << 15), 1 << 15, n).astype(np.int16)
    base[n // 2 :] %= CONTEXTS
    shifts, rounding = arrays["transform.shifts"], arrays["transform.rounding"]
    steps, inverse = (arrays[f"transform.q1.{name}"] for name in ("steps", "inverse_steps"))
    full = n + -n % rans.LANES
    contexts, symbols = np.full((tokens, full), 99, np.uint8), np.zeros((tokens, full), np.uint8)
    escapes = np.empty(y.size, np.int32)
    count = kernels.quantised(
        y, split, classes, base, shifts, inverse, rounding, contexts, symbols, escapes
    )  # fmt: skip
    wide = twin.columns(classes, split, n)
    kinds = twin.contexts(wide, base, shifts, CONTEXTS - 1)
    found, beyond = twin.quantised(y, inverse[wide], rounding[kinds])
    assert np.array_equal(contexts[:, :n], kinds) and (contexts[:, n:] == 99).all()
    assert np.array_equal(symbols[:, :n], found) and not symbols[:, n:].any()
    assert np.array_equal(escapes[:count], beyond)

    frequencies, centres = arrays["transform.symbols"], arrays["transform.centres"]
    idle = CONTEXTS + 1
    runs = twin.padded(kinds, idle), twin.padded(found, 0)
    words = np.empty(len(runs[0]) + rans.STATE_WORDS, np.uint16)
    states = rans.fresh()
    at = rans.encode_run(rans.coding_tables(frequencies), *runs, words, len(words), states)
    at = rans.finish(words, at, states)
    stored = twin.stream(frequencies, [runs], beyond)
    assert np.array_equal(words[at:].astype("<u2").view(np.uint8), stored[8 : 8 + 2 * len(words[at:])])

    read = np.concatenate([words[at:], np.zeros(rans.PADDING, np.uint16)])
    at = rans.begin(read, 0, states)
    back = np.empty_like(y)
    at, taken = kernels.dequantised(
        rans.decoding_tables(frequencies), read, at, states, classes, base, shifts, steps,
        centres.reshape(-1), beyond, 0, split, idle, back,
    )  # fmt: skip
    assert (at, taken) == (len(read) - rans.PADDING, count) and rans.ended(states)
    wanted = twin.dequantised(found, kinds, steps[wide], centres, beyond)
    assert np.array_equal(bits(back), bits(wanted))


@EXAMPLES
@given(st.integers(1, 5), st.integers(1, 3), st.sampled_from([(0, 7), (4, 9), (16, 32)]), SEEDS)
def test_rounding_agrees_with_plain_numpy(tokens, heads, sizes, seed):
    random = np.random.default_rng(seed)
    half, dim = sizes
    x, cos, sin = (
        normal(random, tokens, heads, dim),
        normal(random, tokens, half),
        normal(random, tokens, half),
    )
    out, wanted = np.empty(x.shape, np.uint16), twin.turned(x, cos, sin)
    basis.rounded(x, cos, sin, out)
    assert np.array_equal(bits(x), bits(wanted))
    assert np.array_equal(out, twin.rounded(wanted))


@pytest.mark.parametrize("level", STEPS)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    ("tokens", "start", "behind"), [(1, 0, 0), (21, 0, 7), (9, 300, 0), (9, 300, 300), (9, 300, 10_000)]
)
def test_the_codec_agrees_with_plain_numpy(name, level, tokens, start, behind):
    shape, coder = SHAPES[name], made(name, level)
    tables = tables_of(shape)
    rope, group = tables.rope(0), Calibrated(tables, level, 0)
    chunk = Chunk(group_of(shape), 0, start, tokens, behind)
    arrays, kept = kv_like(chunk), 4 if start == 0 else 0
    wide = {one: array.astype(np.float32) for one, array in arrays.items()}
    bare = rope.unrotate(wide["k"], start) if rope else wide["k"]
    placed = rope.rotate(bare, max(0, ORIGIN - tokens - behind)) if rope else bare
    runs, escapes, restored = [], [], {"k": [], "v": []}
    for layer in range(shape.layers):
        weights = twin.importance(placed[layer], group.probes[layer], group.offsets[layer])
        classes = twin.classified(weights, group.thresholds[layer])
        parts = ((bare, group.k), (wide["v"], group.v))
        y = np.concatenate(
            [
                twin.transformed(x[layer].reshape(tokens, -1), side.mean[layer], side.forward[layer])
                for x, side in parts
            ],
            axis=1,
        )
        y[:kept] = 0
        columns = twin.columns(classes, group.split, group.width)
        kinds = twin.contexts(columns, group.base[layer], group.shifts, CONTEXTS - 1)
        symbols, beyond = twin.quantised(y, group.inverse_steps[columns], group.rounding[kinds])
        flat = classes.reshape(1, -1)
        own = np.full(flat.shape, group.class_context, np.uint8)
        runs.append((twin.padded(own, group.idle), twin.padded(flat, 0)))
        runs.append((twin.padded(kinds, group.idle), twin.padded(symbols, 0)))
        escapes.append(beyond)
        back = twin.dequantised(symbols, kinds, group.steps[columns], group.centres.reshape(-1, 256), beyond)
        for one, side, part in (
            ("k", group.k, back[:, : group.split]),
            ("v", group.v, back[:, group.split :]),
        ):
            x = twin.restored(part, side.mean[layer], side.inverse[layer])
            restored[one].append(x.reshape(arrays[one].shape[1:]))
    stored = coder.encode(arrays, chunk)
    frequencies = arrays_of(shape)["transform.symbols"]
    assert np.array_equal(stored["stream"][0], twin.stream(frequencies, runs, np.concatenate(escapes)))
    found = coder.decode(stored, chunk)
    if rope:
        restored["k"] = [twin.turned(x, *rope.rows(start, tokens)) for x in restored["k"]]
    for one, layers in restored.items():
        wanted = twin.rounded(np.stack(layers))
        assert np.array_equal(found[one].view(np.uint16)[:, kept:], wanted[:, kept:])
        assert np.array_equal(bits(found[one][:, :kept]), bits(arrays[one][:, :kept]))


# -- what comes back --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_errors_are_within_a_step_of_each_direction(name):
    shape, coder = SHAPES[name], made(name)
    chunk = Chunk(group_of(shape, "float32"), 0, 256, 40)
    arrays = kv_like(chunk)
    back = coder.decode(coder.encode(arrays, chunk), chunk)
    group = coder._group(0)
    error = (back["v"] - arrays["v"]).reshape(shape.layers, 40, -1)
    for layer in range(shape.layers):
        moved = twin.transformed(error[layer], np.float32(0), group.v.forward[layer])
        assert np.abs(moved).max() <= group.steps.max()
        assert np.abs(moved).mean() <= group.steps.mean()


def test_a_token_that_is_attended_to_is_kept_better():
    shape, coder = SHAPES["lanes"], made("lanes", "q4")
    chunk = Chunk(group_of(shape, "float32"), 0, 256, 64)
    arrays = kv_like(chunk)
    group, rope = coder._group(0), tables_of(shape).rope(0)
    for layer in range(shape.layers):
        seen = group.probes[layer].sum(axis=-1)
        key = (seen / np.linalg.norm(seen, axis=-1, keepdims=True) * 40)[None, None].astype(np.float32)
        arrays["k"][layer, 32:33] = rope.rotate(rope.unrotate(key, ORIGIN - 32), 288)[0]
    back = coder.decode(coder.encode(arrays, chunk), chunk)
    error = np.abs(back["v"] - arrays["v"]).mean(axis=(0, 2, 3))
    assert error[32] < 0.9 * np.median(error)


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn"])
def test_what_is_beyond_a_dtype_becomes_its_largest(dtype):
    chunk = Chunk(group_of(SHAPES["small"], dtype), 0, 256, 16)
    arrays = kv_like(chunk)
    top = float(np.finfo(np.float16).max) if dtype == "float16" else 448.0
    arrays["v"][:] = np.float32(top)
    back = made("small", "q4").decode(made("small", "q4").encode(arrays, chunk), chunk)
    assert np.isfinite(back["v"].astype(np.float32)).all()


def test_views_compile_nothing_new():
    coder, chunk = made("small"), Chunk(group_of(SHAPES["small"]), 0, 256, 8)
    arrays = kv_like(chunk)
    coder.decode(coder.encode(arrays, chunk), chunk)
    counted = [one for one in (*vars(kernels).values(), *vars(basis).values()) if hasattr(one, "signatures")]
    before = [len(one.signatures) for one in counted]
    moved = {
        name: np.ascontiguousarray(a.transpose(2, 0, 1, 3)).transpose(1, 2, 0, 3)
        for name, a in arrays.items()
    }
    reversed_ = {name: np.ascontiguousarray(a[:, ::-1])[:, ::-1] for name, a in arrays.items()}
    stored = coder.encode(arrays, chunk)
    for views in (moved, reversed_):
        assert not views["k"].flags.c_contiguous
        assert np.array_equal(coder.encode(views, chunk)["stream"], stored["stream"])
    strided = np.zeros((1, 2 * stored["stream"].size), np.uint8)[:, ::2]
    strided[:] = stored["stream"]
    frozen = stored["stream"].copy()
    frozen.flags.writeable = False
    wanted = coder.decode(stored, chunk)
    for stream in (strided, frozen):
        back = coder.decode({"stream": stream}, chunk)
        assert all(np.array_equal(bits(back[name]), bits(wanted[name])) for name in wanted)
    one = Chunk(chunk.group, 0, 256, 1)
    coder.decode(coder.encode(kv_like(one), one), one)
    assert [len(one.signatures) for one in counted] == before


@pytest.mark.parametrize("harm", ["kv", "shape", "dtype", "far", "long", "model"])
def test_what_cannot_be_kept_is_refused(harm):
    coder, chunk = made("small"), Chunk(group_of(SHAPES["small"]), 0, 256, 8)
    arrays = kv_like(chunk)
    if harm == "kv":
        arrays = {"kv": arrays["k"].reshape(2, 8, -1)}
    elif harm == "shape":
        arrays["k"] = arrays["k"][:, :4]
    elif harm == "dtype":
        arrays["v"] = arrays["v"].astype(np.float32)
    elif harm == "far":
        chunk = chunk._replace(start=ORIGIN)
    elif harm == "model":
        chunk = chunk._replace(group=group_of(SHAPES["partial"]))
        arrays = kv_like(chunk)
    else:
        chunk = chunk._replace(tokens=ORIGIN + 1, start=0)
        arrays = kv_like(chunk)
    with pytest.raises(InputError):
        coder.encode(arrays, chunk)


# -- hostile streams --------------------------------------------------------------------------------------


def decoded(coder, stored, chunk):
    """Decode; None where it is corrupt. What comes back has the chunk's shape."""
    try:
        back = coder.decode(stored, chunk)
    except CorruptObjectError:
        return None
    for name in ("k", "v"):
        assert back[name].shape == chunk.group.shape(name, chunk.tokens)
    return back


def harmed(stream, at, value):
    flat = stream[0].copy()
    flat[at : at + 4] = np.array([value], "<u4").view(np.uint8)
    return flat[None]


@EXAMPLES
@given(NAMES, st.sampled_from(["random", "words", "cut", "longer", "flip"]), SEEDS)
def test_any_stream_decodes_to_arrays_or_is_corrupt(name, harm, seed):
    random = np.random.default_rng(seed)
    coder, chunk = made(name), Chunk(group_of(SHAPES[name]), 0, 256, 12)
    stored = coder.encode(kv_like(chunk), chunk)
    flat = stored["stream"][0].copy()
    if harm == "random":
        flat = np.frombuffer(random.bytes(int(random.integers(0, 4000))), np.uint8)
    elif harm == "words":
        flat[8:] = np.frombuffer(random.bytes(flat.size - 8), np.uint8)
    elif harm == "cut":
        flat = flat[: random.integers(0, flat.size)]
    elif harm == "longer":
        flat = np.concatenate([flat, np.zeros(random.integers(1, 99), np.uint8)])
    else:
        flat[random.integers(8, flat.size)] ^= 1 << random.integers(0, 8)
    back = decoded(coder, {"stream": flat[None]}, chunk)
    assert back is None or harm == "flip"


@pytest.mark.parametrize("words", [0, 1, 127, 2**31, 2**32 - 1])
def test_lengths_that_lie_are_corrupt(words):
    coder, chunk = made("small"), Chunk(group_of(SHAPES["small"]), 0, 256, 12)
    stream = coder.encode(kv_like(chunk), chunk)["stream"]
    for at in (0, 4):
        lying = harmed(stream, at, words)
        assert np.array_equal(lying, stream) or decoded(coder, {"stream": lying}, chunk) is None


def lengths(stream):
    return (int(one) for one in stream[0, :8].copy().view("<u4"))


@pytest.mark.parametrize("change", ["fewer", "more", "moved", "huge"])
def test_escapes_too_few_or_many_or_too_large_are_corrupt(change):
    coder, chunk = made("lanes"), Chunk(group_of(SHAPES["lanes"]), 0, 256, 12)
    arrays = kv_like(chunk)
    arrays["v"][0, 3, 1, :] *= 500
    stream = coder.encode(arrays, chunk)["stream"]
    words, escapes = lengths(stream)
    assert escapes > 1
    flat = stream[0].copy()
    if change == "fewer":
        flat = harmed(flat[None, :-4], 4, escapes - 1)[0]
    elif change == "more":
        flat = harmed(np.pad(flat, (0, 4))[None], 4, escapes + 1)[0]
    elif change == "moved":  # two words less, one escape more
        flat = harmed(harmed(flat[None], 0, words - 2), 4, escapes + 1)[0]
    else:
        flat = harmed(flat[None], flat.size - 4, 2**30)[0]
    assert decoded(coder, {"stream": flat[None]}, chunk) is None


def test_a_stream_far_larger_than_its_chunk_is_not_read():
    coder, chunk = made("small"), Chunk(group_of(SHAPES["small"]), 0, 256, 1)
    flat = np.zeros(1 << 24, np.uint8)
    flat[:8] = np.array([(flat.size - 8) // 2, 0], "<u4").view(np.uint8)
    with pytest.raises(CorruptObjectError, match="longer"):
        coder.decode({"stream": flat[None]}, chunk)


@pytest.mark.parametrize("harm", ["missing", "more", "sinks", "sinks' dtype", "dtype", "rows", "axes"])
def test_stored_arrays_that_do_not_fit_are_corrupt(harm):
    coder, chunk = made("small"), Chunk(group_of(SHAPES["small"]), 0, 0, 12)
    stored = coder.encode(kv_like(chunk), chunk)
    if harm == "missing":
        del stored["k_first"]
    elif harm == "more":
        stored["z"] = stored["k_first"]
    elif harm == "sinks":
        stored["v_first"] = stored["v_first"][:, :3]
    elif harm == "sinks' dtype":
        stored["v_first"] = stored["v_first"].astype(np.float32)
    elif harm == "dtype":
        stored["stream"] = stored["stream"].view(np.int8)
    elif harm == "rows":
        stored["stream"] = np.concatenate([stored["stream"]] * 2)
    else:
        stored["stream"] = stored["stream"][0]
    assert decoded(coder, stored, chunk) is None


def test_a_position_behind_the_tables_is_corrupt():
    coder, chunk = made("small"), Chunk(group_of(SHAPES["small"]), 0, 256, 12)
    stored = coder.encode(kv_like(chunk), chunk)
    assert decoded(coder, stored, chunk._replace(start=ORIGIN)) is None


# -- hostile tables ---------------------------------------------------------------------------------------

LEVEL = ["transform.q1.offset", "transform.q1.steps", "transform.q1.inverse_steps"]
SHARED = ["transform.symbols", "transform.centres", "transform.rounding", "transform.shifts"]
SIDES = [f"transform.0.{side}.{part}" for side in "kv" for part in ("mean", "forward", "inverse", "scale")]
GROUP = [f"transform.0.{part}" for part in ("probes", "offsets", "thresholds")]


@pytest.mark.parametrize("harm", ["missing", "none", "longer", "shorter", "flat", "float64", "nan", "axis"])
@pytest.mark.parametrize("name", LEVEL + SHARED + SIDES + GROUP)
def test_tables_that_do_not_fit_are_corrupt(name, harm):
    arrays = arrays_of(SHAPES["small"])
    array = arrays[name]
    if harm == "nan" and array.dtype != np.float32:
        return
    if harm == "missing":
        arrays.pop(name)
    else:
        arrays[name] = {
            "none": array[:0],
            "longer": np.concatenate([array, array]),
            "shorter": array[..., :-1],
            "flat": array.reshape(-1)[1:],
            "float64": array.astype(np.float64),
            "nan": np.where(np.arange(array.size).reshape(array.shape) == array.size - 1, np.nan, array),
            "axis": array[None, None],
        }[harm].astype(np.float64 if harm == "float64" else array.dtype)
    if name.endswith("offset") and harm == "axis":
        return
    with pytest.raises(CorruptObjectError):
        Transform(Tables(arrays, "0" * 64), "q1")


def test_frequencies_and_steps_must_be_usable():
    arrays = arrays_of(SHAPES["small"])
    rare, odd = (arrays["transform.symbols"].copy() for _ in range(2))
    rare[3, 255], rare[3, 0] = 0, rare[3, 0] + rare[3, 255]
    odd[5, 0] += 1
    still = arrays["transform.q1.steps"].copy()
    still[2] = 0
    for name, array in (
        ("symbols", rare),
        ("symbols", odd),
        ("q1.steps", still),
        ("q1.inverse_steps", -still),
    ):
        with pytest.raises(CorruptObjectError):
            Transform(tables_of(SHAPES["small"], **{f"transform.{name}": array}), "q1")


@pytest.mark.parametrize("value", [-(1 << 15), (1 << 15) - 1])
def test_contexts_beyond_the_tables_are_bounded(value):
    scale = np.full((2, 16), value, np.int16)
    coder = Transform(tables_of(SHAPES["small"], **{"transform.0.k.scale": scale}), "q1")
    chunk = Chunk(group_of(SHAPES["small"]), 0, 256, 12)
    assert decoded(coder, coder.encode(kv_like(chunk), chunk), chunk) is not None


def test_tables_of_another_model_are_corrupt():
    stored = {"stream": np.zeros((1, 8), np.uint8)}
    for name in ("partial", "lanes"):
        with pytest.raises(CorruptObjectError, match="another shape"):
            made("small").decode(stored, Chunk(group_of(SHAPES[name]), 0, 256, 12))
    arrays = arrays_of(SHAPES["small"])
    arrays |= {name: array for name, array in arrays_of(SHAPES["lanes"]).items() if name.startswith("rope.")}
    with pytest.raises(CorruptObjectError, match="rotate"):
        coder = Transform(tables_of(SHAPES["small"], **arrays), "q1")
        coder.decode(stored, Chunk(group_of(SHAPES["small"]), 0, 256, 12))


@pytest.mark.parametrize("value", [1e30, -3e38])
def test_what_is_larger_than_levels_reach_is_refused(value: float) -> None:
    coder, chunk = made("small"), Chunk(group_of(SHAPES["small"]), 0, 256, 8)
    arrays = kv_like(chunk)
    arrays["v"][0, 5, 0, :3] = value
    with pytest.raises(InputError, match="larger than its levels reach"):
        coder.encode(arrays, chunk)


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38, 1.01])
def test_cosines_that_are_none_are_refused(value: float) -> None:
    arrays = dict(arrays_of(SHAPES["small"]))
    changed = arrays["rope.0.fine.cos"].copy()
    changed[10, 0] = value
    tables = Tables.parse(write_tables(arrays | {"rope.0.fine.cos": changed}))
    with pytest.raises(CorruptObjectError, match="cosines and sines are none"):
        tables.rope(0)
