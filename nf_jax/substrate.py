"""Measures the mesh at hand: how long packing, counting, decoding and every route's collectives take.

Every stage of `costs.stages_of` runs at a ladder of sizes, on all workers at once, and is fitted with a
latency and seconds per byte. A route's own stage is what remains of a whole step (`aggregate_gradients`,
with error feedback and health) when the stages that routes share are taken off.
"""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from nf_jax import capacity, codecs, collectives, costs
from nf_jax.plan import plan
from nf_jax.profile import CapacityLimits, Codec, HealthLimits, Phase, Profile, Region, Route
from nf_jax.stages import OWN_STAGE, Stage, StageName, Substrate, fit
from nf_jax.state import shard_state, state_spec
from nf_jax.telemetry import Lanes, Reason
from nf_jax.transform import aggregate_gradients

AXIS = "workers"
SIZES_BYTES = tuple(2**power for power in range(12, 27, 2))
"""The ladder, 4 KiB to 64 MiB: FP32 bytes of a lane, or bytes that a collective is handed."""
_SECONDS_A_POINT = 0.4
_MOST_SECONDS_A_STEP = 0.5
_LEAST_SAMPLES, _MOST_SAMPLES = 3, 30
_NUM_WARMUP = 2

Step = Callable[[], Any]


class Measured(NamedTuple):
    """Attributes: sizes_bytes: ascending; seconds: the median at each, of the slowest process."""

    sizes_bytes: list[int]
    seconds: list[float]


def probe(
    *,
    link: str | None = None,
    measured_by: str | None = None,
    sizes_bytes: Sequence[int] = SIZES_BYTES,
    tell: Callable[[str], None] = lambda text: None,
    bench: Bench | None = None,
) -> Substrate:
    """Measures all stages between all devices of all processes; call it on every process.

    Args:
      link: what links the workers, in words, kept with the result.
      measured_by: command or person, kept with the result.
      sizes_bytes: the ladder; whole steps take some of it (`step_sizes`), for they take longer to compile.
        Where a step takes more than half a second, larger ones are left out.
      tell: called with what has been measured, at most `num_points(sizes_bytes)` times.
      bench: one that an earlier probe of this process has used, if links alone have changed: its programs
        are compiled.

    Returns:
      The substrate, the same on all processes.

    Raises:
      ValueError: there is one worker only, so that nothing travels, or fewer than four sizes.
    """
    if jax.device_count() < 2:
        raise ValueError(
            "probe: expected at least 2 workers, got one device, so that nothing travels. On CPU ask for "
            "virtual devices (nf-jax probe --devices 8), or start several processes (--distributed)."
        )
    if len(sizes_bytes) < 4 or list(sizes_bytes) != sorted(set(sizes_bytes)) or sizes_bytes[0] < 4096:
        raise ValueError(f"sizes_bytes: expected at least 4, ascending, from 4096 on, got {sizes_bytes}")
    bench = bench or Bench()
    stages: dict[StageName, Stage] = {}
    for name, make in SHARED_STAGES.items():
        stages[name] = fit(*_climb(bench, name, make, sizes_bytes, tell))
    for route in Route:
        profile = one_route(route)
        sizes = [size for size in step_sizes(sizes_bytes) if _goes_by(profile, size, bench.num_workers)]
        steps = _climb(bench, f"{route.name} step", _step_of(profile), sizes, tell)
        stages[OWN_STAGE[route]] = _fit_rest(profile, steps, stages, bench.num_workers)
    return Substrate(
        num_workers=bench.num_workers,
        num_processes=jax.process_count(),
        backend=jax.default_backend(),
        device_kind=jax.devices()[0].device_kind,
        link=link,
        measured_by=measured_by,
        date=datetime.date.today().isoformat(),
        versions={"jax": jax.__version__},
        stages=stages,
    )


def num_points(sizes_bytes: Sequence[int] = SIZES_BYTES) -> int:
    """How many points `probe` measures, at most."""
    return len(SHARED_STAGES) * len(sizes_bytes) + len(Route) * len(step_sizes(sizes_bytes))


def step_sizes(sizes_bytes: Sequence[int]) -> list[int]:
    """Sizes at which whole steps are measured: every other one, and all of the largest three."""
    return sorted({*sizes_bytes[1::2], *sizes_bytes[-3:]})


