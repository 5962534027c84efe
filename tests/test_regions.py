"""Laws of the paths and of the ordered rules over them."""

from __future__ import annotations

import doctest
import re

import flax.struct
import jax
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from nf_jax import regions

NAMES = st.text(alphabet="abc_0123456789", min_size=1, max_size=4)
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)


@flax.struct.dataclass
class Pair:
    first: object
    second: object


@jax.tree_util.register_pytree_node_class
class Unnamed:
    """A node whose children have no names, so JAX numbers them (FlattenedIndexKey)."""

    def tree_flatten(self):
        return (1.0, 2.0), None

    @classmethod
    def tree_unflatten(cls, aux_data, children):
        return cls()


def paths_of(tree) -> list[str]:
    return [path for path, _ in regions.leaves_with_paths(tree)[0]]


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"dense": {"kernel": 1, "bias": 2}}, ["dense/bias", "dense/kernel"]),
        ({"blocks": [{"w": 1}, {"w": 2}]}, ["blocks/0/w", "blocks/1/w"]),
        ({3: 1, 20: (2, 3)}, ["3", "20/0", "20/1"]),
        (Pair(1, {"x": 2}), ["first", "second/x"]),
        ([Unnamed()], ["0/0", "0/1"]),
        (1.0, [""]),
        ({}, []),
    ],
)
def test_paths_join_the_names_of_every_kind_of_key(tree, expected):
    assert paths_of(tree) == expected


def test_an_nnx_module_and_its_state_have_the_same_paths():
    class Net(nnx.Module):
        def __init__(self):
            self.blocks = nnx.List([nnx.Linear(2, 3, rngs=nnx.Rngs(0))])

    net = Net()
    expected = ["blocks/0/bias/value", "blocks/0/kernel/value"]
    assert paths_of(nnx.state(net, nnx.Param)) == expected
    assert paths_of(net) == expected


def test_a_key_of_an_unknown_type_is_spelled_as_its_str():
    assert regions.path_string((jax.tree_util.DictKey("a"), "custom")) == "a/custom"


def test_none_and_masked_nodes_hold_no_leaves():
    tree = {"a": None, "b": optax.MaskedNode(), "c": [None, 1], "d": {"e": optax.MaskedNode()}}
    assert regions.leaves_with_paths(tree)[0] == [("c/1", 1)]


def test_the_treedef_puts_every_leaf_back():
    tree = {"b": (1, None), "a": Pair(2, [3, optax.MaskedNode()])}
    leaves, treedef = regions.leaves_with_paths(tree)
    assert jax.tree_util.tree_unflatten(treedef, [leaf for _, leaf in leaves]) == tree


def test_leaves_that_read_alike_are_refused():
    with pytest.raises(ValueError, match=r"'a/b'.*contains '/'"):
        regions.leaves_with_paths({"a": {"b": 1}, "a/b": 2})


def test_the_first_matching_rule_wins():
    paths = ["head/kernel", "stem/norm/scale", "stem/kernel"]
    assert regions.assign_regions(paths, ["head/.*", ".*norm.*", ".*"]) == (0, 1, 2)
    assert regions.assign_regions(paths, [".*", "head/.*", ".*norm.*"]) == (0, 0, 0)


@pytest.mark.parametrize("pattern", ["head", "ead/kernel", "head/", "kernel", "head/kern"])
def test_a_rule_has_to_match_the_whole_path(pattern):
    with pytest.raises(ValueError, match=r"re\.fullmatch"):
        regions.assign_regions(["head/kernel"], [pattern])


def test_a_leaf_that_no_rule_matches_is_named_with_the_rules():
    with pytest.raises(ValueError) as error:
        regions.assign_regions(["head/kernel", "stem/kernel"], ["head/.*", "norm/.*"])
    message = str(error.value)
    assert "1 of 2 leaves" in message and "'stem/kernel'" in message
    assert "['head/.*', 'norm/.*']" in message and "'head/kernel'" not in message


def test_at_most_ten_unmatched_leaves_are_listed():
    with pytest.raises(ValueError) as error:
        regions.assign_regions([f"w{index:02}" for index in range(25)], ["head"])
    assert len(re.findall(r"'w\d\d'", str(error.value))) == 10
    assert "'w09' and 15 more" in str(error.value)


def test_a_broken_pattern_is_named():
    with pytest.raises(ValueError, match=r"pattern 1, got '\('"):
        regions.assign_regions(["a"], [".*", "("])


def test_no_leaves_need_no_rules():
    assert regions.assign_regions([], []) == ()


def test_rules_without_leaves_are_allowed_and_reported():
    paths, patterns = ["a/x", "b/x"], ["a/.*", "z/.*", ".*", "b/.*"]
    assert regions.assign_regions(paths, patterns) == (0, 2)
    # "b/.*" matches a leaf, but an earlier rule takes it.
    assert regions.unused_patterns(paths, patterns) == ("z/.*", "b/.*")


@given(st.lists(PATHS, unique=True, max_size=12), st.lists(PATHS, max_size=4))
def test_each_leaf_gets_the_lowest_rule_that_matches_it(paths, literals):
    patterns = [re.escape(literal) + ".*" for literal in literals] + [".*"]
    for path, region in zip(paths, regions.assign_regions(paths, patterns), strict=True):
        matching = [i for i, pattern in enumerate(patterns) if re.fullmatch(pattern, path)]
        assert region == min(matching)


def test_the_examples_in_the_docstrings_run():
    assert doctest.testmod(regions).failed == 0
