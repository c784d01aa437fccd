"""Random tokens of the small models' vocabulary."""

import numpy as np

VOCABULARY = 160
WINDOW = 48


def tokens(seed: int, count: int) -> list[int]:
    """The same for the same seed."""
    return np.random.default_rng(seed).integers(0, VOCABULARY, count).tolist()
