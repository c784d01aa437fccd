"""The prefix tree of both tiers against brute force: nearest child, superseding, deleting, reopening."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvass.chunks import MAX_TOKEN_ID, Tokens, as_tokens, common_prefix
from kvass.keys import address, next_key, split_address
from kvass.testing import strategies
from kvass.tiers.base import Tier, WriteItem
from kvass.tiers.directory import DirectoryTier
from kvass.tiers.memory import BytesBlob, MemoryTier

ROOT = bytes(range(32))
BUDGET = 64 << 20
KINDS = ("memory", "directory")

FEW = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])


@contextmanager
def made(kind: str, budget: int = BUDGET) -> Iterator[Tier]:
    """A tier of its own for one example."""
    path = Path(tempfile.mkdtemp(prefix="kvass-test-", dir="/dev/shm"))
    tier: Tier = MemoryTier(budget) if kind == "memory" else DirectoryTier(path, budget, name="tree")
    try:
        yield tier
    finally:
        tier.close()
        shutil.rmtree(path)


Node = tuple[tuple[int, ...], ...]
"""Where an object stands: the tokens of each chunk from the root on."""


class Tree:
    """What a tier must hold: nodes, each with the chunk before it."""

    def __init__(self) -> None:
        self.nodes: set[Node] = set()

    def children(self, node: Node) -> list[Node]:
        return [one for one in self.nodes if one[:-1] == node]

    def insert(self, node: Node) -> bool:
        """Add a node; siblings that it extends and that have no children go."""
        if node in self.nodes:
            return True
        if node[:-1] and node[:-1] not in self.nodes:
            return False
        for one in self.children(node[:-1]):
            if node[-1][: len(one[-1])] == one[-1] and not self.children(one):
                self.nodes.discard(one)
        self.nodes.add(node)
        return True

    def delete(self, node: Node) -> int:
        gone = [one for one in self.nodes if one[: len(node)] == node]
        self.nodes.difference_update(gone)
        return len(gone)

    def longest(self, parent: Node, query: Tokens) -> int:
        return max((common_prefix(as_tokens(one[-1]), query) for one in self.children(parent)), default=0)


def key_of(node: Node) -> bytes:
    key = ROOT
    for part in node:
        key = next_key(key, as_tokens(part).tobytes(), len(part))
    return key


def item_of(node: Node, group: int = 0) -> WriteItem:
    one = address(key_of(node), group)
    parent = address(key_of(node[:-1]), group) if node[:-1] else None
    position = sum(map(len, node[:-1]))
    tokens = as_tokens(node[-1]) if group == 0 else None
    return WriteItem(one, parent, ROOT, position, len(node[-1]), tokens, BytesBlob(one * 3))


def assert_nearest(tier: Tier, tree: Tree, parent: Node, query: Tokens) -> None:
    child = tier.nearest_child(address(key_of(parent), 0), query)
    best = tree.longest(parent, query)
    if child is None:
        assert best == 0
        return
    assert child.common == best
    named = [one for one in tree.children(parent) if address(key_of(one), 0) == child.address]
    assert len(named) == 1
    assert child.length == len(named[0][-1])
    assert common_prefix(as_tokens(named[0][-1]), query) == best


def assert_same(tier: Tier, tree: Tree) -> None:
    entries = {entry.address: entry for entry in tier.scan()}
    assert entries.keys() == {address(key_of(node), 0) for node in tree.nodes}
    assert tier.usage().objects == len(tree.nodes)
    for node in tree.nodes:
        entry = entries[address(key_of(node), 0)]
        assert (entry.length, entry.position) == (len(node[-1]), sum(map(len, node[:-1])))
        assert entry.parent == (address(key_of(node[:-1]), 0) if node[:-1] else None)


# -- texts that meet where rows of the index end ------------------------------------------------------

EDGE = (147, 148, 149, 295, 296, 297, 443, 444, 445, 592, 600)
lengths = st.one_of(st.sampled_from(EDGE), st.integers(1, 600), st.integers(1, 4))
alphabets = st.sampled_from([(0, 1), (0, MAX_TOKEN_ID), (MAX_TOKEN_ID - 1, MAX_TOKEN_ID), (255, 256), (0,)])


@st.composite
def beginnings(draw: st.DrawFn) -> list[Tokens]:
    """Texts that run along a common one up to a place near a row's end, and then go on with a few tokens."""
    alphabet = draw(alphabets)
    pattern = draw(st.lists(st.sampled_from(alphabet), min_size=1, max_size=5))
    stem = (pattern * 600)[:600]
    found = []
    for _ in range(draw(st.integers(1, 10))):
        shared = draw(lengths)
        tail = draw(st.lists(st.sampled_from(alphabet), max_size=3))
        found.append(as_tokens((stem[:shared] + tail)[:600]))
    return found


texts = st.one_of(beginnings(), strategies.related_tokens(count=10))


