"""What `kvass bench codec` measures: kvass' codecs as the store uses them, and the baselines, as coders."""

from collections.abc import Mapping, Sequence

import numpy as np

from kvass.bench.baselines.base import KV as Whole
from kvass.bench.baselines.base import Baseline, Setting
from kvass.bench.baselines.registry import BASELINES
from kvass.calibrate.certify import as_stored
from kvass.calibrate.evaluate import Coder
from kvass.codecs.base import Codec
from kvass.codecs.registry import LOSSY, codec
from kvass.codecs.tables import Tables
from kvass.container import Array
from kvass.errors import CorruptObjectError, InputError
from kvass.keys import Namespace
from kvass.runner import KV
from kvass.spec import KVSpec, numpy_dtype

CODECS = ("lossless", *LOSSY)

_PROBE_TOKENS = 64


def our_codecs(names: Sequence[str], tables: Tables) -> tuple[dict[str, Codec], dict[str, str]]:
    """The codecs of these names; and, of those that the tables hold nothing for, why.

    Raises InputError for a name that none of them has.
    """
    unknown = sorted(set(names) - set(CODECS))
    if unknown:
        raise InputError(f"no codec is called {unknown[0]!r}; there are: {', '.join(CODECS)}")
    made: dict[str, Codec] = {}
    missing: dict[str, str] = {}
    for name in names:
        try:
            made[name] = codec(name, tables)
        except CorruptObjectError as error:
            missing[name] = str(error)
    return made, missing


def our_coders(codecs: Mapping[str, Codec], namespace: Namespace) -> dict[str, Coder]:
    """Each codec, chunk by chunk, bits being those of whole objects."""
    return {name: as_stored(one, namespace) for name, one in codecs.items()}


def baseline_coders(
    spec: KVSpec, tables: Tables, calibration: Sequence[KV]
) -> tuple[dict[str, Coder], dict[str, str]]:
    """All baselines over whole sequences, profiled on `calibration` (KV of texts that are not measured); and,
    of those that cannot code such KV, why.

    They get and give float32, before or after RoPE as each wants it; what they give is rounded to the KV's
    dtype, as an engine would read it.
    """
    depth = sum(len(group.layers) for group in spec.groups)
    settings = []
    for number, group in enumerate(spec.groups):
        known = [Whole(_wide(kv[number]["k"]), _wide(kv[number]["v"])) for kv in calibration]
        settings.append(Setting(group, depth, known))
    made: dict[str, Coder] = {}
    missing: dict[str, str] = {}
    for name, make in BASELINES.items():
        try:
            schemes = [make(setting) for setting in settings]
            for scheme, setting in zip(schemes, settings, strict=True):
                keys, values = (one[:, :_PROBE_TOKENS] for one in setting.calibration[0])
                scheme(keys, values, setting.group)
        except InputError as error:
            missing[name] = str(error)
            continue
        made[name] = _coder(schemes, spec, tables)
    return made, missing


def _coder(schemes: Sequence[Baseline], spec: KVSpec, tables: Tables) -> Coder:
    def coder(kv: KV) -> tuple[KV, int]:
        bits, read = 0.0, []
        for number, (scheme, group, arrays) in enumerate(zip(schemes, spec.groups, kv, strict=True)):
            rope = None if scheme.rotated else tables.rope(number)
            keys = _wide(arrays["k"])
            coded = scheme(rope.unrotate(keys, 0) if rope else keys, _wide(arrays["v"]), group)
            bits += coded.bits
            k = rope.rotate(np.asarray(coded.keys, np.float32), 0) if rope else coded.keys
            dtype = numpy_dtype(group.dtype)
            read.append({"k": k.astype(dtype), "v": coded.values.astype(dtype)})
        return read, round(bits)

    return coder


def _wide(array: Array) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.asarray(array, np.float32)
