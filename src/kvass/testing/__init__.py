"""What tests of tiers, codecs and caches need: conformance suites, Hypothesis strategies, a clock.

Needs pytest and hypothesis: `pip install 'kvass[test]'`.
"""

import pytest

pytest.register_assert_rewrite("kvass.testing.tiers", "kvass.testing.codecs")
