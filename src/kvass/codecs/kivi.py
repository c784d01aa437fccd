"""Four or two bits an element, as in KIVI: keys by channel of 32 tokens, values by token of 32 channels."""

from kvass.codecs.fixed import FixedRate
from kvass.codecs.tables import Tables

GROUP = 32


class Kivi(FixedRate):
    """A grid costs a bit an element: 5 bits, or 3, in all."""

    key_group = GROUP
    value_group = GROUP

    def __init__(self, tables: Tables, bits: int):
        """`bits`: 4 or 2."""
        if bits not in (4, 2):
            raise ValueError(f"KIVI has 4 or 2 bits, not {bits}")
        super().__init__(tables)
        self.name = f"kivi{bits}"
        self.bits = bits
