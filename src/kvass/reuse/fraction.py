"""How much of reused segments is computed anew: as much as takes no longer than loading them."""

from kvass.errors import InputError


def hidden_fraction(
    load_seconds: float, token_layer_seconds: float, reused: int, layers: int, *, floor: float, ceiling: float
) -> float:
    """The fraction of the layers of `reused` tokens that is computed in the seconds that loading them takes,
    no less than `floor`, which quality needs, and no more than `ceiling`, which the request allows.

    `load_seconds`: predicted; `token_layer_seconds`: what computing one layer of one token anew takes, as was
    learnt; 0 while it is not known: `ceiling` then, since a slow answer is better than a wrong one. `layers`:
    of the model.
    Raises InputError for a floor above the ceiling, and for figures that none of these can be.
    """
    if not 0 <= floor <= ceiling <= 1:
        raise InputError(f"a floor of {floor} and a ceiling of {ceiling} leave no fraction between 0 and 1")
    if not (load_seconds >= 0 and 0 <= token_layer_seconds < float("inf") and reused >= 0 and layers > 0):
        raise InputError(
            f"{load_seconds} s of loading, {token_layer_seconds} s a token and layer, {reused} tokens and "
            f"{layers} layers are not what loading and repairing take"
        )
    whole = token_layer_seconds * reused * layers
    return min(ceiling, max(floor, load_seconds / whole)) if whole else ceiling
