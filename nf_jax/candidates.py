"""Candidates: ways of travelling that a shadow run tries beside the exact one, and the leaves it watches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, Self

from pydantic import model_validator

from nf_jax import checks
from nf_jax.checks import Frozen
from nf_jax.profile import Codec, Route, to_route


class Candidate(Frozen):
    """A lossy route and its codec settings, with error feedback: without it, nothing builds up to be judged.

    Example:
      >>> Candidate.of("SIGN", scale="rank1").name
      'SIGN rank1 majority'
    """

    route: Annotated[Route, *checks.by_name(Route)]
    """BF16, SIGN or TERNARY."""
    codec: Codec = Codec()
    """How it is encoded."""

    @model_validator(mode="after")
    def _check_lossy(self) -> Self:
        if self.route == Route.FP32:
            raise ValueError("route: expected BF16, SIGN or TERNARY, got FP32, which loses nothing")
        for name in ("error_feedback", "server_error_feedback"):
            if not getattr(self.codec, name):
                raise ValueError(
                    f"codec.{name}: expected true, got false: what a stage leaves unsent would be lost, and "
                    "no step alone shows what that does to training"
                )
        return self

    @classmethod
    def of(cls, route: Route | str, **codec: Any) -> Self:
        """Return the candidate of a route; `codec`: fields of `Codec`."""
        return cls(route=to_route(route), codec=Codec(**codec))

    @property
    def name(self) -> str:
        """Route, scale and what comes back, in words; what else is not the default follows."""
        if self.route == Route.BF16:
            return "BF16"
        words = [self.route.name, self.codec.scale, self.codec.down]
        if self.route == Route.TERNARY and self.codec.gate != Codec().gate:
            words.append(f"gate {self.codec.gate:g}")
        if self.codec.residual_dtype != Codec().residual_dtype:
            words.append(f"{self.codec.residual_dtype} residuals")
        return " ".join(words)


class ShadowLeaves(NamedTuple):
    """What a shadow run watches: static, hashable Python data; n leaves in the order of the flattened tree.

    Attributes:
      num_workers: W, or (hosts, devices of a host).
      candidates: C of them.
      paths: n names.
      shapes, dtypes: of each leaf.
      regions: name of each leaf's region in the profile.
      order: positions of the leaves in backward order.
      lossy: n bools: whether the leaf can travel by candidates at all; the others stay exact.
      fp32_bytes: n, bytes that one worker sends of the leaf in a step in FP32.
      wire_bytes: `[C][n]`, the same by each candidate.
      fp32_seconds: n, predicted seconds of the leaf in FP32; empty: no substrate says.
      seconds: `[C][n]`, the same by each candidate, or empty.
    """

    num_workers: int | tuple[int, int]
    candidates: tuple[Candidate, ...]
    paths: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    regions: tuple[str, ...]
    order: tuple[int, ...]
    lossy: tuple[bool, ...]
    fp32_bytes: tuple[int, ...]
    wire_bytes: tuple[tuple[int, ...], ...]
    fp32_seconds: tuple[float, ...] = ()
    seconds: tuple[tuple[float, ...], ...] = ()


DEFAULT_CANDIDATES: tuple[Candidate, ...] = (
    Candidate.of(Route.BF16),
    Candidate.of(Route.SIGN, scale="leaf"),
    Candidate.of(Route.SIGN, scale="rank1"),
    Candidate.of(Route.SIGN, down="count"),
    Candidate.of(Route.TERNARY),
)
"""What `shadow=True` tries: half the bytes, one scale a leaf, one a row and column, exact counts, a gate."""


def to_candidates(shadow: bool | Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The candidates that `shadow` asks for: none, the default ones, or those given.

    Raises:
      ValueError: something else, an empty sequence, or two candidates of one name.
    """
    if isinstance(shadow, bool):
        return DEFAULT_CANDIDATES if shadow else ()
    given = tuple(shadow) if isinstance(shadow, Sequence) else ()
    if not given or not all(isinstance(candidate, Candidate) for candidate in given):
        raise ValueError(
            "shadow: expected True, False or a sequence of nf_jax.Candidate, at least one, "
            f"got {checks.show(shadow)}"
        )
    names = [candidate.name for candidate in given]
    if len(set(names)) != len(names):
        raise ValueError(f"shadow: expected candidates of different names, got {names}")
    return given