@pytest.mark.parametrize("kind", KINDS)
@FEW
@given(stored=texts, asked=texts, below=st.booleans())
@example([as_tokens([MAX_TOKEN_ID] * 148)], [as_tokens([MAX_TOKEN_ID] * 149)], False)
@example([as_tokens([0] * 148), as_tokens([0] * 296)], [as_tokens([0] * 600), as_tokens([0])], False)
@example([as_tokens([0] * 147 + [1]), as_tokens([0] * 149)], [as_tokens([0] * 148)], True)
def test_the_nearest_child_is_that_of_brute_force(
    kind: str, stored: list[Tokens], asked: list[Tokens], below: bool
) -> None:
    tree, above = Tree(), ((5, 6, 7),) if below else ()
    with made(kind) as tier:
        if below:
            tree.insert(above)
            assert tier.write([item_of(above)]) == [True]
        for tokens in stored:
            node = (*above, tuple(tokens.tolist()))
            tree.insert(node)
            assert tier.write([item_of(node)]) == [True]
        assert_same(tier, tree)
        for query in [*asked, *stored, *(one[: one.size // 2] for one in stored), as_tokens([])]:
            assert_nearest(tier, tree, above, query)
            assert_nearest(tier, tree, ((1,),), query)


@pytest.mark.parametrize("kind", KINDS)
@FEW
@given(stored=texts, data=st.data())
def test_what_was_deleted_is_found_no_more(kind: str, stored: list[Tokens], data: st.DataObject) -> None:
    tree = Tree()
    with made(kind) as tier:
        for tokens in stored:
            node = (tuple(tokens.tolist()),)
            tree.insert(node)
            tier.write([item_of(node)])
            if tree.nodes and data.draw(st.integers(0, 2)) == 0:
                victim = data.draw(st.sampled_from(sorted(tree.nodes)))
                assert tier.delete([address(key_of(victim), 0)]) == tree.delete(victim)
                assert_nearest(tier, tree, (), as_tokens(victim[-1]))
        assert_same(tier, tree)
        for query in stored:
            assert_nearest(tier, tree, (), query)


@FEW
@given(stored=texts, second=texts)
def test_both_tiers_answer_alike(stored: list[Tokens], second: list[Tokens]) -> None:
    tree = Tree()
    with made("memory") as one, made("directory") as other:
        for number, tokens in enumerate([*stored, *second]):
            ids = tuple(tokens.tolist())
            node: Node = (ids,) if number % 3 else (ids[:2], ids) if len(ids) > 2 else (ids,)
            expected = tree.insert(node)
            assert one.write([item_of(node)]) == other.write([item_of(node)]) == [expected]
        assert_same(one, tree)
        assert_same(other, tree)
        for query in [*stored, *second]:
            assert_nearest(one, tree, (), query)
            assert_nearest(other, tree, (), query)


# -- superseding --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@FEW
@given(data=st.data())
def test_a_tail_goes_exactly_when_something_extends_it(kind: str, data: st.DataObject) -> None:
    """Trees of several levels with objects of two groups; in one write or in several."""
    tree = Tree()
    with made(kind) as tier:
        for _ in range(data.draw(st.integers(1, 12))):
            above = data.draw(st.sampled_from([(), *sorted(tree.nodes)]))
            if len(above) > 3:
                above = ()
            length = data.draw(st.sampled_from([1, 2, 3, 147, 148, 149, 296]))
            node = (*above, (*[3] * (length - 1), data.draw(st.integers(3, 4))))
            before = set(tree.nodes)
            assert tree.insert(node)
            groups = [item_of(node), item_of(node, 1)]
            if data.draw(st.booleans()):
                assert tier.write(groups) == [True, True]
            else:
                assert [tier.write([item])[0] for item in groups] == [True, True]
            gone = before - tree.nodes
            for group in (0, 1):
                assert not any(tier.contains([address(key_of(one), group) for one in gone]))
                assert all(tier.contains([address(key_of(one), group) for one in tree.nodes]))
            assert tier.usage().objects == 2 * len(tree.nodes)
            assert {split_address(entry.address)[1] for entry in tier.scan()} == {0, 1}
        for top in [node for node in sorted(tree.nodes) if len(node) == 1]:
            assert tier.delete([address(key_of(top), 0)]) == 2 * tree.delete(top)
        assert tier.usage().objects == 0


@pytest.mark.parametrize("kind", KINDS)
@FEW
@given(stored=texts)
def test_one_write_of_all_is_as_one_write_of_each(kind: str, stored: list[Tokens]) -> None:
    nodes = list(dict.fromkeys((tuple(tokens.tolist()),) for tokens in stored))
    tree = Tree()
    for node in nodes:
        tree.insert(node)
    with made(kind) as tier:
        done = tier.write([item_of(node) for node in nodes])
        assert done == [node in tree.nodes for node in nodes]
        assert_same(tier, tree)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pinned_tail_stays_until_all_of_what_replaces_it_is_there(kind: str) -> None:
    """Room for one part of the longer tail, but not for the other: then the shorter one is still whole."""
    short: Node = ((1, 2),)
    long: Node = ((1, 2, 3),)
    blob = BytesBlob(bytes(16 << 10))
    with made(kind, 2 << 20) as tier:
        old = [item_of(short, group)._replace(blob=blob) for group in (0, 1)]
        new = [item_of(long, group)._replace(blob=blob) for group in (0, 1)]
        assert all(tier.write(old))
        tier.pin([item.address for item in old], 1e12)
        fillers = [item_of(((9, number),))._replace(blob=blob) for number in range(200)]
        placed = []
        for item in fillers:
            if not tier.write([item])[0]:
                break
            tier.pin([item.address], 1e12)
            placed.append(item)
        assert len(placed) < len(fillers)
        tier.delete([placed[-1].address])
        done = tier.write(new)
        assert all(done) or all(tier.contains([item.address for item in old]))
