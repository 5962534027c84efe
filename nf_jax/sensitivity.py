"""Sensitivity: from a shadow trace to regions by type and depth, each with the cheapest route that is safe.

Leaves are grouped by what they are (the table `KINDS`), kernels by where they stand: the first one, and the
others by thirds of depth. A candidate is safe for a group if it is safe for every leaf of it; the group then
takes the cheapest one that is, and FP32 where none is. A group that a wrong rule put together is judged by
its own numbers all the same, so a rule can cost bytes, never safety.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import Field

from nf_jax import patterns as regexes
from nf_jax.buckets import natural_key
from nf_jax.candidates import ShadowLeaves
from nf_jax.checks import Frozen, PositiveLimit, Steps
from nf_jax.profile import Region, Route
from nf_jax.regions import assign_regions
from nf_jax.shadow_trace import ShadowTrace

# --------------------------------------------------------------------------------------------- judgment

Share = Annotated[float, Field(ge=0, le=1)]


class Thresholds(Frozen):
    """When a candidate counts as safe for a leaf, by a quantile over time of what a shadow run measured.

    The defaults lie between what was seen to hold and what was seen to cost. Handwritten digits, MLP, 8
    workers, 20 steps of warm-up, 3 seeds; all but the last line send the two hidden kernels only:

        candidate             residual   error   cosine   test loss   accuracy
        FP32                                                0.0595      98.39
        BF16                      0.00    0.00     1.00     0.0595      98.39
        TERNARY auto majority      2.5     1.2     0.38     0.0617      98.22
        SIGN auto count            3.6     1.3     0.36     0.0604      98.22
        SIGN rank1 majority        3.6     1.5     0.22     0.0627      98.22
        SIGN leaf majority         7.7     1.9     0.12     0.0805      97.61
        the same, all kernels      7.7     1.9     0.09     0.0966      97.27

    On a Transformer (prose, 4 workers, Adam) usual residual ratios of 1.7 went with a test loss 0.7 to 2.2 %
    above FP32's, ratios from 6.6 on with 2 to 7 %. So the thresholds are a first guess for other jobs.
    """

    max_residual_ratio: PositiveLimit = 4.0
    """Largest residual norm over the mean gradient's, ratio."""
    max_relative_error: PositiveLimit = 2.0
    """Largest error of a step's mean over its norm, ratio."""
    min_cosine: Share = 0.15
    """Least cosine to the true mean."""
    quantile: Annotated[float, Field(gt=0, le=1)] = 0.75
    """Share of the steps that have to keep to these: gradients that happen to be small are outliers."""
    warmup_steps: Steps = 20
    """Steps at the start that are not judged; train them in FP32 (a profile's `health.warmup_steps`)."""


MIN_STEPS = 5  # of a trace, beyond its warm-up, for a quantile to mean anything


class Judgment(NamedTuple):
    """What a shadow trace says of C candidates and m leaves, beyond the warm-up.

    Attributes:
      safe: `bool[C, m]`; True for leaves that only travel exactly.
      cosine, relative_error, sign_agreement, residual_ratio: `f32[C, m]`, the quantile of each that is
        judged: the low one of what should be large, the high one of what should be small.
    """

    safe: np.ndarray
    cosine: np.ndarray
    relative_error: np.ndarray
    sign_agreement: np.ndarray
    residual_ratio: np.ndarray


def judge(trace: ShadowTrace, thresholds: Thresholds | None = None) -> Judgment:
    """Judges every candidate on every leaf.

    Raises:
      ValueError: too few finite steps beyond the warm-up.
    """
    limits, info = thresholds or Thresholds(), trace.info
    used = (np.asarray(info.step) >= limits.warmup_steps) & ~np.isnan(info.cosine).any((1, 2))
    if used.sum() < MIN_STEPS:
        raise ValueError(
            f"expected a shadow trace of at least {MIN_STEPS} finite steps from step {limits.warmup_steps} "
            f"on, got {used.sum()}: run longer, write more often (every=), or lower warmup_steps"
        )
    high = lambda values: _quantile(np.asarray(values)[used], limits.quantile)  # noqa: E731
    low = lambda values: -high(-np.asarray(values))  # noqa: E731
    found = Judgment(
        safe=np.zeros(()),
        cosine=low(info.cosine),
        relative_error=high(info.relative_error),
        sign_agreement=low(info.sign_agreement),
        residual_ratio=high(info.residual_ratio),
    )
    safe = (
        (found.residual_ratio <= limits.max_residual_ratio)
        & (found.relative_error <= limits.max_relative_error)
        & (found.cosine >= limits.min_cosine)
    )
    return found._replace(safe=safe | ~np.asarray(trace.leaves.lossy))


