"""Laws of the published rules that experiments compare with; one table for all, then each one's own."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from training_runs import Run
from workers import AXIS, mapped, rows_are_equal

import nf_jax
from experiments import baselines
from experiments.baselines_bucket import bucketsign, form
from experiments.baselines_rule import exact_profile
from nf_jax import Route, training
from nf_jax.state import find_states

W = 4
SHAPES = {"half": (64, 32), "head/bias": (32,), "head/kernel": (2, 32, 64), "scale": ()}
NUM_ELEMENTS = sum(math.prod(shape) for shape in SHAPES.values())
ACCORDION = {"interval_steps": 2, "regions": {"half": "half", "rest": ".*"}}
DGC = {"density": 0.02, "warmup_steps": 4, "momentum": 0.5, "clip_norm": 10.0}
PLAIN = {"clip_deviations": None}


def gradients(seed: int, num_workers: int = W) -> dict[str, Any]:
    """Local gradients, `[W, ...]`; no two magnitudes are alike, and none is zero."""
    rng = np.random.default_rng(seed)
    draw = {path: rng.normal(size=(num_workers, *shape)).astype(np.float32) for path, shape in SHAPES.items()}
    draw["half"] = draw["half"].astype(jnp.bfloat16)
    return nested(draw)


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    head = {name: flat[f"head/{name}"] for name in ("bias", "kernel")}
    return {"half": flat["half"], "head": head, "scale": flat["scale"]}


def flat(tree: dict[str, Any]) -> dict[str, np.ndarray]:
    """The leaves by path, `f64`."""
    leaves = {"half": tree["half"], "scale": tree["scale"]}
    leaves |= {f"head/{name}": leaf for name, leaf in tree["head"].items()}
    return {path: np.asarray(leaves[path]).astype(np.float64) for path in SHAPES}


@functools.cache
def compiled(name: str, options: tuple[tuple[str, Any], ...]) -> tuple[Run, Any]:
    tx = baselines.BASELINES[name](AXIS, W, **dict(options))
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:], leaf.dtype), gradients(0))
    run = Given(tx, params, W, "checked")
    return run, run.state


class Given(Run):
    """Always gives a loss, so that there is one trace."""

    def step(self, gradients: Any, **extra: Any) -> Any:
        return super().step(gradients, value=np.arange(self.num_workers), **extra)


def fresh(name: str, **options: Any) -> Run:
    """At its first step; compiled once for a name and its options."""
    if name == "accordion":
        options = {"interval_steps": 2, "regions": Regions(ACCORDION["regions"])} | options
    run, run.state = compiled(name, tuple(options.items()))
    return run


class Regions(dict[str, str]):
    """A dict for `functools.cache`."""

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(tuple(self.items()))


def mean(tree: dict[str, Any]) -> dict[str, np.ndarray]:
    return {path: leaf.mean(0) for path, leaf in flat(tree).items()}


def first(tree: dict[str, Any]) -> dict[str, np.ndarray]:
    return {path: leaf[0] for path, leaf in flat(tree).items()}


# ============================================================================================== all


def allreduce(num_bytes: float, num_workers: int = W) -> int:
    return math.ceil(2 * (num_workers - 1) / num_workers * num_bytes)


def low_rank(rank: int) -> int:
    """P and Q of a 64x32 and a 64x64 matrix, then 32 + 1 elements as they are."""
    return allreduce(4 * (rank * (64 + 32 + 64 + 64) + 33))


BYTES = {
    # 1 bit an element to each of three others for their quarter, and the quarter that is one's own back.
    "signsgd": 2 * 3 * 4 * math.ceil(NUM_ELEMENTS / 4 / 32),
    # 2 bits; nine sums from -4 to 4 take 4 bits; four scales.
    "terngrad": 3 * 4 * (math.ceil(NUM_ELEMENTS / 4 / 16) + math.ceil(NUM_ELEMENTS / 4 / 8)) + allreduce(16),
    "powersgd1": low_rank(1),
    "powersgd2": low_rank(2),
    "powersgd4": low_rank(4),
    # Three elements of 2048, five of 4096, with their indices, to three others.
    "dgc": 3 * 8 * 8 + allreduce(4 * 33),
    # 1 bit up, counts from 0 to 4 in three down; a scale for each of four leaves, or one for all.
    "sign-per-leaf": 3 * 4 * 4 * math.ceil(NUM_ELEMENTS / 4 / 32) + allreduce(16),
    "sign-per-1mib": 3 * 4 * 4 * math.ceil(NUM_ELEMENTS / 4 / 32) + allreduce(4),
}
# One matrix of 8x8, between two workers and alone: a half of two words; sums from -2 to 2 in 3 bits and one
# scale; P and Q, once they are smaller than the matrix; one element.
SMALL_BYTES = {
    "signsgd": (0, 2 * 4),
    "terngrad": (0, 2 * 4 + 3 * 4 + 4),
    "powersgd2": (0, 4 * 2 * 16),
    "powersgd4": (0, 4 * 64),
    "dgc": (0, 8),
}


@pytest.mark.parametrize("name", baselines.BASELINES)
def test_updates_are_like_the_gradients_and_have_the_same_bits_on_all_workers(name: str):
    run = fresh(name)
    for seed in range(3):
        given = gradients(seed)
        updates = run.step(given)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), updates) == jax.tree.map(
            lambda x: (x.shape, x.dtype), given
        )
        assert rows_are_equal(updates)
        assert all(np.isfinite(leaf).all() for leaf in flat(updates).values())
        assert flat(updates)["half"].any() and flat(updates)["head/kernel"].any()
        assert run.info.step == seed and run.info.signals.loss == 1.5


@pytest.mark.parametrize("name", BYTES)
def test_bytes_are_those_of_a_count_in_numpy(name: str):
    run = fresh(name)
    run.step(gradients(0))
    assert run.info.wire_bytes == BYTES[name]
    assert run.info.fp32_bytes == allreduce(4 * NUM_ELEMENTS)


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("name", SMALL_BYTES)
def test_few_workers_send_less_and_one_nothing(name: str, num_workers: int):
    given = np.random.default_rng(1).normal(size=(num_workers, 8, 8)).astype(np.float32)
    run = Run(baselines.BASELINES[name](AXIS, num_workers), jnp.zeros((8, 8)), num_workers, "unchecked")
    update = run.step(given)[0]
    assert run.info.wire_bytes == SMALL_BYTES[name][num_workers - 1]
    if name == "signsgd":  # two workers that differ tie; one is right
        agreed = np.abs(np.sign(given).mean(0)) == 1
        np.testing.assert_array_equal(update[agreed], np.sign(given)[0][agreed])
    if name == "powersgd4":  # P and Q would be no smaller than the matrix
        np.testing.assert_allclose(update, given.mean(0), atol=1e-6)


@pytest.mark.parametrize("name", [name for name in baselines.BASELINES if name != "accordion"])
def test_what_is_not_finite_comes_back_so_and_spoils_nothing_that_is_kept(name: str):
    run = fresh(name)
    run.step(gradients(0))
    before, spoilt = jax.tree.map(np.asarray, run.state), gradients(1)
    spoilt["head"]["kernel"][2, 1, 3, 5] = np.nan
    updates = run.step(spoilt)
    assert not np.isfinite(flat(updates)["head/kernel"]).all(axis=(1, 2, 3)).any()
    assert run.info.signals.nonfinite.sum() > 0
    after = jax.tree.map(np.asarray, run.state)
    jax.tree.map(np.testing.assert_array_equal, before.shared, after.shared)
    jax.tree.map(np.testing.assert_array_equal, before.aggregate.memory, after.aggregate.memory)


# ================================================================================ scales of buckets


@pytest.mark.parametrize(("name", "shared"), [("sign-per-leaf", False), ("sign-per-1mib", True)])
def test_a_bucket_has_one_scale_and_what_is_kept_is_what_was_not_sent(name: str, shared: bool):
    run, kept = fresh(name), {path: np.zeros((W, *shape)) for path, shape in SHAPES.items()}
    for seed in range(2):
        given = gradients(seed)
        corrected = {path: leaf + kept[path] for path, leaf in flat(given).items()}
        total = sum(np.abs(leaf).sum() for leaf in corrected.values()) / W / NUM_ELEMENTS
        scales = {path: total if shared else np.abs(leaf).mean() for path, leaf in corrected.items()}
        sent = {path: np.sign(leaf) * scales[path] for path, leaf in corrected.items()}
        kept = {path: corrected[path] - sent[path] for path in SHAPES}
        for path, update in first(run.step(given)).items():
            tolerance = 1e-2 if path == "half" else 1e-5  # updates of bf16 leaves are bf16
            np.testing.assert_allclose(update, sent[path].mean(0), rtol=tolerance, atol=1e-6)
            residual = find_states(run.state)[0][1].memory.residual[path]
            np.testing.assert_allclose(np.asarray(residual).reshape(kept[path].shape), kept[path], atol=1e-5)


def test_caps_cut_leaves_into_buckets_as_ddp_does():
    shapes = {"a": (100,), "b": (100,), "c": (100,)}
    assert form(shapes, 0) == [["c"], ["b"], ["a"]]
    assert form(shapes, 500) == [["c", "b"], ["a"]]
    assert form(shapes, 10**6) == [["c", "b", "a"]]
    with pytest.raises(ValueError, match="expected cap_bytes of at least 0"):
        bucketsign(AXIS, W, cap_bytes=-1)


# ========================================================================================== signsgd


def test_signsgd_is_the_sign_of_most():
    run, given = fresh("signsgd"), gradients(3)
    given["half"][3] = given["half"][2]  # so that two and two are no rarity, and three and one too
    for path, update in first(run.step(given)).items():
        votes = np.sign(flat(given)[path]).sum(0)
        decided = votes != 0
        assert (np.abs(update) == 1).all()
        np.testing.assert_array_equal(update[decided], np.sign(votes)[decided])


def test_signsgd_tosses_a_coin_for_a_tie_and_for_zeros():
    run, given = fresh("signsgd"), gradients(3)
    given["half"][1::2] = -given["half"][::2]
    given["head"]["kernel"][:] = 0
    seen = []
    for _ in range(2):
        updates = run.step(given)
        assert rows_are_equal(updates)
        seen += [first(updates)["half"].ravel(), first(updates)["head/kernel"].ravel()]
    for coins in seen:
        assert set(coins) == {-1, 1} and abs(coins.mean()) < 5 / math.sqrt(coins.size)
    for before, after in zip(seen[:2], seen[2:], strict=True):
        assert 0.4 < (before == after).mean() < 0.6


def test_signsgd_with_momentum_votes_by_a_running_mean():
    run = fresh("signsgd", momentum=0.9)
    means = {path: np.zeros((W, *shape)) for path, shape in SHAPES.items()}
    for seed in range(3):
        given = gradients(30 + seed)
        updates = first(run.step(given))
        for path in SHAPES:
            means[path] = 0.9 * means[path] + 0.1 * flat(given)[path]
            votes = np.sign(means[path]).sum(0)
            np.testing.assert_array_equal(updates[path][votes != 0], np.sign(votes)[votes != 0])
            np.testing.assert_allclose(kept(run)[path], means[path], atol=1e-6)


# ========================================================================================= terngrad


def test_terngrad_sends_minus_s_zero_or_s_with_the_largest_s_of_all_workers():
    run, given = fresh("terngrad", **PLAIN), gradients(4)
    given = jax.tree.map(
        lambda leaf: np.where(np.arange(W).reshape(-1, *[1] * (leaf.ndim - 1)) == 2, leaf, 0), given
    )
    scales = {path: np.abs(leaf).max() for path, leaf in flat(given).items()}
    for path, update in first(run.step(given)).items():  # only worker 2 has sent other than zeros
        sent = W * update / scales[path]
        np.testing.assert_allclose(sent, np.round(sent), atol=1e-2 if path == "half" else 1e-6)
        assert set(np.round(sent).ravel()) <= {-1, 0, 1}
        assert (sent * np.sign(flat(given)[path][2]) >= 0).all()
    given["head"]["kernel"][1, 0, 0, 0] = 99.0
    kernel = first(run.step(given))["head/kernel"]
    assert set(np.unique(np.abs(kernel))) <= {0, 99 / 4} and kernel[0, 0, 0] != 0


@pytest.mark.parametrize("options", [PLAIN, {}], ids=["plain", "clipped"])
def test_terngrad_is_right_on_average_and_workers_draw_independently(options: dict[str, Any]):
    run, given, num_steps = fresh("terngrad", **options), gradients(5), 150
    given = jax.tree.map(lambda leaf: np.broadcast_to(leaf[:1], leaf.shape), given)  # alike on all workers
    kernels = np.stack([first(run.step(given))["head/kernel"] for _ in range(num_steps)])
    want = flat(given)["head/kernel"][0]
    if not options:
        want = np.clip(want, -2.5 * want.std(), 2.5 * want.std())
    scale = np.abs(want).max()
    # The variance of one draw is s |g| - g^2: four independent workers have a quarter of it.
    variance = (scale * np.abs(want) - want**2) / W
    certain = variance < 1e-5
    np.testing.assert_allclose(kernels.mean(0)[certain], want[certain], rtol=1e-4)
    kernels, want, variance = kernels[:, ~certain], want[~certain], variance[~certain]
    deviations = (kernels.mean(0) - want) / np.sqrt(variance / num_steps)
    assert np.abs(deviations).max() < 6
    assert abs(np.mean(deviations**2) - 1) < 0.25
    assert abs(np.mean((kernels - want) ** 2 / variance) - 1) < 0.1


# ========================================================================================= powersgd


def kept(run: Run) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf, np.float64) for name, leaf in run.memory.residual.items()}


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_powersgd_projects_the_mean_and_keeps_what_that_lacks(rank: int):
    run, own = (
        fresh(f"powersgd{rank}"),
        {"half": np.zeros((W, 64, 32)), "head/kernel": np.zeros((W, 2, 32, 64))},
    )
    for seed in range(4):
        given = gradients(10 + seed)
        rights = {path: np.asarray(q, np.float64) for path, q in run.state.shared.items()}
        before, updates = {path: flat(given)[path] + own[path] for path in own}, run.step(given)
        own = kept(run)
        assert set(own) == {"half", "head/kernel"}
        for path in own:
            matrix = before[path].mean(0).reshape(-1, SHAPES[path][-1])
            left = np.linalg.qr(matrix @ rights[path])[0]  # the algorithm, on the mean
            tolerance = 1e-2 if path == "half" else 1e-5
            want = left @ (left.T @ matrix)
            np.testing.assert_allclose(
                first(updates)[path].reshape(-1, SHAPES[path][-1]), want, atol=tolerance
            )
            np.testing.assert_allclose(
                own[path].mean(0).reshape(-1, SHAPES[path][-1]), matrix - want, atol=1e-5
            )
            # Every worker keeps its own less what all were given.
            np.testing.assert_allclose(own[path], before[path] - want.reshape(SHAPES[path]), atol=1e-5)
            np.testing.assert_allclose(run.state.shared[path], matrix.T @ left, atol=1e-4)
        for path in ("scale", "head/bias"):
            np.testing.assert_allclose(first(updates)[path], mean(given)[path], atol=1e-6)


@pytest.mark.parametrize("mean_rank", [1, 2, 4])
def test_powersgd_is_exact_where_the_mean_has_no_higher_rank(mean_rank: int):
    run, given = fresh("powersgd4"), gradients(6)
    rng = np.random.default_rng(7)
    low = rng.normal(size=(64, mean_rank)) @ rng.normal(size=(mean_rank, 64))
    apart = rng.normal(size=(W, 64, 64))  # workers differ by much more, of full rank
    given["head"]["kernel"] = (low + apart - apart.mean(0)).reshape(W, 2, 32, 64).astype(np.float32)
    for _ in range(2):  # from a Q of lower rank, too
        update = first(run.step(given))["head/kernel"]
        np.testing.assert_allclose(update.reshape(64, 64), low, atol=1e-4)


# ============================================================================================== dgc


def test_dgc_sends_the_largest_of_what_it_has_gathered_and_clears_both_there():
    run = fresh("dgc", **DGC)
    velocity = {path: np.zeros((W, *shape)) for path, shape in SHAPES.items()}
    unsent = {path: np.zeros((W, *SHAPES[path])) for path in ("half", "head/kernel")}
    for seed, density in enumerate([1 / 4, 1 / 16, 0.02, 0.02, 0.02, 0.02]):
        given = gradients(20 + seed)
        updates = run.step(given)
        norms = np.sqrt(sum((leaf.reshape(W, -1) ** 2).sum(1) for leaf in flat(given).values()))
        assert (norms > 20).all()
        counts = {path: math.ceil(density * math.prod(SHAPES[path])) for path in unsent}
        for path, leaf in flat(given).items():
            clipped = leaf * (10 * 2 / norms).reshape(-1, *[1] * (leaf.ndim - 1))
            velocity[path] = 0.5 * velocity[path] + clipped
            sent = velocity[path].copy()
            if path in unsent:
                gathered = unsent[path] + velocity[path]
                mask = (
                    kept(run)[f"unsent/{path}"] == 0
                )  # what it has sent: the right number, none larger left
                assert (mask.reshape(W, -1).sum(1) == counts[path]).all()
                for worker in range(W):
                    magnitudes = np.abs(gathered[worker])
                    least, most = magnitudes[mask[worker]].min(), magnitudes[~mask[worker]].max()
                    assert least >= most - 1e-6
                sent, unsent[path] = gathered * mask, gathered * ~mask
                velocity[path] = velocity[path] * ~mask
                np.testing.assert_allclose(kept(run)[f"unsent/{path}"], unsent[path], atol=1e-5)
                # Nothing is lost: what is sent and what is kept are what was gathered.
                np.testing.assert_allclose(sent + kept(run)[f"unsent/{path}"], gathered, atol=1e-5)
            np.testing.assert_allclose(kept(run)[f"velocity/{path}"], velocity[path], atol=1e-5)
            rounding = 1e-2 if path == "half" else 1e-5
            np.testing.assert_allclose(first(updates)[path], sent.mean(0), atol=rounding)
        assert run.info.wire_bytes == 3 * 8 * sum(counts.values()) + allreduce(4 * 33)


@pytest.mark.parametrize(
    ("options", "named"), [({"density": 0.0}, "density"), ({"warmup_steps": -1}, "warmup")]
)
def test_dgc_refuses_what_it_cannot_do(options: dict[str, Any], named: str):
    with pytest.raises(ValueError, match=f"dgc: expected .*{named}"):
        baselines.dgc(AXIS, W, **options)


# ======================================================================================== accordion


def routes_by_region(run: Run, plan: nf_jax.Plan) -> dict[int, set[int]]:
    table: dict[int, set[int]] = {}
    for region, fixed, route in zip(plan.lanes.regions, plan.lanes.fixed, run.info.routes, strict=True):
        if fixed is None:
            table.setdefault(region, set()).add(int(route))
    return table


def test_accordion_goes_exact_where_a_norm_changes_and_there_alone():
    run, given = fresh("accordion"), gradients(8)
    params = jax.tree.map(lambda leaf: leaf[0], given)
    plan = nf_jax.plan(baselines.profile_of("accordion", params, **ACCORDION), params, W)
    # Intervals of two steps, and the size of "half" in each; the rest does not change.
    sizes, taken = [1, 1, 1, 1.9, 1.9, 0.9, 1.2, 1.2], []
    for size in sizes:
        for _ in range(2):
            run.step(given | {"half": (given["half"] * np.float32(size)).astype(given["half"].dtype)})
            found = routes_by_region(run, plan)
            assert all(len(routes) == 1 for routes in found.values()) and len(found) == 2
            # Beside what its routes send: a norm for each of two regions, to three others.
            assert run.info.wire_bytes == plan.wire_bytes(run.info.routes.tolist()) + 3 * 2 * 4
            taken.append((found[0].pop(), found[1].pop()))
    exact, sign = Route.FP32, Route.SIGN
    want = [(exact, exact)] * 2  # two intervals to compare, then: alike; +90 %; alike; -53 %; +33 %
    want += [(sign, sign)] * 2 + [(exact, sign), (sign, sign), (exact, sign), (sign, sign)]
    assert taken == [pair for pair in want for _ in range(2)]


def test_accordion_adds_up_to_the_gradients_whatever_it_decides():
    run, given, total = fresh("accordion"), gradients(9), 0.0
    for _ in range(12):
        total = total + first(run.step(given))["head/kernel"]
    memory = run.memory
    assert run.info.next_routes.any()
    owed = np.asarray(memory.residual["head/kernel"], np.float64).mean(0)
    reduced = np.asarray(memory.server_residual["head/kernel"], np.float64)
    assert np.linalg.norm(owed) > 0
    missing = 12 * mean(given)["head/kernel"] - total - owed
    np.testing.assert_allclose(np.linalg.norm(missing), np.linalg.norm(reduced), rtol=1e-3)


def test_accordion_decides_for_every_leaf_unless_told_otherwise():
    params = {"a.b": jnp.ones((8, 8)), "axb": jnp.ones((8, 8))}
    profile = baselines.profile_of("accordion", params, eta=0.2)
    assert nf_jax.plan(profile, params, W).leaf_regions == (0, 1)
    assert nf_jax.plan(baselines.profile_of("accordion", jnp.ones(3)), jnp.ones(3), W).leaf_regions == (0,)
    assert baselines.profile_of("dgc", params, density=0.1) == exact_profile()
    with pytest.raises(ValueError, match="accordion: expected eta above 0"):
        baselines.accordion(AXIS, W, eta=0.0)


# ========================================================================================== in use


def test_the_training_step_takes_a_baseline_as_it_is():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(W, 16, 24)).astype(np.float32)
    tx = optax.chain(baselines.BASELINES["powersgd2"](AXIS, W), optax.sgd(0.1, momentum=0.9))
    state = training.TrainState.create(apply_fn=None, params={"kernel": jnp.zeros((24, 24))}, tx=tx)
    step = training.pmap_step(
        lambda params, x: jnp.mean((x @ params["kernel"] - 2 * x) ** 2), devices=jax.devices()[:W]
    )
    state, losses = training.replicate(state, jax.devices()[:W]), []
    for _ in range(40):
        state, metrics = step(state, x)
        losses.append(float(metrics["loss"][0]))
    assert losses[-1] < losses[0] / 10
    assert rows_are_equal(jax.device_get(state.params))
    info = nf_jax.step_info(state)
    assert info.step == 39 and info.wire_bytes == allreduce(4 * 2 * 48)
    ((_, aggregate),) = find_states(state)
    assert not rows_are_equal(jax.device_get(aggregate.memory))


# ========================================================================================== misuse


@pytest.mark.parametrize("name", baselines.BASELINES)
def test_one_level_of_workers_is_all_they_know(name: str):
    with pytest.raises(ValueError, match="num_workers: expected a positive int"):
        baselines.BASELINES[name](AXIS, (2, 2))


@pytest.mark.parametrize("name", baselines.BASELINES)
def test_leaves_that_are_not_real_are_an_error_that_names_them(name: str):
    tx = baselines.BASELINES[name](AXIS, W)
    with pytest.raises(ValueError, match=r"expected leaves of floating point.*'count'"):
        tx.init({"count": jnp.zeros(3, jnp.int32), "kernel": jnp.zeros(3)})


def test_an_unknown_name_and_a_rank_below_one_are_errors():
    with pytest.raises(ValueError, match=r"expected one of signsgd, .* got 'qsgd'"):
        baselines.profile_of("qsgd", {})
    with pytest.raises(ValueError, match="expected a rank of at least 1"):
        baselines.powersgd(AXIS, W, rank=0)


def test_gradients_that_are_already_summed_are_an_error():
    tx = baselines.BASELINES["terngrad"](AXIS, W)

    def update(local: Any, shared: Any) -> Any:
        return tx.update(jax.lax.psum(local, AXIS), shared)[0]

    with pytest.raises(ValueError, match="already summed"):
        mapped(update, W, "checked")(jnp.ones((W, 8)), tx.init(jnp.ones(8)))


def test_a_state_of_all_workers_where_one_is_expected_is_an_error():
    tx = baselines.BASELINES["dgc"](AXIS, W)
    state: Any = tx.init(jnp.ones((8, 8)))
    memory = jax.tree.map(lambda leaf: jnp.repeat(leaf, W, 0), state.aggregate.memory)
    whole = state._replace(aggregate=state.aggregate._replace(memory=memory))

    def update(local: Any, shared: Any) -> Any:
        return tx.update(local, shared)[0]

    with pytest.raises(ValueError, match="under the wrong PartitionSpec"):
        mapped(update, W, "unchecked")(jnp.ones((W, 8, 8)), whole)
