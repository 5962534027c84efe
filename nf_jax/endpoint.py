"""An endpoint reducer: one place that adds up what all workers send, and how long one step takes there.

A parameter-server node, a switch or a unit beside memory: workers stream lanes to it, it adds FP32 numbers or
counts signs, and sends every worker the result. It has a rate in, a rate out, a rate at which it adds, and a
pool of aggregation slots. `simulate` is one step as a fluid queue; it takes and returns numbers that may be
traced, so that replay runs it inside `lax.scan`.

Sources: slots and the window they make, SwitchML (arXiv 1903.06701); a server that sums compressed gradients
without decompressing them, THC (arXiv 2302.08545); what compression saves is volume, never latency, 1-bit
Adam (arXiv 2102.02888); packing is part of the price, "On the Utility of Gradient Compression" (arXiv
2103.00543): that part is the substrate's, not the endpoint's.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array as JaxArray
from jax import lax
from pydantic import Field

from nf_jax import checks

Array = JaxArray | np.ndarray

Rate = Annotated[float, Field(ge=0, le=1e30)]


class Endpoint(checks.File):
    """What an endpoint reducer can take, as a TOML file; rates are decimal (1e9 bytes are 8 Gbit).

    A rate of 0 is one that never finishes: a lane that needs it takes infinitely long, so it is refused.

    Example:
      >>> Endpoint(name="switch").max_workers
      255
    """

    name: checks.Text = "endpoint"
    """Name for people."""
    ingress_bytes_per_second: Rate = 12.5e9
    """What it receives from all workers together, bytes/s."""
    egress_bytes_per_second: Rate = 12.5e9
    """What it sends to all workers together, bytes/s; a multicast counts once for every worker."""
    link_bytes_per_second: Rate = 1.25e9
    """A worker's own link, each way, bytes/s."""
    fp32_elements_per_second: Rate | None = None
    """FP32 elements that it adds (every worker's counts), elements/s; None: FP32 lanes do not pass
    it, workers average them among themselves by a ring."""
    vote_elements_per_second: Rate = 8e9
    """Sign votes that it counts (every worker's counts), elements/s."""
    slots: checks.PositiveSize = 512
    """Aggregation slots that one step may use, count."""
    slot_bytes: checks.PositiveSize = 1024
    """Accumulators of a slot, bytes: slot_bytes / 4 FP32 sums, or 8 slot_bytes / count_bits counters."""
    count_bits: Annotated[int, Field(ge=1, le=32)] = 8
    """Width of a sign counter in a slot, bits; it holds up to 2**count_bits - 1 workers."""
    round_trip_seconds: Annotated[float, Field(ge=0, le=1e9)] = 20e-6
    """From a packet's first byte to its result, without queueing, seconds; a slot is taken that long."""
    queue_bytes: checks.PositiveSize = 16 * 2**20
    """Its buffer for what has arrived and is not added yet, bytes."""
    background_load: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of its service that others take, 0 to 1."""

    @property
    def max_workers(self) -> int:
        """The most workers whose votes a counter can hold."""
        return 2**self.count_bits - 1


class Rates(NamedTuple):
    """An `Endpoint` as numbers, `f32[]` each, so that a sweep over them compiles nothing anew.

    Attributes:
      ingress, egress, link: bytes/s.
      fp32, votes: seconds of service for an element of one worker, the background's share included.
      fp32_window, vote_window: elements that a worker may have under way at once.
      round_trip: seconds.
      queue_bytes: bytes.
      background: 0 to 1.
    """

    ingress: Array
    egress: Array
    link: Array
    fp32: Array
    votes: Array
    fp32_window: Array
    vote_window: Array
    round_trip: Array
    queue_bytes: Array
    background: Array


class Work(NamedTuple):
    """What lanes bring to the endpoint in one step, in the order in which they leave; `f32[..., L]` each.

    Attributes:
      up_bytes: bytes that one worker sends; 0 for a lane that does not pass the endpoint.
      down_bytes: bytes that it gets back.
      fp32_adds: FP32 elements that one worker contributes.
      votes: sign votes that one worker contributes (a ternary element has two).
    """

    up_bytes: Array
    down_bytes: Array
    fp32_adds: Array
    votes: Array


class Load(NamedTuple):
    """What one step does to the endpoint; `f32[]` each.

    Attributes:
      seconds: from the first byte sent to the last result received; infinite where a rate is 0.
      busy_seconds: in which it adds for this step.
      queue_bytes: the most that has arrived and is not added yet.
      in_bytes, out_bytes: of all workers together.
      load: what `reducer_load` reports; 1 is full.
    """

    seconds: Array
    busy_seconds: Array
    queue_bytes: Array
    in_bytes: Array
    out_bytes: Array
    load: Array


def rates(endpoint: Endpoint) -> Rates:
    """The endpoint's numbers for `simulate`."""
    free = 1 - endpoint.background_load
    fp32 = endpoint.fp32_elements_per_second
    slot_bits = 8 * endpoint.slot_bytes
    return Rates(
        ingress=_f32(endpoint.ingress_bytes_per_second),
        egress=_f32(endpoint.egress_bytes_per_second),
        link=_f32(endpoint.link_bytes_per_second),
        fp32=_f32(_inverse(free * (0.0 if fp32 is None else fp32))),
        votes=_f32(_inverse(free * endpoint.vote_elements_per_second)),
        fp32_window=_f32(endpoint.slots * (slot_bits // 32)),
        vote_window=_f32(endpoint.slots * (slot_bits // endpoint.count_bits)),
        round_trip=_f32(endpoint.round_trip_seconds),
        queue_bytes=_f32(endpoint.queue_bytes),
        background=_f32(endpoint.background_load),
    )


def simulate(rates: Rates, work: Work, num_workers: Array, rest_seconds: Array) -> Load:
    """One synchronous step at the endpoint: a fluid queue that serves lanes in the order given.

    All gradients exist at time 0 and workers move in step. Lane l takes, on its own,

        arriving  a = max(up / link, W up / ingress, (adds / fp32_window + votes / vote_window) round_trip)
        service   s = W (adds / fp32 rate + votes / vote rate) / (1 - background)
        leaving   d = max(down / link, W down / egress)

    The third term of `a` is SwitchML's window: a slot is free again one round trip after it was taken, so a
    worker cannot stream faster than slots per round trip. With A, S, D the sums of a, s, d over lanes 1..l
    (0 at l = 0), the last byte of lane l has arrived at A, is added at T and has left at U:

        T_l = S_l + max_{k <= l} (A_k - S_k)        U_l = D_l + max_{k <= l} (T_k - D_k)        (k from 0)

    That is the FIFO recursion `finish = S_l + max (arrive_k - S_{k-1})` for packets that become small: lanes
    are streamed, not stored whole, so stages overlap. Within a lane all three curves are straight or convex,
    so the maxima lie at lanes' ends and the formula is exact. The step takes U_L and one round trip.

    The queue has two bounds, and the smaller holds: what arrives faster than it is served, looked at when a
    lane has arrived or is done, and what the slots let workers have under way.

    Args:
      rates: the endpoint's numbers.
      work: of every lane by its route, in the order in which they leave, `f32[L]` each.
      num_workers: `f32[]`, W.
      rest_seconds: `f32[]`, what else a step takes (compute): the endpoint idles then.

    Returns:
      The `Load`; its `load` is the larger of the busy share over the whole step, the background's included,
      and of the queue's peak over the buffer.
    """
    stages = stage_seconds(rates, work, num_workers)
    up, down = num_workers * work.up_bytes, num_workers * work.down_bytes

    # Where a rate is 0 nothing ends; the formulas run on finite numbers all the same.
    stuck = ~jnp.isfinite(sum(jnp.sum(stage) for stage in stages))
    finite = [jnp.where(jnp.isfinite(stage), stage, np.float32(0)) for stage in stages]
    a, s, d = (_from_zero(jnp.cumsum(x)) for x in finite)
    added = s + _running_max(a - s)
    left = d + _running_max(added - d)
    peak = _queue_peak(up, finite[0], finite[1], a, added)
    passes = jnp.any(up > 0)

    seconds = jnp.where(passes, left[-1] + rates.round_trip, np.float32(0))
    seconds, busy = (jnp.where(stuck, np.float32(np.inf), x) for x in (seconds, s[-1]))
    window = _windows(rates, work)
    under_way = num_workers * jnp.max(jnp.where(window > 0, work.up_bytes / window, np.float32(0)))
    queue = jnp.minimum(jnp.where(stuck, jnp.sum(up), peak), under_way)
    share = jnp.where(busy > 0, busy / (seconds + rest_seconds), np.float32(0))
    share = jnp.where(stuck, np.float32(1), rates.background + (1 - rates.background) * share)
    load = jnp.maximum(share, queue / rates.queue_bytes)
    return Load(seconds, busy, queue, jnp.sum(up), jnp.sum(down), load)


def stage_seconds(rates: Rates, work: Work, num_workers: Array) -> tuple[Array, Array, Array]:
    """How long every lane takes to arrive, to be added and to leave, on its own: `simulate`'s a, s and d."""
    up, down = num_workers * work.up_bytes, num_workers * work.down_bytes
    arriving = jnp.maximum(_over(work.up_bytes, rates.link), _over(up, rates.ingress))
    arriving = jnp.maximum(arriving, _times(_windows(rates, work), rates.round_trip))
    service = num_workers * (_times(work.fp32_adds, rates.fp32) + _times(work.votes, rates.votes))
    leaving = jnp.maximum(_over(work.down_bytes, rates.link), _over(down, rates.egress))
    return arriving, service, leaving


def _windows(rates: Rates, work: Work) -> Array:
    """`f32[L]`, how many times a lane fills what a worker may have under way at once."""
    return _over(work.fp32_adds, rates.fp32_window) + _over(work.votes, rates.vote_window)


def _queue_peak(up: Array, arriving: Array, service: Array, a: Array, added: Array) -> Array:
    """The most bytes that have arrived and are not added: at the end of a lane's arrival, or of its service.

    At any time t, `sum_j up_j clip((t - A_{j-1}) / a_j)` have arrived, and the same of T and s, if that is
    less, are added: a lane's service starts when the one before is done.
    """
    sums = jnp.cumsum(up)
    came = sums - jnp.sum(up * _share(a[1:, None], added[:-1], service), 1)
    went = jnp.sum(up * _share(added[1:, None], a[:-1], arriving), 1) - sums
    return jnp.maximum(jnp.max(jnp.maximum(came, went)), np.float32(0))


def _share(time: Array, start: Array, length: Array) -> Array:
    """The part of something that takes `length` from `start` on which is done at `time`."""
    part = (time - start) / jnp.where(length > 0, length, np.float32(1))
    return jnp.where(length > 0, jnp.clip(part, 0, 1), (part >= 0).astype(part.dtype))


def _running_max(values: Array) -> Array:
    return lax.cummax(jnp.asarray(values))


def _from_zero(sums: Array) -> Array:
    return jnp.concatenate([jnp.zeros((1,), sums.dtype), sums])


def _over(amount: Array, rate: Array) -> Array:
    """`amount / rate`, 0 where there is nothing to do, whatever the rate."""
    return jnp.where(amount > 0, amount / rate, np.float32(0))


def _times(amount: Array, seconds: Array) -> Array:
    """`amount * seconds`, 0 where there is nothing to do, whatever it would take."""
    return jnp.where(amount > 0, amount * seconds, np.float32(0))


def _f32(value: float) -> np.ndarray:
    return np.asarray(value, np.float32)


def _inverse(rate: float) -> float:
    return 1 / rate if rate > 0 else np.inf
