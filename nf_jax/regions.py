"""From a parameter tree to a region per leaf: readable paths and ordered rules over them."""

from __future__ import annotations

import collections
import re
import time
from collections.abc import Hashable, Sequence
from typing import Any

from jax import tree_util

from nf_jax import patterns as regexes

# An error lists at most this many leaves: a wrong rule on a large model misses thousands.
_MAX_LISTED = 10
_MAX_SECONDS = 60


def path_string(key_path: Sequence[Hashable]) -> str:
    """Joins the keys that lead to one leaf into a name such as ``"block_2/conv/kernel"``.

    Use it wherever a leaf is named for people or matched by a rule, so that a tree of dicts,
    a dataclass and an nnx state are all spelled alike. An nnx state keeps the attribute that
    holds the array: ``"head/kernel/value"``. The path of a tree that is one leaf is ``""``.

    Args:
      key_path: keys from the root to the leaf, as ``jax.tree_util`` gives them. A key of a type
        that JAX does not define is spelled as its ``str``.

    Returns:
      The names, attributes and indices, joined with ``/``.

    Example:
      >>> import jax
      >>> path_string((jax.tree_util.DictKey("blocks"), jax.tree_util.SequenceKey(0)))
      'blocks/0'
    """
    return "/".join(_key_name(key) for key in key_path)


def _key_name(key: Hashable) -> str:
    match key:
        case tree_util.DictKey() | tree_util.FlattenedIndexKey():
            return str(key.key)
        case tree_util.GetAttrKey():
            return key.name
        case tree_util.SequenceKey():
            return str(key.idx)
        case _:
            return str(key)


def leaves_with_paths(tree: Any) -> tuple[list[tuple[str, Any]], Any]:
    """Flattens a tree into named leaves, in JAX's own order (which sorts the keys of a dict).

    Use it once per tree: everything later in the package speaks of leaves by their position in
    this list. ``None`` and ``optax.MaskedNode`` hold no leaves, so they do not appear.

    Args:
      tree: any pytree; the leaves may have any type.

    Returns:
      The ``(path, leaf)`` pairs, and the ``PyTreeDef`` that puts the leaves back.

    Raises:
      ValueError: two leaves have the same path, which happens when a key contains ``/``.

    Example:
      >>> leaves_with_paths({"dense": {"kernel": 1, "bias": 2}, "unused": None})[0]
      [('dense/bias', 2), ('dense/kernel', 1)]
    """
    keyed_leaves, treedef = tree_util.tree_flatten_with_path(tree)
    leaves = [(path_string(key_path), leaf) for key_path, leaf in keyed_leaves]
    counts = collections.Counter(path for path, _ in leaves)
    repeated = [path for path, count in counts.items() if count > 1]
    if repeated:
        raise ValueError(
            f"expected a different path for every leaf of the tree, but {len(repeated)} path(s) "
            f"name several leaves: {quote_paths(repeated)}. A key that contains '/' reads like "
            "nested keys; rename that key."
        )
    return leaves, treedef


def assign_regions(paths: Sequence[str], patterns: Sequence[str]) -> tuple[int, ...]:
    """Finds the region of every leaf: the first rule that matches its whole path.

    Use it at trace time, with the patterns of a profile's regions in their order. A pattern has
    to match the path from end to end (``re.fullmatch``): ``head`` is only the leaf ``head``,
    ``head/.*`` is all that lies under it, ``.*`` is everything that earlier rules left over.

    Args:
      paths: one ``/``-joined path per leaf.
      patterns: one regular expression per region; earlier ones win.

    Returns:
      For every leaf, the index of its region in ``patterns``.

    Raises:
      ValueError: a pattern is not a regular expression, a path is too long for it, or a leaf matches no
        pattern.

    Example:
      >>> assign_regions(["head/kernel", "stem/kernel"], ["head/.*", ".*"])
      (0, 1)
    """
    rules = [_compile(index, pattern) for index, pattern in enumerate(patterns)]
    _check_lengths(paths, patterns)
    regions = _match_all(paths, rules)
    unmatched = [path for path, region in zip(paths, regions, strict=True) if region is None]
    if unmatched:
        raise ValueError(
            f"expected every leaf to match a region's pattern, but {len(unmatched)} of "
            f"{len(paths)} leaves match none: {quote_paths(unmatched)}. The rules, in order: "
            f"{list(patterns)}. A pattern has to match the whole '/'-joined path (re.fullmatch): "
            "write 'head/.*' for what lies under 'head', and end with '.*' to catch the rest."
        )
    return tuple(region for region in regions if region is not None)


def quote_paths(paths: Sequence[str]) -> str:
    """Spells paths for an error message: at most 10, then how many more there are.

    Example:
      >>> quote_paths(["head/bias", "head/kernel"])
      "'head/bias', 'head/kernel'"
    """
    more = len(paths) - _MAX_LISTED
    listed = ", ".join(repr(path) for path in paths[:_MAX_LISTED])
    return f"{listed} and {more} more" if more > 0 else listed


def unused_patterns(paths: Sequence[str], patterns: Sequence[str]) -> tuple[str, ...]:
    """Lists the rules that no leaf ends up with.

    Use it to warn: such a rule is allowed, because one profile may serve several models, but it
    is often a spelling mistake or a rule that comes after a wider one.

    Args:
      paths: one ``/``-joined path per leaf.
      patterns: one regular expression per region; earlier ones win.

    Returns:
      The unused patterns, in their order.

    Raises:
      ValueError: as ``assign_regions``.

    Example:
      >>> unused_patterns(["head/kernel"], [".*", "head/.*"])
      ('head/.*',)
    """
    used = set(assign_regions(paths, patterns))
    return tuple(pattern for index, pattern in enumerate(patterns) if index not in used)


def _compile(index: int, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"expected a regular expression as pattern {index}, got {pattern!r}: {error}. "
            "Escape characters that are meant literally with a backslash."
        ) from None


def _check_lengths(paths: Sequence[str], patterns: Sequence[str]) -> None:
    """Raises where matching the longest path might take long: `re` tries every way before it gives up."""
    longest = max(paths, key=len, default="")
    for index, pattern in enumerate(patterns):
        try:
            tries = regexes.num_tries(regexes.shape_of(pattern), len(longest))
        except ValueError as error:
            raise ValueError(
                f"pattern {index}, {pattern!r}: expected one that cannot backtrack: {error}"
            ) from None
        if tries > regexes.MAX_TRIES:
            raise ValueError(
                f"pattern {index}, {pattern!r}: expected fewer repeats and choices, or shorter paths: on "
                f"{longest[:100]!r}, of {len(longest)} characters, it might try {tries:.1e} ways to match"
            )


def _match_all(paths: Sequence[str], rules: Sequence[re.Pattern[str]]) -> list[int | None]:
    start, found = time.process_time(), []
    for path in paths:
        found.append(_first_match(path, rules))
        if time.process_time() - start > _MAX_SECONDS:
            raise ValueError(
                f"expected all {len(paths)} paths to match in {_MAX_SECONDS} s, got to {path!r}; write "
                "patterns with fewer repeats and choices"
            )
    return found


def _first_match(path: str, rules: Sequence[re.Pattern[str]]) -> int | None:
    return next((index for index, rule in enumerate(rules) if rule.fullmatch(path)), None)
