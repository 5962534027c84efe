"""Laws of checkpoints on disk: whole or refused by name, with the one before in reserve, read by anyone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh
from states import drawn, same_bits

import nf_jax
from nf_jax import checkpoint, elastic, training
from nf_jax.host_state import host_state
from nf_jax.profile import Codec, Leaf, Model, Phase, Profile, Region, Route

W = 4
SHAPES = {"dense/kernel": (64, 64), "dense/bias": (64,)}
DEVICES = jax.devices()[:W]
MESH = Mesh(np.asarray(DEVICES), ("batch",), axis_types=(AxisType.Auto,))


def params_of(**more: tuple[int, ...]) -> Any:
    return {path: jnp.ones(shape) for path, shape in {**SHAPES, **more}.items()}


def fresh(num_workers: int = W, profile: Profile | None = None, params: Any = None, **fields: Any) -> Any:
    """One worker's view of a TrainState."""
    profile = Profile.static(Route.SIGN) if profile is None else profile
    first = nf_jax.aggregate_gradients(profile, axis="batch", num_workers=num_workers)
    tx = optax.chain(first, optax.adam(0.1))
    params = params_of() if params is None else params
    return training.TrainState.create(apply_fn=None, params=params, tx=tx, **fields)


@pytest.fixture(scope="module")
def state() -> Any:
    return drawn(fresh())


LAYOUTS = {
    "pmap": lambda state: training.replicate(state, DEVICES),
    "shard_map": lambda state: training.place(state, MESH),
}


def damage(path: Path, how: str) -> None:
    files = [file for file in path.rglob("*") if file.is_file() and file.stat().st_size]
    file = max(files, key=lambda file: file.stat().st_size) if how == "flipped" else path / "nf_jax.json"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    {"missing": file.unlink, "torn": lambda: file.write_bytes(data[:50])}.get(
        how, lambda: file.write_bytes(data)
    )()


@pytest.mark.parametrize("how", ["flipped", "torn", "missing"])
def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_it_is_used(how, state, tmp_path):
    earlier = LAYOUTS["pmap"](drawn(fresh(), seed=1))
    checkpoint.save(tmp_path, earlier, step=1)
    checkpoint.save(tmp_path, LAYOUTS["pmap"](state), step=2)
    damage(tmp_path / "2", how)
    with pytest.warns(RuntimeWarning, match=rf"(?s){tmp_path}/2 is torn or corrupted.*Using {tmp_path}/1"):
        back = checkpoint.restore(tmp_path, earlier)
    assert same_bits(back, earlier)
    with pytest.raises(ValueError, match=f"{tmp_path}/2 is torn"):  # a step that is asked for is that step
        checkpoint.restore(tmp_path, earlier, step=2)
    damage(tmp_path / "1", how)
    with pytest.raises(ValueError, match=rf"(?s)found none:.*{tmp_path}/2 is torn.*{tmp_path}/1 is torn"):
        checkpoint.restore(tmp_path, earlier)


def test_a_damaged_checkpoint_is_replaced_and_a_whole_one_is_not(state, tmp_path):
    placed = LAYOUTS["shard_map"](state)
    checkpoint.save(tmp_path, placed, step=3)
    with pytest.raises(ValueError, match=f"{tmp_path}/3 exists already"):
        checkpoint.save(tmp_path, placed, step=3)
    damage(tmp_path / "3", "flipped")
    checkpoint.save(tmp_path, placed, step=3)
    assert same_bits(checkpoint.restore(tmp_path, placed), placed)


def test_the_latest_are_kept_and_a_later_branch_is_left_alone(state, tmp_path):
    placed = LAYOUTS["shard_map"](state)
    for step in (5, 30, 9, 10, 11):
        checkpoint.save(tmp_path, placed, step=step, keep=2)
    assert sorted(int(child.name) for child in tmp_path.iterdir()) == [10, 11, 30]
    with pytest.raises(ValueError, match="keep: expected at least 1, got 0"):
        checkpoint.save(tmp_path, placed, step=12, keep=0)


def test_only_a_folder_with_a_number_for_a_name_is_a_checkpoint(state, tmp_path):
    """What is being written, deleted, or is somebody else's fools no reader; saving clears its own away."""
    names = ["8.partial", "7.old.partial", "9.partial.orbax-checkpoint-tmp", "010", "notes", "v2.partial"]
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / "11").write_text("a file")
    assert checkpoint.latest_step(tmp_path) is None
    with pytest.raises(ValueError, match=f"expected a checkpoint in {tmp_path}, found none"):
        checkpoint.restore(tmp_path, state)
    checkpoint.save(tmp_path, LAYOUTS["pmap"](state), step=1)
    assert sorted(child.name for child in tmp_path.iterdir()) == ["010", "1", "11", "notes", "v2.partial"]


# ---------------------------------------------------------------------------- other layouts and workers


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_is_read_whatever_layout_and_workers_it_was_saved_with(layout, state, tmp_path):
    checkpoint.save(tmp_path, LAYOUTS[layout](state), step=1)
    for num_workers in (1, 2, W, 8):
        assert same_bits(checkpoint.read(tmp_path, fresh(num_workers)), state)
    back = checkpoint.read(tmp_path, jax.eval_shape(fresh))
    for place in LAYOUTS.values():
        assert same_bits(place(back), state)


