"""What tests of tiers, codecs and caches need, ours and other people's: conformance suites, strategies, a clock.

Needs pytest and hypothesis: `pip install 'kvass[test]'`.
"""

import pytest

pytest.register_assert_rewrite("kvass.testing.tiers", "kvass.testing.codecs")
