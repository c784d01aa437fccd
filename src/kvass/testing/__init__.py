"""What tests of tiers, codecs and caches need: conformance suites, Hypothesis strategies, a clock.

Needs pytest and hypothesis: `pip install 'kvass[test]'`.
"""

import pytest

_SUITES = ("tiers", "local_tiers", "stores", "codecs")
pytest.register_assert_rewrite(*(f"kvass.testing.{name}" for name in _SUITES))
