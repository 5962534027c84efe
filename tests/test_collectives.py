"""Laws of what crosses workers: the same bits everywhere, and misuse is said at trace time."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import workers
from workers import AXIS, MODES, mapped, rows_are_equal

from nf_jax import collectives


def run(function: Any, values: Any, mode: str = "unchecked", shared: Any = None) -> Any:
    num_workers = jax.tree.leaves(values)[0].shape[0]
    return mapped(function, num_workers, mode)(values, shared)


def per_worker(num_workers: int, *shape: int) -> np.ndarray:
    rng = np.random.default_rng(num_workers)
    spread = np.exp(rng.normal(size=shape) * 3)
    return (rng.normal(size=(num_workers, *shape)) * spread).astype(np.float32)


# ---------------------------------------------------------------------------------------- misuse


@pytest.mark.parametrize("mode", MODES)
def test_an_axis_of_the_right_size_is_accepted(mode: str):
    def check(x: jax.Array, _: Any) -> jax.Array:
        collectives.check_axis(AXIS, 3)
        collectives.check_axis((AXIS,), 3)
        return x

    run(check, per_worker(3, 2), mode)


@pytest.mark.parametrize("mode", MODES)
def test_an_axis_of_another_size_says_what_to_pass(mode: str):
    def check(x: jax.Array, _: Any) -> jax.Array:
        collectives.check_axis(AXIS, 8)
        return x

    with pytest.raises(ValueError, match=r"num_workers=8.*'batch' has 3 .*Pass num_workers=3"):
        run(check, per_worker(3, 2), mode)


def test_an_axis_that_is_not_bound_says_where_to_call():
    with pytest.raises(ValueError, match=r"axis 'batch'.*inside the mapped function"):
        collectives.check_axis(AXIS, 3)
    with pytest.raises(ValueError, match=r"axis 'data'.*no such axis"):
        run(lambda x, _: collectives.check_axis("data", 3) or x, per_worker(3, 2))


def summed_gradient(params: Any, local: jax.Array) -> jax.Array:
    return jax.grad(lambda p: jnp.sum(p * local))(params)


@pytest.mark.parametrize("mode", MODES)
def test_gradients_that_are_already_summed_are_an_error_that_names_them(mode: str):
    def check(x: jax.Array, params: jax.Array) -> jax.Array:
        gradients = [summed_gradient(params, x), x]
        collectives.check_local(gradients, ["dense/kernel", "x"], AXIS)
        return gradients[0]

    params = np.ones(2, np.float32)
    if mode != "checked":  # there, JAX does not sum by itself
        np.testing.assert_array_equal(run(check, per_worker(3, 2), mode, params), per_worker(3, 2))
        return
    message = r"'dense/kernel' do.*pcast\(params, 'batch', to='varying'\).*check_vma=False"
    with pytest.raises(ValueError, match=message):
        run(check, per_worker(3, 2), mode, params)


def test_local_parameters_give_local_gradients():
    def check(x: jax.Array, params: jax.Array) -> jax.Array:
        local = jax.lax.pcast(params, AXIS, to="varying")
        gradient = summed_gradient(local, x)
        collectives.check_local([gradient], ["dense/kernel"], AXIS)
        return gradient

    values = per_worker(3, 2)
    np.testing.assert_array_equal(run(check, values, "checked", np.ones(2, np.float32)), values)


def test_many_summed_leaves_are_listed_in_part():
    def check(x: jax.Array, params: jax.Array) -> jax.Array:
        collectives.check_local([params] * 7, [f"w{i}" for i in range(7)], AXIS)
        return x

    with pytest.raises(ValueError, match="'w0', 'w1', 'w2', 'w3', 'w4' and 2 more"):
        run(check, per_worker(3, 2), "checked", np.ones(2, np.float32))


def test_a_branch_on_what_differs_between_workers_is_an_error():
    def check(x: jax.Array, _: Any) -> jax.Array:
        collectives.check_uniform(jax.lax.pmax(x, AXIS), AXIS, "the route")
        collectives.check_uniform(x, AXIS, "the route")
        return x

    with pytest.raises(ValueError, match="the route differs between the workers of axis 'batch'"):
        run(check, per_worker(3), "checked")


@pytest.mark.parametrize("mode", MODES)
def test_what_varies_is_known_where_jax_checks_it(mode: str):
    def check(x: jax.Array, shared: jax.Array) -> jax.Array:
        checked = mode == "checked"
        assert collectives.is_checked(AXIS) == checked == collectives.is_checked((AXIS,))
        assert collectives.varies(x, AXIS) == checked
        assert not collectives.varies(shared, AXIS)
        local = collectives.varying(shared, AXIS)
        assert collectives.varies(local, AXIS) == checked
        return collectives.varying(local, AXIS)  # again is no error

    run(check, per_worker(3, 2), mode, np.ones(2, np.float32))


# -------------------------------------------------------------------------------------- movement


ROW_FACTORS = (1 + np.arange(48, dtype=np.float32)).reshape(2, 24)  # of two stacks, up to three rows a worker
MEAN_DTYPES: tuple[Any, ...] = ("float32", "bfloat16", "float16", "complex64")


@functools.cache
def moved(num_workers: int, mode: str, num: int) -> dict[str, np.ndarray]:
    """All movements of one `f32[W, n]` at once, so that each cell is compiled once."""

    def move(x: jax.Array, _: Any) -> Any:
        gathered, agreed = collectives.gather(x, AXIS), collectives.agree(x, AXIS)
        if mode == "checked":  # so that routes and health may depend on it
            assert not collectives.varies(gathered, AXIS) and not collectives.varies(agreed, AXIS)
        blocks = jnp.stack([x * np.float32(i + 1) for i in range(num_workers)])
        return {
            "gather": gathered,
            "agree": agreed,
            "exchange": collectives.exchange(blocks, AXIS),
            "mean": collectives.mean_exact([x, x[:1]], AXIS),
            "leaves": collectives.mean_leaves([x.astype(d) for d in MEAN_DTYPES], AXIS),
            "index": collectives.worker_index(AXIS),
            "rows": collectives.mean_of_rows(x * ROW_FACTORS[:, : 3 * num_workers, None], AXIS),
        }

    return jax.tree.map(np.asarray, run(move, per_worker(num_workers, num), mode))


CELLS = [(2, mode, 37) for mode in MODES] + [(8, mode, 37) for mode in MODES]
CELLS += [(3, "pmap", 5), (5, "unchecked", 1), (1, "checked", 4)]
each_cell = pytest.mark.parametrize("cell", CELLS, ids=str)


@each_cell
def test_every_worker_has_the_mean_of_its_own_rows_added_in_worker_order(cell: Any):
    num_workers, _, num = cell
    values = per_worker(num_workers, num)[:, None, None]
    stacks = values * ROW_FACTORS[:, : 3 * num_workers, None]  # [W, k, rows, n]
    mean = functools.reduce(np.add, stacks) * np.float32(1 / num_workers)
    found = moved(*cell)["rows"]
    for worker, rows in enumerate(found):
        np.testing.assert_array_equal(rows, mean[:, 3 * worker : 3 * worker + 3])


@pytest.mark.parametrize(("platform", "found"), [("cpu", "all_to_all"), ("cuda", "reduce_scatter")])
def test_rows_are_scattered_by_what_the_platform_does_well(platform: str, found: str):
    function = mapped(lambda x, _: collectives.mean_of_rows(x, AXIS), 4, "unchecked")
    lowered = function.trace(np.zeros((4, 1, 8, 2), np.float32), None).lower(lowering_platforms=(platform,))
    operations = set(re.findall(r"all_to_all|reduce_scatter", lowered.as_text()))
    assert operations == {found}


@each_cell
def test_gather_hands_all_to_all_in_worker_order(cell: Any):
    num_workers, _, num = cell
    for row in moved(*cell)["gather"]:
        np.testing.assert_array_equal(row, per_worker(num_workers, num))
    np.testing.assert_array_equal(moved(*cell)["index"], np.arange(num_workers))


@each_cell
def test_exchange_hands_shard_i_to_worker_i(cell: Any):
    num_workers, _, num = cell
    values, found = per_worker(num_workers, num), moved(*cell)["exchange"]
    for receiver in range(num_workers):
        np.testing.assert_array_equal(found[receiver], values * np.float32(receiver + 1))


def to_bf16(values: np.ndarray) -> np.ndarray:
    return values.astype(jnp.bfloat16).astype(np.float32)


@each_cell
def test_agree_is_the_mean_of_what_travels_as_bf16(cell: Any):
    num_workers, _, num = cell
    found = moved(*cell)["agree"]
    assert rows_are_equal(found) and found.dtype == np.float32
    arrived = to_bf16(per_worker(num_workers, num))
    mean = arrived.astype(np.float64).mean(0)
    # Half a unit in the last of bf16's 8 places, for the mean's own way back (two workers: none);
    # the sum itself is f32, whose error follows the largest term.
    slack = np.abs(arrived).max(0) * num_workers * 2.0**-23
    tolerance = slack + (0 if num_workers == 2 else np.abs(mean) * 2.0**-8)
    assert (np.abs(found[0] - mean) <= tolerance).all()


@each_cell
def test_the_exact_mean_is_in_the_leafs_dtype(cell: Any):
    num_workers, _, num = cell
    values, found = per_worker(num_workers, num), moved(*cell)
    slack = np.abs(values).max() * num_workers * 2.0**-23
    for mean, expected in zip(found["mean"], (values, values[:, :1]), strict=True):
        assert rows_are_equal(mean)
        np.testing.assert_allclose(mean[0], expected.astype(np.float64).mean(0), atol=slack)
    for mean, dtype in zip(found["leaves"], MEAN_DTYPES, strict=True):
        assert mean.dtype == dtype and rows_are_equal(mean)
        exact = values.astype(dtype).astype(np.complex128).mean(0)
        eps = float(jnp.finfo(dtype).eps)
        tolerance = eps * np.abs(exact) + slack + 2.0**-24
        assert (np.abs(mean[0].astype(np.complex128) - exact) <= tolerance).all()


INTEGERS = {
    "rounded": np.arange(-40, 40).reshape(8, 10).astype(np.int32),
    "half to even": np.repeat([[1], [2]], 4, axis=0).astype(np.int32) + np.arange(8, dtype=np.int32),
    "beyond f32": np.full((8, 2), 2**24 + 1, np.int32),
    "int8": np.full((8, 3), 100, np.int8),
    "minus": np.full((8, 3), -128, np.int8),
    "uint8": np.full((8, 3), 255, np.uint8),
    "uint16": np.full((8, 3), 65535, np.uint16),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_workers", (1, 8))
def test_the_mean_of_integers_is_the_nearest_one(num_workers: int, mode: str):
    values = {name: leaf[:num_workers] for name, leaf in INTEGERS.items()}
    means = run(
        lambda x, _: dict(zip(x, collectives.mean_leaves(list(x.values()), AXIS), strict=True)),
        values,
        mode,
    )
    for name, leaf in values.items():
        assert means[name].dtype == leaf.dtype
        expected = np.round(leaf.astype(np.float64).mean(0)).astype(leaf.dtype)
        np.testing.assert_array_equal(means[name][0], expected, err_msg=name)


@pytest.mark.parametrize("num_workers", (2, 8))
def test_the_three_ways_move_the_same_bits(num_workers: int):
    cells = [moved(num_workers, mode, 37) for mode in MODES]
    for other in cells[1:]:
        jax.tree.map(np.testing.assert_array_equal, cells[0], other)


def test_half_precision_travels_as_two_bytes():
    function = mapped(lambda x, _: collectives.agree(x, AXIS), 8, "unchecked")
    text = function.lower(per_worker(8, 40), None).compile().as_text()
    assert workers.sent_bytes(text, 8) == 2 * 7 * 2 * 5  # two phases of 5 numbers for 7 others


@pytest.mark.parametrize("mode", MODES)
def test_a_value_that_is_not_finite_stays_so_in_agree(mode: str):
    values = per_worker(4, 9)
    values[1, 2], values[3, 5] = np.nan, np.inf
    found = np.asarray(run(lambda x, _: collectives.agree(x, AXIS), values, mode))
    assert rows_are_equal(found)
    expected = np.isin(np.arange(9), [2, 5])
    np.testing.assert_array_equal(~np.isfinite(found[0]), expected)


def test_small_leaves_of_one_dtype_are_summed_as_one_array_and_large_ones_alone():
    large = collectives.MAX_JOINED_SIZE + 1
    leaves = [per_worker(4, size) for size in (3, 5, 1, large, 7)]
    leaves[4] = leaves[4].astype(np.complex64)

    def both(x: Any, _: Any) -> Any:
        return collectives.mean_leaves(x, AXIS), jax.lax.pmean(x, AXIS)

    program = mapped(lambda x, _: collectives.mean_leaves(x, AXIS), 4, "pmap").lower(leaves, None).as_text()
    summed = re.findall(r"all_reduce.*?: \(tensor<([^)]*)>\) ->", program, re.DOTALL)
    assert sorted(summed) == sorted(["9xf32", f"{large}xf32", "7xcomplex<f32>"])
    means, plain = run(both, leaves, "pmap")
    for mean, expected in zip(means, plain, strict=True):
        np.testing.assert_array_equal(mean, expected)
