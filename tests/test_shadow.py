"""Laws of shadow mode: it trains as FP32 does, and a candidate does what the transform would have done."""

from __future__ import annotations

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from substrates import substrate
from training_runs import Run
from workers import AXIS, mesh_of, sent_bytes

import nf_jax
from nf_jax import Candidate, Profile, Route, checkpoint, costs
from nf_jax.candidates import DEFAULT_CANDIDATES
from nf_jax.plan import plan
from nf_jax.profile import Phase, Region
from nf_jax.regions import leaves_with_paths
from nf_jax.shadow import candidate_profile, exact_profile
from nf_jax.state import find_states

W = 4
PARAMS = {
    "body": {"kernel": np.ones((128, 64), np.float32), "half": np.ones(2048, jnp.bfloat16)},
    "empty": np.ones((0, 3), np.float32),
    "head": {"bias": np.ones(3, np.float32), "kernel": np.ones((64, 10), np.float32)},
    "mask": np.ones(256, np.int32),
    "still": np.ones(2048, np.float32),
}
LOSSY = ("body/half", "body/kernel", "still")
PROFILE = Profile(
    name="guided",
    regions=(Region(name="head", pattern="head/.*"), Region(name="rest", pattern=".*")),
    phases=(Phase(start_step=0, routes={"head": Route.FP32, "rest": Route.SIGN}),),
    buckets={"first_bytes": 2**12, "cap_bytes": 2**14},  # type: ignore[arg-type] (pydantic takes a dict)
)
FEW = (Candidate.of("BF16"), Candidate.of("SIGN", scale="rank1"))


def aggregate(profile: Profile = PROFILE, num_workers: Any = W, **kwargs: Any) -> Any:
    return nf_jax.aggregate_gradients(profile, axis=AXIS, num_workers=num_workers, **kwargs)


def gradients(step: int) -> Any:
    """Step 3 has a NaN on one worker; `still` gets a gradient in step 1 only."""
    rng = np.random.default_rng(step)
    local = jax.tree.map(
        lambda p: (rng.normal(size=(W, *p.shape)) * 10 + rng.normal(size=p.shape) * 5).astype(p.dtype), PARAMS
    )
    local["still"] *= np.float32(step == 1)
    if step == 3:
        local["body"]["kernel"][2, 5, 5] = np.nan
    return local


def by_path(tree: Any) -> dict[str, np.ndarray]:
    return {path: np.asarray(leaf) for path, leaf in leaves_with_paths(tree)[0]}


# --------------------------------------------------------------------------------- it trains as FP32


def train(mode: str, tx: Any, num_steps: int = 30) -> Any:
    """Parameters after some steps of a small network, and the last state."""
    rng = np.random.default_rng(0)
    params = {
        "a": {"kernel": rng.normal(size=(32, 96)) / 6, "bias": np.zeros(96)},
        "b": {"kernel": rng.normal(size=(96, 64)) / 10, "bias": np.zeros(64)},
    }
    params = jax.tree.map(lambda p: p.astype(np.float32), params)

    def loss_of(params: Any, x: Any) -> Any:
        hidden = jax.nn.relu(x @ params["a"]["kernel"] + params["a"]["bias"])
        return jnp.mean((hidden @ params["b"]["kernel"] + params["b"]["bias"] - x[:, :1]) ** 2)

    def step(state: Any, x: Any) -> Any:
        params, inner = state
        local = jax.lax.pcast(params, AXIS, to="varying") if mode == "checked" else params
        loss, grads = jax.value_and_grad(loss_of)(local, x)
        updates, inner = tx.update(grads, inner, params, value=loss)
        return optax.apply_updates(params, updates), inner

    state = params, tx.init(params)
    data = rng.normal(size=(num_steps, W, 8, 32)).astype(np.float32)
    if mode == "pmap":
        function = jax.pmap(step, AXIS, devices=jax.devices()[:W])
        state = jax.tree.map(lambda leaf: np.broadcast_to(np.asarray(leaf), (W, *np.shape(leaf))), state)
    else:
        spec, data = nf_jax.state_spec(state, AXIS), data.reshape(num_steps, -1, 32)
        mapped = jax.shard_map(
            step, mesh=mesh_of(W), in_specs=(spec, P(AXIS)), out_specs=spec, check_vma=True
        )
        function, state = jax.jit(mapped), nf_jax.shard_state(state, mesh_of(W))
    for x in data:
        state = function(state, x)
    return jax.tree.map(np.asarray, state[0]), state[1]


