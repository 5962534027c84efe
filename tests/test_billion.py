"""The billion-parameter experiment in its smallest form: two processes that train, and plans."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import process_groups
import pytest

import nf_jax
from experiments import billion_model, billion_run, gpt_neox
from nf_jax import Route


@pytest.fixture(autouse=True)
def _promotion():
    """Flax's LayerNorm adds f32 statistics to bf16 values."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def test_two_processes_go_low_bit_fall_back_return_and_agree_to_the_bit(tmp_path: Path):
    arguments = ("-m", "experiments.billion", "run", "--model", "2m", "--distributed", "--out", str(tmp_path))
    process_groups.run(2, *arguments)
    found = json.loads((tmp_path / "run-2m.json").read_text())
    assert found["num_processes"] == 2 and len(found["peak_rss_bytes"]) == 2
    is_low = ["SIGN" in row["lanes"] for row in found["steps"]]
    assert is_low == [False] * 2 + [True] * 3 + [False] * 2 + [True] * 3
    assert all(row["wire_fraction"] < 0.05 for row, low in zip(found["steps"], is_low, strict=True) if low)
    assert (
        found["steps"][4]["heard_loss"] == "inf"
        and np.isfinite([row["loss"] for row in found["steps"]]).all()
    )
    assert found["steps"][-1]["loss"] < found["steps"][0]["loss"] - 1


def test_routes_in_another_order_are_an_error():
    shapes = gpt_neox.param_shapes(billion_model.make_model("2m"))
    plan = nf_jax.plan(billion_model.profile(), shapes, 2)
    low = plan.wire_bytes(billion_model.route_plans(plan)["low-bit"])
    rows = [{"wire_bytes": sent} for sent in (low + 1, low, low + 1, low)]
    billion_run.check_routes(plan, rows)
    with pytest.raises(AssertionError, match="expected steps in FP32, low-bit, FP32 and low-bit"):
        billion_run.check_routes(plan, rows[:3])


def test_only_norms_and_biases_of_a_billion_are_protected():
    shapes = gpt_neox.param_shapes(billion_model.make_model("1.4b"))
    plan = nf_jax.plan(billion_model.profile(), shapes, 8)
    assert billion_model.count_params(shapes) == 1_414_647_808 and plan.protected_share < 0.001
    exact, low = billion_model.route_plans(plan).values()
    assert set(exact) == {Route.FP32} and set(low) == {Route.FP32, Route.SIGN}
    assert plan.wire_bytes(low) < 0.0321 * plan.fp32_bytes


def test_weights_are_drawn_in_their_own_dtype_as_the_model_would():
    shapes = gpt_neox.param_shapes(billion_model.make_model("2m"))
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {jnp.dtype(jnp.bfloat16)}
    drawn = billion_run.draw_weights(np.uint32(3), "kernel", (192, 768), jnp.bfloat16)
    assert drawn.dtype == jnp.bfloat16 and float(jnp.std(drawn.astype(jnp.float32))) == pytest.approx(
        0.02, rel=0.01
    )
    assert float(billion_run.draw_weights(np.uint32(3), "scale", (4,), jnp.bfloat16).min()) == 1


def test_a_size_that_does_not_exist_is_an_error_that_lists_them():
    with pytest.raises(ValueError, match=r"model: expected one of 2m, .*1\.4b.*, got '3b'"):
        billion_model.make_model("3b")
