"""A clock that moves only when a test moves it, forward or back."""


class ManualClock:
    """A `kvass.clock.Clock`."""

    def __init__(self, now: float = 1_700_000_000.0):
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time go by, or back."""
        self.now += seconds
