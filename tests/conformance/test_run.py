"""`kvass conformance` finds, builds and judges other people's tiers and codecs."""

import sys
from pathlib import Path

import pytest

from kvass.errors import InputError, KvassError
from kvass.testing.clock import ManualClock
from kvass.testing.run import build_codec, build_tier, run_conformance

_PLUGIN = """
from kvass.codecs.raw import Raw
from kvass.errors import CorruptObjectError
from kvass.tiers.memory import MemoryTier


class Sound(Raw):
    name = "sound"


class Careless(Raw):
    def decode(self, stored, chunk):
        return dict(stored)


class Forgetful(MemoryTier):
    def contains(self, addresses):
        return [True for _ in addresses]


class Needy(Raw):
    def __init__(self, level):
        self.level = level


def small(path, budget, clock):
    return MemoryTier(budget, clock=clock)


def timeless(path, budget):
    return MemoryTier(budget)


def loose(**given):
    return MemoryTier(given["budget"], clock=given["clock"])


def strange(path, budget, moon):
    return None


def wrong(path, budget):
    return 7


def make_raw():
    return Raw()


number = 7


class Other:
    pass
"""


@pytest.fixture(autouse=True)
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kvass_a_plugin.py").write_text(_PLUGIN)
    (tmp_path / "kvass_a_broken_plugin.py").write_text("import no_such_module_at_all")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "kvass_a_plugin", raising=False)


@pytest.mark.parametrize(
    "target", ["kvass_a_plugin:Sound", "kvass_a_plugin:make_raw", "kvass.codecs.raw:Raw"]
)
def test_a_sound_codec_passes(target: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_conformance(target) == 0
    assert "passed" in capfd.readouterr().out


def test_a_careless_codec_fails(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_conformance("kvass_a_plugin:Careless") == 1
    assert "test_arrays_that_do_not_fit_are_corrupt" in capfd.readouterr().out


@pytest.mark.parametrize("target", ["kvass.tiers.memory:MemoryTier", "kvass_a_plugin:timeless"])
def test_a_sound_tier_passes(target: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_conformance(target) == 0
    assert "passed" in capfd.readouterr().out


def test_a_forgetful_tier_fails(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_conformance("kvass_a_plugin:Forgetful") == 1
    assert "FAILED" in capfd.readouterr().out


def test_tiers_are_built_from_what_they_ask_for(tmp_path: Path) -> None:
    for target in ("small", "timeless", "loose"):
        tier = build_tier(f"kvass_a_plugin:{target}", tmp_path, 1 << 20, ManualClock())
        assert tier.usage().budget == 1 << 20
    tier = build_tier("kvass.tiers.directory:DirectoryTier", tmp_path / "tier", 8 << 20, ManualClock())
    assert tier.name == "conformance"
    tier.close()
    with pytest.raises(InputError, match="made a int"):
        build_tier("kvass_a_plugin:wrong", tmp_path, 1, ManualClock())
    assert build_codec("kvass_a_plugin:Sound").name == "sound"


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("no.such:Thing", "no.such"),
        ("kvass.tiers.memory:Nothing", "Nothing"),
        ("kvass.tiers.memory", "package.module:Name"),
        (":Thing", "package.module:Name"),
        ("kvass.tiers.memory:", "package.module:Name"),
        (".:x", "cannot find"),
        ("kvass_a_broken_plugin:Thing", "no_such_module_at_all"),
        ("kvass_a_plugin:number", "no class or function"),
        ("kvass_a_plugin:Other", "neither"),
        ("kvass_a_plugin:Needy", "level"),
        ("kvass_a_plugin:strange", "moon"),
        ("builtins:dict.fromkeys", "cannot tell how to call|needs"),
    ],
)
def test_anything_else_is_a_clear_error(target: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as raised:
        run_conformance(target)
    assert isinstance(raised.value, KvassError)
    assert "\n" not in str(raised.value)