def test_a_checkpoint_goes_on_under_the_other_mapping(state, tmp_path):
    checkpoint.save(tmp_path, LAYOUTS["pmap"](state), step=1)
    placed = LAYOUTS["shard_map"](fresh())
    with pytest.raises(ValueError, match=r"(?s)layout that was saved.*checkpoint\.read"):
        checkpoint.restore(tmp_path, placed)
    moved = LAYOUTS["shard_map"](checkpoint.read(tmp_path, fresh()))
    assert same_bits(moved, state)
    shardings = [jax.tree.map(lambda x: x.sharding, jax.tree.leaves(x)) for x in (moved, placed)]
    assert shardings[0] == shardings[1]


def test_what_workers_should_share_but_do_not_is_named(state, tmp_path):
    stacked = LAYOUTS["pmap"](state)
    apart = np.asarray(stacked.params["dense/bias"]).copy()
    apart[2, 5] += 1
    stacked = stacked.replace(params={**stacked.params, "dense/bias": apart})
    checkpoint.save(tmp_path, stacked, step=1)
    with pytest.raises(ValueError, match="workers differ in params/dense/bias"):
        checkpoint.read(tmp_path, fresh())


def test_a_shadow_is_laid_out_like_the_residuals_and_left_out_of_what_is_read(tmp_path):
    tx = nf_jax.aggregate_gradients(Profile.static(Route.FP32), axis="batch", num_workers=W, shadow=True)
    shadowed = drawn(tx.init(params_of()))
    assert jax.tree.leaves(shadowed.shadow.memory)
    for place in LAYOUTS.values():
        assert same_bits(place(shadowed), shadowed)
    checkpoint.save(tmp_path, LAYOUTS["pmap"](shadowed), step=1)
    without = shadowed._replace(shadow=None)
    assert same_bits(checkpoint.read(tmp_path, tx.init(params_of())), without)
    plan = nf_jax.plan(Profile.static(Route.FP32), params_of(), 2)
    assert elastic.resize(shadowed, Profile.static(Route.FP32), plan).state.shadow is None


# ------------------------------------------------------------------------------------------- refusals


def test_a_state_that_was_unreplicated_does_not_come_back_for_several_workers(state):
    """The usual idiom of pmap keeps one residual of `W`; saving it is an error too."""
    lost = jax.tree.map(lambda x: x[0], LAYOUTS["pmap"](state))
    for place in (*LAYOUTS.values(), host_state):
        with pytest.raises(ValueError, match="was unreplicated, and the other workers' residuals are gone"):
            place(lost)


def sign(**codec: Any) -> Profile:
    return Profile.static(Route.SIGN, **codec)


def test_another_profile_is_refused_even_where_all_shapes_are_the_same(state, tmp_path):
    checkpoint.save(tmp_path, LAYOUTS["pmap"](state), step=1)
    other = fresh(profile=sign(scale="leaf"))
    assert jax.tree.map(np.shape, jax.tree.leaves(other)) == jax.tree.map(np.shape, jax.tree.leaves(fresh()))
    with pytest.raises(ValueError, match=r"other regions, buckets, routes, codecs.*\.opt_state\[0\]"):
        checkpoint.restore(tmp_path, LAYOUTS["pmap"](other))
    plan = nf_jax.plan(sign(scale="leaf"), params_of(), W)
    moved = elastic.resize(checkpoint.read(tmp_path, other), sign(scale="leaf"), plan)
    assert same_bits(moved.state.opt_state[0].memory, state.opt_state[0].memory)


def test_an_old_profile_on_a_changed_model_is_refused_with_the_leaves_that_differ(state, tmp_path):
    """The profile's own model speaks first, where it has one; else the checkpoint's leaves do."""
    changed = {"dense/kernel": jnp.ones((64, 32)), "dense/bias": jnp.ones(64), "new/kernel": jnp.ones((8, 8))}
    model = Model(
        name="small",
        leaves=tuple(Leaf(path=path, shape=shape, dtype="float32") for path, shape in SHAPES.items()),
    )
    calibrated = sign().model_copy(update={"model": model})
    fresh(profile=calibrated)  # its own model
    with pytest.raises(ValueError, match=r"(?s)model 'small', got another.*new/kernel.*dense/kernel"):
        fresh(profile=calibrated, params=changed)
    checkpoint.save(tmp_path, LAYOUTS["pmap"](state), step=1)
    named = r"(?s)\.params\['dense/kernel'\].*\.params\['new/kernel'\]"
    with pytest.raises(ValueError, match=named):
        checkpoint.restore(tmp_path, LAYOUTS["pmap"](fresh(params=changed)))
    with pytest.raises(ValueError, match=named):
        checkpoint.read(tmp_path, fresh(params=changed))


def test_a_state_of_other_regions_is_not_resized(state):
    two = Profile(
        name="two",
        regions=(Region(name="bias", pattern=".*bias", codec=Codec()), Region(name="rest", pattern=".*")),
        phases=(Phase(start_step=0, routes={"bias": Route.FP32, "rest": Route.SIGN}),),
    )
    with pytest.raises(ValueError, match=r"expected a state of 2 regions and 2 lanes.*got 1 and 1"):
        elastic.resize(state, two, nf_jax.plan(two, params_of(), 2))
