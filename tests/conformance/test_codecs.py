"""Every codec passes the conformance suite."""

import pytest

from kvass.codecs.base import Codec
from kvass.codecs.raw import Raw
from kvass.codecs.registry import codec
from kvass.errors import ConfigError
from kvass.testing.codecs import CodecConformance


class TestRaw(CodecConformance):
    def make_codec(self) -> Codec:
        return Raw()


def test_a_codec_is_found_by_its_name() -> None:
    assert isinstance(codec("raw"), Raw)


def test_an_unknown_codec_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="raw"):
        codec("nonsense")
