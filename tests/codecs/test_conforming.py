"""Every codec that needs numba passes the conformance suite."""

from hypothesis import strategies as st
from kv_like import POSITIONS, tables_of

from kvass.codecs.base import Codec
from kvass.codecs.registry import codec
from kvass.spec import LayerGroup
from kvass.testing import strategies
from kvass.testing.codecs import CodecConformance


class TestLossless(CodecConformance):
    def make_codec(self) -> Codec:
        return codec("lossless")


class FixedRate(CodecConformance):
    """Tables that rotate four channels, and heads that have as many."""

    name: str
    positions = POSITIONS

    def make_codec(self) -> Codec:
        return codec(self.name, tables_of(4))

    def groups(self) -> st.SearchStrategy[LayerGroup]:
        return strategies.layer_groups().filter(lambda group: group.head_dim >= 4)


class TestInt8(FixedRate):
    name = "int8"


class TestKivi4(FixedRate):
    name = "kivi4"


class TestKivi2(FixedRate):
    name = "kivi2"
