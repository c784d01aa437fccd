"""Which baselines there are, by name: each line says how one is made for a setting."""

from collections.abc import Callable, Mapping

from kvass.bench.baselines.base import Baseline, Setting
from kvass.bench.baselines.cachegen import CacheGen
from kvass.bench.baselines.fp8 import Fp8
from kvass.bench.baselines.hadamard import Hadamard
from kvass.bench.baselines.kivi import Kivi
from kvass.bench.baselines.lmcache import CHUNK, LMCache

BASELINES: Mapping[str, Callable[[Setting], Baseline]] = {
    "kivi8-pre": lambda _: Kivi(8, rotated=False),
    "kivi8-post": lambda _: Kivi(8, rotated=True),
    "kivi4-pre": lambda _: Kivi(4, rotated=False),
    "kivi4-post": lambda _: Kivi(4, rotated=True),
    "kivi3-pre": lambda _: Kivi(3, rotated=False),
    "kivi3-post": lambda _: Kivi(3, rotated=True),
    "kivi2-pre": lambda _: Kivi(2, rotated=False),
    "kivi2-post": lambda _: Kivi(2, rotated=True),
    "hadamard4": lambda _: Hadamard(4),
    "hadamard3": lambda _: Hadamard(3),
    "hadamard2": lambda _: Hadamard(2),
    "fp8": lambda _: Fp8(),
    "fp8-token": lambda _: Fp8("token"),
    "fp8-channel": lambda _: Fp8("channel"),
    "cachegen-x1": CacheGen,
    "cachegen-x0.4": lambda setting: CacheGen(setting, 0.4),
    "cachegen-x1-chunked": lambda setting: CacheGen(setting, chunk=CHUNK),
    "cachegen-x0.4-chunked": lambda setting: CacheGen(setting, 0.4, chunk=CHUNK),
    "lmcache": lambda setting: LMCache(setting.depth, tables=False),
    "lmcache-with-tables": lambda setting: LMCache(setting.depth, tables=True),
}