@pytest.mark.parametrize("mode", ["pmap", "checked"])
def test_parameters_are_those_of_fp32_to_the_bit_after_many_steps(mode: str):
    def chain(first: Any) -> Any:
        return optax.chain(first, optax.add_decayed_weights(1e-2), optax.sgd(0.1, momentum=0.9))

    expected, plain = train(mode, chain(aggregate(Profile.static("FP32"))))
    params, state = train(mode, chain(aggregate(shadow=FEW)))
    chex.assert_trees_all_equal(params, expected)
    info = nf_jax.shadow_info(state)
    assert int(info.step) == int(nf_jax.step_info(plain).step) == 29
    assert not np.asarray(nf_jax.step_info(state).routes).any()
    measured = np.asarray(info.residual_ratio)[:, 3]
    assert 0 < measured[0] < 0.05 < 0.5 < measured[1]  # b/kernel: a rounding is little, a sign is not


# ------------------------------------------------------------ a candidate is what the transform does


def shadow_memory(run: Run) -> Any:
    ((_, state),) = find_states(run.state)
    assert state.shadow is not None
    return jax.tree.map(np.asarray, state.shadow.memory)


class Observed(dict):
    """What the steps of a shadow run left: `means`, `infos`, `memories`, and `run`, `program`."""


@functools.cache
def observed() -> Observed:
    run = Run(aggregate(shadow=True), PARAMS, W, "unchecked")
    extra = {"value": np.zeros(W, np.float32)}
    program = run.function.lower(gradients(0), run.state, extra).compile()
    run.function = program
    steps = Observed(means=[], infos=[], memories=[], run=run, program=program)
    for step in range(6):
        steps["means"].append(by_path(jax.tree.map(lambda x: x[0], run.step(gradients(step), value=0))))
        steps["infos"].append(jax.tree.map(np.asarray, nf_jax.shadow_info(run.state)))
        steps["memories"].append(shadow_memory(run))
    return steps


def reference(mean: np.ndarray, ours: np.ndarray, residual: np.ndarray) -> list[Any]:
    """Cosine, relative error, sign agreement, residual ratio in f64; the residual is `[W, ...]`."""
    mean, ours, residual = (np.asarray(x, np.float64) for x in (mean, ours, residual))
    norm, own = np.linalg.norm(mean), np.linalg.norm(ours)
    left = np.sqrt(np.sum(residual**2) / W)
    if norm == 0:
        return [float(own == 0), np.inf if own else 0.0, 1.0, np.inf if left else 0.0]
    live = mean != 0
    agreement = ((1 + np.sign(mean[live]) * np.sign(ours[live])) / 2).mean()
    cosine = np.sum(mean * ours) / (norm * own) if own else 0.0
    return [cosine, np.linalg.norm(ours - mean) / norm, agreement, left / norm]


@pytest.mark.parametrize("number", range(len(DEFAULT_CANDIDATES)), ids=lambda n: DEFAULT_CANDIDATES[n].name)
def test_a_candidate_is_the_transform_with_that_codec_to_the_bit(number: int):
    seen, candidate = observed(), DEFAULT_CANDIDATES[number]
    paths = [*by_path(PARAMS)]
    run = Run(aggregate(candidate_profile(PROFILE, candidate)), PARAMS, W, "unchecked")
    for step in range(6):
        ours = by_path(jax.tree.map(lambda x: x[0], run.step(gradients(step), value=0)))
        chex.assert_trees_all_equal(seen["memories"][step][number], run.memory)
        info = seen["infos"][step]
        assert int(info.step) == step
        measured = {path: [float(m[number, i]) for m in info[1:]] for i, path in enumerate(paths)}
        if step == 3:
            assert np.isnan([*measured.values()]).all()
            continue
        for path in paths:
            if path not in LOSSY:
                assert measured[path] == [1, 0, 1, 0], path
                continue
            expected = reference(seen["means"][step][path], ours[path], run.memory.residual[path])
            np.testing.assert_allclose(measured[path], expected, rtol=2e-4, atol=1e-6, err_msg=path)


