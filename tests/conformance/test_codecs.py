"""Every codec passes the conformance suite; each is found by its name, and imported when it is used."""

import pytest
from hypothesis import strategies as st

from fixtures.coders import Ending, Halved, Stream, tables
from kvass.codecs import registry
from kvass.codecs.base import Codec
from kvass.codecs.raw import Raw
from kvass.codecs.registry import LOSSY, NotDecodableError, codec, codec_of, is_end_aware, is_lossless
from kvass.codecs.tables import Tables
from kvass.container import CodecStep
from kvass.errors import ConfigError, CorruptObjectError
from kvass.spec import LayerGroup
from kvass.testing.codecs import CodecConformance


class TestRaw(CodecConformance):
    def make_codec(self) -> Codec:
        return Raw()


class TestStream(CodecConformance):
    """A lossless one that stores a stream over all layers."""

    def make_codec(self) -> Codec:
        return Stream()


class TestHalved(CodecConformance):
    """A lossy one, of one model."""

    number = 3

    def make_codec(self) -> Codec:
        return Halved(Tables.parse(tables()))

    def groups(self) -> st.SearchStrategy[LayerGroup]:
        return st.just(self.group)


class TestEnding(TestHalved):
    """One that cares how far its chunk is from the end."""

    def make_codec(self) -> Codec:
        return Ending(Tables.parse(tables()))


def test_a_codec_is_found_by_its_name() -> None:
    assert isinstance(codec("raw"), Raw)
    assert is_lossless("raw")
    assert "q2" in LOSSY
    assert "lossless" not in LOSSY


def test_an_unknown_codec_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"kivi4.*q1.*raw"):
        codec("nonsense")
    with pytest.raises(CorruptObjectError):
        codec_of([CodecStep("nonsense")])


def test_what_a_codec_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_numba(module: str) -> None:
        raise ModuleNotFoundError("no numba", name="numba")

    monkeypatch.setattr(registry, "import_module", without_numba)
    with pytest.raises(ConfigError, match=r"'q2' needs numba.*kvass\[codecs\]"):
        codec("q2", Tables.parse(tables()))
    with pytest.raises(NotDecodableError, match="numba"):
        codec_of([CodecStep("lossless")])


def test_who_cares_for_a_sequences_end_is_known_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(module: str) -> None:
        raise ModuleNotFoundError("no numba", name="numba")

    class Point:
        def __init__(self, name: str, made: type):
            self.name, self._made = name, made

        def load(self) -> type:
            if self._made is ImportError:
                raise self._made("no such module")
            return self._made

    points = [Point("near", Halved), Point("ending", Ending), Point("broken", ImportError)]
    monkeypatch.setattr(registry, "entry_points", lambda **_: points)
    for name, line in registry._BUILT_IN.items():
        assert registry._imported(name, line.module).__dict__[line.made_as].end_aware == is_end_aware(name)
    monkeypatch.setattr(registry, "import_module", broken)
    assert [is_end_aware(name) for name in ("raw", "int8", "kivi2", "q1", "q4")] == [False] * 3 + [True] * 2
    assert [is_end_aware(name) for name in ("near", "ending")] == [False, True]
    assert is_end_aware("broken") and is_end_aware("no-such-codec")  # nobody knows: the careful answer


def test_a_lossy_codec_needs_the_tables_that_it_was_used_with(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        name = "tiny-lossy"

        def load(self) -> type:
            return Halved

    monkeypatch.setattr(registry, "entry_points", lambda **_: [Point()])
    mine, other = Tables.parse(tables()), Tables.parse(tables(mask=1))
    chain = [codec("tiny-lossy", mine).step()]
    assert codec_of(chain, mine).step() == chain[0]
    with pytest.raises(CorruptObjectError, match="other tables"):
        codec_of(chain, other)
    with pytest.raises(NotDecodableError, match="kvass calibrate"):
        codec_of(chain)
    with pytest.raises(ConfigError, match="kvass calibrate"):
        codec("tiny-lossy")
    for changed in (chain * 2, [], [CodecStep("tiny-lossy", {"tables": mine.digest, "more": 1})]):
        with pytest.raises(CorruptObjectError):
            codec_of(changed, mine)
