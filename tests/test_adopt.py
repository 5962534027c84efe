"""Laws of nf_jax coming into a run and leaving it: the optimizer does not notice."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from states import drawn, same_bits

import nf_jax
from nf_jax import checkpoint, training
from nf_jax.adopt import adopt, take_out
from nf_jax.host_state import host_state
from nf_jax.profile import Profile, Route
from nf_jax.state import find_states

W = 4
PARAMS = {"kernel": jnp.ones((64, 64)), "layers": [{"bias": jnp.ones(3)}, {"bias": jnp.ones(3)}]}


def first() -> Any:
    return nf_jax.aggregate_gradients(Profile.static(Route.SIGN), axis="batch", num_workers=W)


SCHEDULE = optax.cosine_decay_schedule(0.1, 100)
CHAINS: dict[str, tuple[Any, Any]] = {
    "an optimizer": (optax.adamw(SCHEDULE), lambda tx: optax.chain(first(), tx)),
    "a chain": (
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
        lambda _: optax.chain(first(), optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
    ),
    "a chain as one": (
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9)),
        lambda tx: optax.chain(first(), tx),
    ),
    "wrapped": (
        optax.adamw(0.1),
        lambda tx: optax.chain(first(), optax.apply_if_finite(tx, 5)),
    ),
}


def plain_of(tx: Any) -> Any:
    """A state of the plain optimizer after some training: numbers drawn."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: (rng.normal(size=x.shape) * 3).astype(x.dtype) if x.ndim else np.asarray(9, x.dtype),
        tx.init(PARAMS),
    )


@pytest.mark.parametrize("name", ["an optimizer", "a chain", "a chain as one"])
def test_a_plain_optimizers_state_comes_in_and_goes_out_again_to_the_bit(name):
    tx, around = CHAINS[name]
    plain, fresh = plain_of(tx), around(tx).init(PARAMS)
    adopted = adopt(plain, fresh)
    assert jax.tree.structure(adopted) == jax.tree.structure(fresh)
    ((_, ours),) = find_states(adopted)
    assert same_bits(ours, find_states(fresh)[0][1])
    back = take_out(drawn_ours(adopted), tx.init(PARAMS))
    assert jax.tree.structure(back) == jax.tree.structure(plain) and same_bits(back, plain)
    gradients = jax.tree.map(lambda x: x / 3, PARAMS)
    with jax.numpy_dtype_promotion("standard"):
        updates = [tx.update(gradients, state, PARAMS)[0] for state in (plain, back)]
    assert same_bits(*updates)


def drawn_ours(state: Any) -> Any:
    """The state with nf_jax's part as training leaves it."""
    return tuple(drawn(part) if find_states(part) else part for part in state)


def train_state(tx: Any) -> Any:
    state = training.TrainState.create(apply_fn=None, params=PARAMS, tx=tx)
    return state.replace(step=jnp.int32(0))


def test_a_checkpoint_of_the_plain_optimizer_is_adopted_and_trained_on(tmp_path):
    tx = optax.sgd(0.1, momentum=0.5)
    plain = train_state(tx).replace(step=jnp.int32(31), opt_state=plain_of(tx))
    checkpoint.save(tmp_path, plain)
    restored = checkpoint.restore(tmp_path, train_state(tx))
    fresh = train_state(optax.chain(first(), tx))
    state = training.replicate(adopt(restored, fresh), jax.devices()[:W])

    def loss_fn(params: Any, batch: Any) -> Any:
        biases = sum(jnp.vdot(layer["bias"], layer["bias"]) for layer in params["layers"])
        return jnp.mean(batch @ params["kernel"]) + biases

    step = training.pmap_step(loss_fn, devices=jax.devices()[:W], donate=False)
    after, _ = step(state, np.ones((W, 2, 64), np.float32))
    assert int(after.step[0]) == 32 and int(nf_jax.step_info(after).step) == 0
    momentum = plain.opt_state[0].trace["layers"][0]["bias"]  # a bias travels exactly: g + 0.5 * momentum
    expected = PARAMS["layers"][0]["bias"] - np.float32(0.1) * (2 + momentum / 2)
    np.testing.assert_allclose(after.params["layers"][0]["bias"][0], expected, rtol=1e-6)
    out = take_out(host_state(after), train_state(tx))
    assert same_bits(out.opt_state, jax.tree.map(lambda x: x[0], after.opt_state[1]))


def test_another_optimizer_or_model_is_refused_with_the_leaves_that_differ():
    tx, around = CHAINS["an optimizer"]
    fresh = around(tx).init(PARAMS)
    with pytest.raises(ValueError, match=r"(?s)leaves differ.*\.mu\['kernel'\]: expected float32\[64, 64\]"):
        adopt(optax.sgd(0.1, momentum=0.9).init(PARAMS), fresh)
    with pytest.raises(
        ValueError, match=r"\.mu\['kernel'\]: expected float32\[64, 64\], got float32\[64, 32\]"
    ):
        adopt(tx.init({**PARAMS, "kernel": jnp.ones((64, 32))}), fresh)
    tx, around = CHAINS["wrapped"]
    with pytest.raises(ValueError, match=r"\.notfinite_count: expected int32\[\], got none"):
        adopt(tx.init(PARAMS), around(tx).init(PARAMS))
    stacked = jax.tree.map(lambda x: np.stack([x] * W), tx.init(PARAMS))
    with pytest.raises(ValueError, match=r"got int32\[4\](?s:.)*one copy \(unreplicate"):
        adopt(stacked, optax.chain(first(), tx).init(PARAMS))


def test_what_is_in_already_or_out_already_is_refused():
    tx, around = CHAINS["an optimizer"]
    plain, ours = tx.init(PARAMS), around(tx).init(PARAMS)
    for call, message in (
        (lambda: adopt(ours, ours), "expected plain to hold 0 states .* got 1, at 0"),
        (lambda: adopt(plain, plain), "expected fresh to hold 1 states .* got 0"),
        (lambda: take_out(plain, plain), "expected state to hold 1 states .* got 0"),
        (lambda: take_out(ours, ours), "expected plain to hold 0 states .* got 1"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
