"""Decoders: the numbers of the public implementation (tests/pretrained/make.py), published sizes."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import gpt_neox
from nf_jax import buckets, regions

FOLDER = Path(__file__).resolve().parent / "pretrained" / "gpt_neox"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())
IDS = np.array(EXPECTED["input_ids"], np.int32)


@functools.partial(jax.jit, static_argnums=0)
def apply(model: gpt_neox.NeoX, params: Any, ids: np.ndarray) -> Any:
    return model.apply({"params": params}, ids)


def logits_of(model: gpt_neox.NeoX, params: Any, ids: np.ndarray) -> np.ndarray:
    logits = apply(model, params, ids)
    assert logits.dtype == jnp.float32
    return np.asarray(logits)


def test_logits_are_those_of_the_public_implementation():
    found = logits_of(*gpt_neox.load_neox(FOLDER), IDS)
    np.testing.assert_allclose(found, EXPECTED["logits"], atol=1e-5)


def test_params_in_bf16_give_nearly_the_same_logits():
    with jax.numpy_dtype_promotion("standard"):  # Flax's norms need it for bf16
        model, params = gpt_neox.load_neox(FOLDER, jnp.bfloat16)
        found = logits_of(model, params, IDS)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"bfloat16"}
    np.testing.assert_allclose(found, EXPECTED["logits"], atol=0.1)


def test_no_token_changes_what_precedes_it():
    model, params = gpt_neox.load_neox(FOLDER)
    before, after = (logits_of(model, params, ids) for ids in (IDS, np.where(np.arange(11) < 6, IDS, 3)))
    np.testing.assert_allclose(before[:, :6], after[:, :6], atol=1e-6)
    assert np.abs(before[:, 6:] - after[:, 6:]).max() > 0.1


def test_more_tokens_than_positions_are_refused():
    with pytest.raises(ValueError, match="expected at most 32 tokens, got 33"):
        logits_of(*gpt_neox.load_neox(FOLDER), np.zeros((1, 33), np.int32))


PUBLISHED = {
    "14m": 14_067_712,
    "70m": 70_426_624,
    "160m": 162_322_944,
    "410m": 405_334_016,
    "1b": 1_011_781_632,
    "1.4b": 1_414_647_808,
    "6.9b": 6_857_302_016,
}


@pytest.mark.parametrize("name", gpt_neox.CONFIGS)
def test_sizes_are_the_published_ones(name):
    shapes = gpt_neox.param_shapes(gpt_neox.NeoX(gpt_neox.CONFIGS[name], jnp.float32))
    size = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    if name in PUBLISHED:
        assert size == PUBLISHED[name]
    else:
        assert size == pytest.approx(1e6 * float(name.removesuffix("m")), rel=0.1)


def test_old_and_new_configs_say_the_same():
    old = {
        "hidden_act": "gelu",
        "hidden_size": 512,
        "intermediate_size": 2048,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 2048,
        "num_attention_heads": 8,
        "num_hidden_layers": 6,
        "vocab_size": 50304,
    }
    new = old | {"rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 10000.0}}
    old |= {"rotary_pct": 0.25, "rotary_emb_base": 10000, "use_parallel_residual": True}
    assert gpt_neox.read_neox_config(old) == gpt_neox.read_neox_config(new) == gpt_neox.CONFIGS["70m"]
    new["rope_parameters"] = {"partial_rotary_factor": 1.0, "rope_theta": 500.0}
    old |= {"rotary_pct": 1.0, "rotary_emb_base": 500}
    assert gpt_neox.read_neox_config(old) == gpt_neox.read_neox_config(new)
    assert gpt_neox.read_neox_config(old).rotary_base == 500


def test_names_sort_as_the_network_runs():
    shapes = gpt_neox.param_shapes(gpt_neox.NeoX(gpt_neox.NeoXConfig(11, 4, 8, 2, vocab_size=5)))
    paths = [path for path, _ in regions.leaves_with_paths(shapes)[0]]
    order = [paths[index].split("/")[0] for index in reversed(buckets.backward_order(paths))]
    assert list(dict.fromkeys(order)) == ["embeddings", *(f"layers_{i}" for i in range(11)), "norm", "top"]