def _quantile(values: np.ndarray, share: float) -> np.ndarray:
    """The least value that `share` of the steps do not exceed: a value that occurred, infinite ones too."""
    return np.sort(values, axis=0)[int(np.ceil(share * len(values))) - 1]


# --------------------------------------------------------------------------------------------- grouping

_END = "(?:/value)?"  # nnx names the array of a parameter `value`
KINDS: dict[str, tuple[str, ...]] = {
    "head": (r"(?:.*[/_])?(?:heads?|classifier|logits|unembed)(?:_\d)?/.*",),
    "norm": (
        r".*[Nn]orm[^/]*/.*",
        r"(?:.*/)?(?:ln|bn|gn)_?\d?(?:_f)?/.*",
        r"(?:.*/)?(?:scale|gamma)" + _END,
    ),
    "embedding": (r".*(?:[Ee]mbed|pos_emb|wte|wpe).*",),
    "bias": (r"(?:.*/)?(?:bias|beta|b)" + _END,),
}
"""What a leaf is, by its whole path; the first that matches. Where nothing is called a head, it is the module
of the last matrix in the order of definition (behind convolutions, the last that is none)."""
_FIRST = "first"  # the kernel defined first, with what lies beside it
_VECTOR = "vector"  # other leaves of one dimension or none
_THIRDS = ("early", "middle", "late")
_MAX_PATTERN, _MAX_FOLDED = 500, 50  # characters, by the profile's own rule; numbers in one alternation


class Part(NamedTuple):
    """Leaves that are judged together, and the rules that find them (in order, after all earlier parts')."""

    name: str
    patterns: tuple[str, ...]
    leaves: tuple[int, ...]


def parts_of(leaves: ShadowLeaves) -> tuple[Part, ...]:
    """Groups leaves by type and depth; the last part's rule takes whatever else there is."""
    kinds = _kinds_of(leaves)
    parts: list[Part] = []
    for name in (*KINDS, _VECTOR, _FIRST, *_THIRDS):
        members = tuple(i for i, kind in enumerate(kinds) if kind == name)
        if members:
            parts.append(Part(name, _patterns(name, members, leaves, parts), members))
    parts[-1] = parts[-1]._replace(patterns=(*parts[-1].patterns[:-1], ".*"))
    return tuple(parts)


def _kinds_of(leaves: ShadowLeaves) -> list[str]:
    """The kind of every leaf."""
    rules = [(name, pattern) for name, patterns in KINDS.items() for pattern in patterns] + [("", ".*")]
    found = assign_regions(leaves.paths, [pattern for _, pattern in rules])
    kinds = [rules[i][0] for i in found]
    defined = [i for i in reversed(leaves.order) if i < len(kinds)]
    kernels = [i for i in defined if not kinds[i] and len(leaves.shapes[i]) > 1]
    if "head" not in kinds and len(kernels) > 1:
        flat = [i for i in kernels if len(leaves.shapes[i]) == 2]
        last = _module(leaves.paths[(flat or kernels)[-1]])
        kinds = ["head" if _module(p) == last else kind for p, kind in zip(leaves.paths, kinds, strict=True)]
        kernels = [i for i in kernels if kinds[i] != "head"]
    units = list(dict.fromkeys(_unit(leaves.paths[i]) for i in kernels))
    for i in range(len(kinds)):
        kinds[i] = kinds[i] or _VECTOR
    for i in kernels:
        place = units.index(_unit(leaves.paths[i]))
        kinds[i] = _FIRST if place == 0 and len(units) > 1 else _third(place - 1, len(units) - 1)
    return kinds