def one_route(route: Route) -> Profile:
    """A profile that sends everything by one route from the first step on, health and error feedback on."""
    codec = Codec(down="ternary") if route == Route.TERNARY else Codec()
    return Profile(
        name=f"probe_{route.name.lower()}",
        regions=(Region(name="all", pattern=".*", codec=codec),),
        phases=(Phase(start_step=0, routes={"all": route}),),
        health=HealthLimits(warmup_steps=0),
        capacity=CapacityLimits(min_lane_bytes=0),
    )


# ---------------------------------------------------------------------------------------------- the steps


class Bench:
    """Programs over all devices of all processes, and the values they work on; kept for the next probe."""

    def __init__(self) -> None:
        self.mesh = jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(AxisType.Auto,))
        self.num_workers, self.split = self.mesh.size, NamedSharding(self.mesh, PartitionSpec(AXIS))
        self._made: dict[tuple[str, int], tuple[Step, int]] = {}
        token = self.place(np.zeros((), np.int32))
        self._count = self.compile(lambda value: collectives.mean_exact([value], AXIS)[0], token)

    def place(self, value: np.ndarray) -> Array:
        """The same value on every worker: `[W, ...]`."""
        shape = (self.num_workers, *value.shape)
        return jax.make_array_from_callback(shape, self.split, lambda _: value[None])

    def compile(self, body: Callable[[Array], Any], value: Array) -> Step:
        """A program of one worker's value, on all workers."""
        outer = lambda given: body(given[0])[None]  # noqa: E731
        spec = PartitionSpec(AXIS)
        mapped = jax.jit(jax.shard_map(outer, mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=False))
        return lambda: mapped(value)

    def find(self, name: str, make: Make, size: int) -> tuple[Step, int]:
        """What `make` makes; once."""
        if (name, size) not in self._made:
            self._made[name, size] = make(self, size)
        return self._made[name, size]

    def wait_for_all(self) -> None:
        """Returns when every process has come here."""
        jax.block_until_ready(self._count())


Make = Callable[[Bench, int], tuple[Step, int]]
"""(bench, size) -> a step to time, and the bytes that its stage works on."""


def _pack(bench: Bench, size: int) -> tuple[Step, int]:
    body = lambda values: codecs.pack_bits(codecs.is_positive(values, jnp.asarray(False)))  # noqa: E731
    return bench.compile(body, bench.place(_values(size))), size


