"""Layer by layer out of a cache: what a whole load gives, each row verified, any doubt an error."""

import pytest

from fixtures.world import CHUNK, SLIDING, WINDOWED, kv, namespace, prompt, store
from kvass.errors import CorruptObjectError, TierError

SPACE = namespace()
SIZE = 5 * CHUNK + 7
MB = 1 << 20


def everything(layers, space, start, stop):
    """All rows, in an order that no file has them in."""
    found = {}
    for name in ("v", "k"):
        for layer in sorted(space.spec.places, reverse=True):
            found[layer, name] = layers.rows(layer, name, start, stop)
    return found


def right(found, tokens, space, start, stop):
    wanted = kv(tokens, space)
    for (layer, name), array in found.items():
        number, place = space.spec.places[layer]
        assert array.tobytes() == wanted.arrays(number, start, stop)[name][place].tobytes()
    return True


@pytest.mark.parametrize("codec", ["raw", "lossless"])
@pytest.mark.parametrize(
    ("start", "stop"), [(0, SIZE), (0, 1), (3, 40), (CHUNK, 2 * CHUNK), (SIZE - 1, SIZE)]
)
def test_rows_are_what_was_stored(make_cache, codec, start, stop) -> None:
    cache, tokens = make_cache(codecs={"host": codec}), prompt(1, SIZE)
    store(cache, tokens)
    with cache.layers(cache.lookup(tokens, SPACE)) as layers:
        assert right(everything(layers, SPACE, start, stop), tokens, SPACE, start, stop)


def test_a_part_of_a_longer_chunk_is_enough(make_cache) -> None:
    cache, tokens = make_cache(), prompt(1, SIZE)
    store(cache, tokens)
    with cache.layers(cache.lookup(tokens[: SIZE - 3], SPACE)) as layers:
        assert right(everything(layers, SPACE, 0, SIZE - 3), tokens, SPACE, 0, SIZE - 3)
        with pytest.raises(TierError):
            layers.rows(0, "k", 0, SIZE - 2)


def test_of_a_raw_object_no_more_is_read_than_is_asked_for(make_cache) -> None:
    cache, tokens = make_cache(), prompt(1, 2 * CHUNK)
    store(cache, tokens)
    with cache.layers(cache.lookup(tokens, SPACE)) as layers:
        array = layers.rows(1, "v", 0, 2 * CHUNK)
        assert layers.read == {"host": array.nbytes}


def test_what_a_window_has_passed_over_is_an_error(make_cache) -> None:
    space = namespace(WINDOWED)
    cache, tokens = make_cache(), prompt(1, SIZE)
    store(cache, tokens, space)
    with cache.layers(cache.lookup(tokens, space)) as layers:
        assert right(everything(layers, space, SIZE - 19, SIZE), tokens, space, SIZE - 19, SIZE)
        assert layers.rows(0, "k", 0, SIZE).size
        with pytest.raises(TierError, match="window"):
            layers.rows(2, "k", 0, SIZE)


def test_a_damaged_layer_is_an_error_and_no_other_is(make_cache) -> None:
    cache, tokens = make_cache(), prompt(1, CHUNK)
    store(cache, tokens)
    (path,) = (cache.tiers[0].path / "objects").glob("*/*")
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1  # the last array is v, its last layer 1
    path.write_bytes(raw)
    with cache.layers(cache.lookup(tokens, SPACE)) as layers:
        assert layers.rows(0, "v", 0, CHUNK).size
        assert layers.rows(1, "k", 0, CHUNK).size
        with pytest.raises(CorruptObjectError):
            layers.rows(1, "v", 0, CHUNK)
    cache.flush()
    assert cache.lookup(tokens, SPACE).length == 0  # quarantined


def test_objects_stay_readable_that_are_deleted_meanwhile(make_cache) -> None:
    cache, tokens = make_cache(), prompt(1, SIZE)
    store(cache, tokens)
    with cache.layers(cache.lookup(tokens, SPACE)) as layers:
        cache.forget(tokens, SPACE)
        assert right(everything(layers, SPACE, 0, SIZE), tokens, SPACE, 0, SIZE)


def test_an_object_of_another_text_is_not_opened(make_cache) -> None:
    cache = make_cache()
    one, other = prompt(1, CHUNK), prompt(2, CHUNK)
    store(cache, one)
    (path,) = (cache.tiers[0].path / "objects").glob("*/*")
    match = cache.lookup(one, SPACE)
    store(cache, other)
    (other_path,) = set((cache.tiers[0].path / "objects").glob("*/*")) - {path}
    path.write_bytes(other_path.read_bytes())
    with cache.layers(match) as layers:
        assert layers is None


def test_what_is_gone_or_not_asked_in_time_is_a_miss(make_cache) -> None:
    cache, tokens = make_cache(), prompt(1, SIZE)
    store(cache, tokens)
    match = cache.lookup(tokens, SPACE)
    with cache.layers(match, seconds=-1) as layers, pytest.raises(TierError, match="longer"):
        layers.rows(0, "k", 0, SIZE)
    with cache.layers(cache.lookup(prompt(2, 9), SPACE)) as layers:
        assert layers is None
    cache.forget(tokens, SPACE)
    with cache.layers(match) as layers:
        assert layers is None
    cache.close()
    with cache.layers(match) as layers:
        assert layers is None


def test_what_was_read_from_a_slower_tier_comes_up(make_cache) -> None:
    cache, tokens = make_cache(16 * MB, 16 * MB), prompt(1, SIZE)
    store(cache, tokens)
    addresses = [piece.address for piece in cache.lookup(tokens, SPACE).pieces()]
    cache.tiers[0].delete(addresses)
    with cache.layers(cache.lookup(tokens, SPACE)) as layers:
        assert right(everything(layers, SPACE, 0, SIZE), tokens, SPACE, 0, SIZE)
        assert set(layers.read) == {"disk"}
    cache.flush()
    assert all(cache.tiers[0].contains(addresses))


def test_a_group_of_windows_alone(make_cache) -> None:
    space = namespace(SLIDING)
    cache, tokens = make_cache(), prompt(1, SIZE)
    store(cache, tokens, space)
    with cache.layers(cache.lookup(tokens, space)) as layers:
        assert right(everything(layers, space, SIZE - 9, SIZE), tokens, space, SIZE - 9, SIZE)