def _third(place: int, num: int) -> str:
    return _THIRDS[(2 * max(place, 0) + 1) * 3 // (2 * max(num, 1))]


def _module(path: str) -> str:
    """All but the parameter's own name."""
    return path.removesuffix("/value").rpartition("/")[0]


def _unit(path: str) -> str:
    """The module down to its last number: `block_3` of `block_3/attention/query/kernel`."""
    names = _module(path).split("/")
    numbered = [i for i, name in enumerate(names) if re.search(r"\d", name)]
    return "/".join(names[: numbered[-1] + 1] if numbered else names)


def _patterns(
    name: str, members: Sequence[int], leaves: ShadowLeaves, before: Sequence[Part]
) -> tuple[str, ...]:
    """Rules for these leaves, the shortest kind that finds them and, after earlier parts', no others."""
    paths, longest = [leaves.paths[i] for i in members], max(map(len, leaves.paths))
    earlier = [pattern for part in before for pattern in part.patterns]
    spellings: list[Callable[[], Sequence[str]]] = [
        lambda: KINDS[name],
        lambda: _alternatives({_unit(path) for path in paths}, "/.*", longest),
        lambda: _alternatives(set(paths), "", longest),
    ]
    for spell in spellings[0 if name in KINDS else 1 :]:
        own = spell()
        found = assign_regions(leaves.paths, [*earlier, *own, ".*"])
        used = {rule - len(earlier): i for i, rule in enumerate(found) if rule >= len(earlier)}
        chosen = {i for i, rule in enumerate(found) if 0 <= rule - len(earlier) < len(own)}
        if chosen == set(members):
            return tuple(pattern for number, pattern in enumerate(own) if number in used)
    raise AssertionError(f"no rule for {paths}")


def _alternatives(names: set[str], ending: str, longest: int) -> list[str]:
    """Regular expressions for any of these names, each within what a profile allows."""
    folded: dict[tuple[str, str], list[str]] = {}
    for name in sorted(names, key=natural_key):
        before, number, after = re.fullmatch(r"(.*?)(\d*)(\D*)", name, re.DOTALL).groups()  # type: ignore[union-attr] (matches anything)
        folded.setdefault((before, after), []).append(number)
    chunks: list[list[str]] = [[]]
    for (before, after), numbers in folded.items():
        for start in range(0, len(numbers), _MAX_FOLDED):
            some = numbers[start : start + _MAX_FOLDED]
            middle = some[0] if len(some) == 1 else f"(?:{'|'.join(some)})"
            spelled = f"{re.escape(before)}{middle}{re.escape(after)}"
            if chunks[-1] and not _fits(_either([*chunks[-1], spelled], ending), longest):
                chunks.append([])
            chunks[-1].append(spelled)
    return [_either(chunk, ending) for chunk in chunks]


def _either(spelled: Sequence[str], ending: str) -> str:
    return spelled[0] + ending if len(spelled) == 1 else f"(?:{'|'.join(spelled)}){ending}"


def _fits(pattern: str, longest: int) -> bool:
    try:
        tries = regexes.num_tries(regexes.shape_of(pattern), longest)
    except ValueError:
        return False
    return len(pattern) <= _MAX_PATTERN and tries <= regexes.MAX_TRIES


# ------------------------------------------------------------------------------------------- suggestion


class Choice(NamedTuple):
    """What a part should travel by.

    Attributes:
      part: the leaves.
      candidate: position of the cheapest safe candidate; None: FP32.
      num_lossy: how many of its leaves candidates can send at all.
    """

    part: Part
    candidate: int | None
    num_lossy: int


def choose(trace: ShadowTrace, thresholds: Thresholds | None = None) -> tuple[Choice, ...]:
    """The cheapest safe candidate of every part: by predicted seconds where a substrate gave some, else by
    bytes; one that is no cheaper than FP32 is none."""
    safe, leaves = judge(trace, thresholds).safe, trace.leaves
    own = np.asarray(leaves.seconds or leaves.wire_bytes, float)
    fp32 = np.asarray(leaves.fp32_seconds or leaves.fp32_bytes, float)
    choices = []
    for part in parts_of(leaves):
        members = list(part.leaves)
        lossy = [i for i in members if leaves.lossy[i]]
        costs = own[:, members].sum(1)
        allowed = safe[:, lossy].all(1) & (costs < fp32[members].sum()) & bool(lossy)
        best = int(np.argmin(np.where(allowed, costs, np.inf)))
        choices.append(Choice(part, best if allowed.any() else None, len(lossy)))
    return tuple(choices)


def suggest_regions(
    trace: ShadowTrace, thresholds: Thresholds | None = None
) -> tuple[tuple[Region, ...], dict[str, Route]]:
    """Regions by type and depth, and for each the cheapest route that a shadow run found safe, else FP32.

    Args:
      trace: of `read_shadow`.
      thresholds: what safe means; the defaults of `Thresholds` otherwise.

    Returns:
      Ordered regions with their codecs, for `Profile.regions`, and a route by region name, for a phase's
      `routes`. Every leaf of the trace matches one; the last takes what else a model may have.

    Raises:
      ValueError: the trace is too short to judge.
    """
    regions, routes = [], {}
    for part, candidate, _ in choose(trace, thresholds):
        for number, pattern in enumerate(part.patterns, start=1):
            name = part.name if number == 1 else f"{part.name}_{number}"
            if candidate is None:
                regions.append(Region(name=name, pattern=pattern))
                routes[name] = Route.FP32
            else:
                tried = trace.leaves.candidates[candidate]
                regions.append(Region(name=name, pattern=pattern, codec=tried.codec))
                routes[name] = tried.route
    return tuple(regions), routes