def _count(bench: Bench, size: int) -> tuple[Step, int]:
    votes = bench.num_workers
    words = np.zeros((votes, max(size // (4 * votes) // codecs.LANE_WORDS, 1) * codecs.LANE_WORDS), np.uint32)
    body = lambda given: codecs.majority_words(codecs.count_votes(given), votes, given[0])  # noqa: E731
    return bench.compile(body, bench.place(words)), words.nbytes


def _decode(bench: Bench, size: int) -> tuple[Step, int]:
    num_words = max(size // (4 * codecs.BLOCK), 1) * codecs.LANE_WORDS
    words = np.zeros((1, num_words), np.uint32)
    body = lambda given: codecs.decode_levels(given, codecs.LEVELS["majority"])  # noqa: E731
    return bench.compile(body, bench.place(words)), words.nbytes * codecs.WORD_BITS


def _all_reduce(bench: Bench, size: int) -> tuple[Step, int]:
    body = lambda values: collectives.mean_exact([values], AXIS)[0]  # noqa: E731
    return bench.compile(body, bench.place(_values(size))), capacity.allreduce_bytes(size, bench.num_workers)


def _all_to_all(bench: Bench, size: int) -> tuple[Step, int]:
    words = np.zeros((bench.num_workers, max(size // (4 * bench.num_workers), 1)), np.uint32)
    sent = words.nbytes * (bench.num_workers - 1) // bench.num_workers
    return bench.compile(lambda given: collectives.exchange(given, AXIS), bench.place(words)), sent


def _all_gather(bench: Bench, size: int) -> tuple[Step, int]:
    words = np.zeros((max(size // (4 * bench.num_workers), 1),), np.uint32)
    sent = capacity.gather_bytes(words.nbytes, bench.num_workers)
    return bench.compile(lambda given: collectives.gather(given, AXIS), bench.place(words)), sent


SHARED_STAGES: dict[StageName, Make] = {
    "pack": _pack,
    "count": _count,
    "decode": _decode,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "all_gather": _all_gather,
}


def _step_of(profile: Profile) -> Make:
    """A whole step of a profile on one matrix, as in training: the state is carried and donated."""

    def make(bench: Bench, size: int) -> tuple[Step, int]:
        gradient = bench.place(_values(size).reshape(_matrix_shape(size)))
        loss = bench.place(np.ones((), np.float32))
        tx = aggregate_gradients(profile, axis=AXIS, num_workers=bench.num_workers)
        params: Any = {"kernel": jax.ShapeDtypeStruct(gradient.shape[1:], gradient.dtype)}
        state = shard_state(tx.init(params), bench.mesh)
        specs = PartitionSpec(AXIS), PartitionSpec(AXIS), state_spec(state, AXIS)

        def update(gradient: Array, loss: Array, state: Any) -> Any:
            mean, state = tx.update({"kernel": gradient[0]}, state, value=loss[0])
            return state, mean  # in this order: XLA gives the first outputs the donated buffers

        mapped = jax.shard_map(update, mesh=bench.mesh, in_specs=specs, out_specs=(specs[2], PartitionSpec()))
        program, carried = jax.jit(mapped, donate_argnums=2), [state]

        def step() -> Any:
            carried[0], mean = program(gradient, loss, carried[0])
            return mean, carried[0]

        return step, size

    return make


def _goes_by(profile: Profile, size: int, num_workers: int) -> bool:
    """Whether a matrix goes by the profile's route: small ones cannot be cut into shards."""
    fixed = _lanes_of(profile, size, num_workers).fixed[0]
    return fixed in (None, Reason.PROTECTED)


def _lanes_of(profile: Profile, size: int, num_workers: int) -> Lanes:
    params: Any = {"kernel": jax.ShapeDtypeStruct(_matrix_shape(size), jnp.float32)}
    return plan(profile, params, num_workers).lanes


def _fit_rest(profile: Profile, steps: Measured, shared: dict[StageName, Stage], num_workers: int) -> Stage:
    """What whole steps take beside the stages that routes share."""
    route, codec = profile.route_table[0][1][0], profile.regions[0].codec
    rest = []
    for size, seconds in zip(*steps, strict=True):
        sent = _lanes_of(profile, size, num_workers).wire_bytes[0][route]
        stages = costs.stages_of(route, codec, size // 4, sent, num_workers)
        rest.append(seconds - sum(shared[name].seconds(b) for name, b in stages if name in shared))
    return fit(steps.sizes_bytes, rest, steps.seconds)


def _matrix_shape(size: int) -> tuple[int, int]:
    """About square, `size` bytes of f32, both sides powers of two where `size` is."""
    rows = 2 ** ((size // 4).bit_length() // 2)
    return rows, size // 4 // rows


def _values(size: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(size // 4, np.float32)


# ----------------------------------------------------------------------------------------------- timing


def _climb(
    bench: Bench, name: str, make: Make, sizes: Sequence[int], tell: Callable[[str], None]
) -> Measured:
    """Measures one stage from small sizes to large ones, until a step takes too long."""
    found = Measured([], [])
    for size in sizes:
        too_long = len(found.seconds) >= 2 and found.seconds[-1] > _MOST_SECONDS_A_STEP
        if not too_long:
            step, num_bytes = bench.find(name, make, size)
            found.sizes_bytes.append(num_bytes)
            found.seconds.append(_median_seconds(bench, step))
        tell(f"{name}, {size >> 10} KiB")
    return found


def _median_seconds(bench: Bench, step: Step) -> float:
    """The median of a step's seconds, after a barrier; of the slowest process."""
    for _ in range(_NUM_WARMUP):
        jax.block_until_ready(step())
    first = _slowest(_seconds(bench, step))
    num = min(max(int(_SECONDS_A_POINT / max(first, 1e-9)), _LEAST_SAMPLES), _MOST_SAMPLES)
    return _slowest(statistics.median(_seconds(bench, step) for _ in range(num)))


def _seconds(bench: Bench, step: Step) -> float:
    bench.wait_for_all()
    start = time.perf_counter()
    jax.block_until_ready(step())
    return time.perf_counter() - start


def _slowest(seconds: float) -> float:
    """The most of any process, so that all of them go on alike."""
    if jax.process_count() == 1:
        return seconds
    return float(np.max(multihost_utils.process_allgather(np.float32(seconds))))