def test_the_updates_are_the_plain_mean_and_a_bad_step_leaves_the_shadow_as_it_was():
    seen = observed()
    plain = jax.pmap(lambda g: jax.lax.pmean(g, AXIS), AXIS, devices=jax.devices()[:W])
    for step in (0, 5):
        floats = {path: leaf for path, leaf in by_path(gradients(step)).items() if leaf.dtype == np.float32}
        for path, mean in plain(floats).items():
            np.testing.assert_array_equal(seen["means"][step][path], np.asarray(mean)[0])
    chex.assert_trees_all_equal(seen["memories"][3], seen["memories"][2])
    assert not np.array_equal(
        seen["memories"][4][1].residual["body/kernel"], seen["memories"][3][1].residual["body/kernel"]
    )


def test_what_the_shadow_sends_is_counted():
    seen = observed()
    claimed = nf_jax.step_info(seen["run"].state).wire_bytes
    exact = plan(exact_profile(PROFILE), PARAMS, W)
    alone = exact.wire_bytes([Route.FP32] * exact.num_lanes)
    assert claimed == alone + nf_jax.shadow_plan(PROFILE, PARAMS, W).wire_bytes > 1.5 * alone
    # The claim counts a ring's share exactly, the program in whole elements.
    assert sent_bytes(seen["program"].as_text(), W) == pytest.approx(claimed, abs=16)


def test_with_two_levels_a_candidate_is_the_transform_too():
    levels, candidate = (2, 2), Candidate.of("SIGN", scale="leaf")
    shadow = Run(aggregate(num_workers=levels, shadow=[candidate]), PARAMS, W, "unchecked")
    run = Run(aggregate(candidate_profile(PROFILE, candidate), levels), PARAMS, W, "unchecked")
    for step in (0, 1):
        means = by_path(jax.tree.map(lambda x: x[0], shadow.step(gradients(step), value=0)))
        ours = by_path(jax.tree.map(lambda x: x[0], run.step(gradients(step), value=0)))
        chex.assert_trees_all_equal(shadow_memory(shadow)[0], run.memory)
    info, at = nf_jax.shadow_info(shadow.state), [*by_path(PARAMS)].index("body/kernel")
    # A host's residual is the pieces of its two devices.
    residual = run.memory.residual["body/kernel"].reshape(W, -1) * np.sqrt(2)
    expected = reference(means["body/kernel"], ours["body/kernel"], residual)
    np.testing.assert_allclose([float(m[0, at]) for m in info[1:]], expected, rtol=2e-4)


def test_one_worker_sends_nothing_so_nothing_is_lost():
    run = Run(aggregate(num_workers=1, shadow=FEW), PARAMS, 1, "unchecked")
    run.step(jax.tree.map(lambda g: g[:1], gradients(0)))
    info = nf_jax.shadow_info(run.state)
    for measure, exact in zip(info[1:], (1, 0, 1, 0), strict=True):
        assert (np.asarray(measure) == exact).all()
    assert nf_jax.step_info(run.state).wire_bytes == 0


# ------------------------------------------------------------------------------------ what it costs


@pytest.mark.parametrize("num_workers", [2, 3, 8, (2, 4)], ids=str)
def test_bytes_of_leaves_add_up_to_the_plans(num_workers: Any):
    shadow = nf_jax.shadow_plan(PROFILE, PARAMS, num_workers)
    leaves = shadow.leaves
    for candidate, planned, row in zip(shadow.candidates, shadow.plans, leaves.wire_bytes, strict=True):
        for route, found in ((candidate.route, row), (Route.FP32, leaves.fp32_bytes)):
            routes = [route if group >= 0 else Route.FP32 for group in planned.lanes.groups]
            assert sum(found) == planned.wire_bytes(routes) - planned.overhead_bytes
        for own, exact, lossy in zip(row, leaves.fp32_bytes, leaves.lossy, strict=True):
            # Half the bytes of a leaf whose shards are padded to twice its size are no fewer.
            assert own == exact if not lossy else own < exact or candidate.route == Route.BF16
    assert {path for path, lossy in zip(leaves.paths, leaves.lossy, strict=True) if lossy} >= {"body/kernel"}
    assert leaves.regions[leaves.paths.index("head/kernel")] == "head"


def test_seconds_of_leaves_add_up_to_the_lanes():
    measured = substrate(W)
    leaves = nf_jax.shadow_plan(PROFILE, PARAMS, W, FEW, substrate=measured).leaves
    for candidate, row in zip(FEW, leaves.seconds, strict=True):
        profile = candidate_profile(PROFILE, candidate)
        lanes = costs.lane_seconds(profile, plan(profile, PARAMS, W).lanes, measured)
        assert sum(row) == pytest.approx(lanes[:, candidate.route].sum())
        assert sum(leaves.fp32_seconds) == pytest.approx(lanes[:, Route.FP32].sum())
    with pytest.raises(ValueError, match="num_workers=8"):
        nf_jax.shadow_plan(PROFILE, PARAMS, 8, substrate=measured)


# -------------------------------------------------------------------------------------- its state


def test_the_shadow_is_split_over_workers_saved_and_restored(tmp_path):
    run, tx = observed()["run"], aggregate(shadow=True)
    spec = nf_jax.state_spec(tx.init(PARAMS), AXIS)
    assert set(jax.tree.leaves(spec.shadow.memory)) == {P(AXIS)}
    assert set(jax.tree.leaves((spec.shadow.info, spec.info))) == {P()}
    checkpoint.save(tmp_path, run.state, step=6)
    fresh = nf_jax.shard_state(tx.init(PARAMS), mesh_of(W))
    restored = checkpoint.restore(tmp_path, fresh)
    chex.assert_trees_all_equal(restored, run.state)
    lost = run.state._replace(
        shadow=run.state.shadow._replace(memory=jax.tree.map(lambda leaf: leaf[:1], run.state.shadow.memory))
    )
    with pytest.raises(ValueError, match="expected 4"):
        nf_jax.shadow_info(lost)


def test_without_shadow_the_state_is_what_it_was():
    state = aggregate().init(PARAMS)
    assert state.shadow is None
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    assert not any("shadow" in name for name in names)
    with pytest.raises(ValueError, match="without shadow"):
        nf_jax.shadow_info(state)


@pytest.mark.parametrize(
    ("made", "used", "said"),
    [
        (False, FEW, "expected one that was made with shadow"),
        (FEW, FEW[:1], "shadow candidates"),
        (FEW, False, "got one with shadow"),
    ],
)
def test_a_state_of_another_shadow_is_refused(made: Any, used: Any, said: str):
    profile = exact_profile(PROFILE)
    state = aggregate(profile, shadow=made).init(PARAMS)
    spec, tx = nf_jax.state_spec(state, AXIS), aggregate(profile, shadow=used)

    def step(local: Any, state: Any) -> Any:
        return tx.update(jax.tree.map(lambda x: x[0], local), state)[1]

    mapped = jax.shard_map(step, mesh=mesh_of(W), in_specs=(P(AXIS), spec), out_specs=spec, check_vma=False)
    with pytest.raises(ValueError, match=said):
        jax.eval_shape(mapped, gradients(0), nf_jax.shard_state(state, mesh_of(W)))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: aggregate(shadow=[]), "at least one"),
        (lambda: aggregate(shadow=["SIGN"]), "sequence of nf_jax.Candidate"),
        (lambda: aggregate(shadow=FEW[0]), "sequence of nf_jax.Candidate"),
        (lambda: aggregate(shadow=FEW * 2), "different names"),
        (lambda: aggregate(shadow=True, routes=[0]), "expected None with shadow"),
        (lambda: nf_jax.shadow_plan(PROFILE, PARAMS, W, False), "got False"),
        (lambda: Candidate.of("FP32"), "which loses nothing"),
        (lambda: Candidate.of("SIGN", error_feedback=False), "would be lost"),
    ],
)
def test_what_cannot_be_a_shadow_is_refused(make: Any, said: str):
    with pytest.raises(ValueError, match=said):
        make()
