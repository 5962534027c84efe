"""GPT-NeoX decoders (arXiv 2204.06745), the architecture of Pythia (2304.01373), in the sizes of `CONFIGS`.

    model, params = load_neox(find_data("pythia-70m"))     # pretrained, or
    model = NeoX(CONFIGS["2m"])                            # model.init(key, ids)["params"]
    logits = model.apply({"params": params}, ids)          # next-token logits f32[n, t, vocab]

Attention and MLP run side by side on one residual; rotary positions turn the first part of every head. Sizes
with a vocabulary of 256 read bytes. Region rules that fit: `top/.*`, `.*norm/.*`, `embeddings/.*`, `.*`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments import attention, pretrained
from experiments.pretrained import Source

# ============================================================================================ config


@dataclasses.dataclass(frozen=True)
class NeoXConfig:
    """Sizes of a decoder; what is not given is as in all of Pythia."""

    num_layers: int
    width: int
    hidden_width: int
    """Of the MLPs."""
    num_heads: int
    vocab_size: int = 50304
    max_length: int = 2048
    rotary_share: float = 0.25
    """Part of every head that positions turn."""
    rotary_base: float = 10000.0
    norm_epsilon: float = 1e-5
    activation: str = "gelu"
    """Of the MLPs, in `pretrained.ACTIVATIONS`."""


CONFIGS: dict[str, NeoXConfig] = {
    "2m": NeoXConfig(4, 192, 768, 6, vocab_size=256),
    "6m": NeoXConfig(8, 256, 1024, 8, vocab_size=256),
    "14m": NeoXConfig(6, 128, 512, 4),
    "70m": NeoXConfig(6, 512, 2048, 8),
    "160m": NeoXConfig(12, 768, 3072, 12),
    "410m": NeoXConfig(24, 1024, 4096, 16),
    "1b": NeoXConfig(16, 2048, 8192, 8),
    "1.4b": NeoXConfig(24, 2048, 8192, 16),
    "6.9b": NeoXConfig(32, 4096, 16384, 32, vocab_size=50432),
}
"""Two small ones that read bytes, then those of Pythia under its names."""

# ============================================================================================= model


class NeoX(nn.Module):
    """Embeddings, layers, a norm, and `top`, one logit a token; names sort as the network runs.

    Attributes:
      config: sizes.
      dtype: of params and activations, f32 or bf16. Scores, norms' statistics and logits are f32.
    """

    config: NeoXConfig
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        """Tokens int32[n, t] -> logits f32[n, t, vocab], each of what follows its token."""
        config, types = self.config, {"dtype": self.dtype, "param_dtype": self.dtype}
        length = ids.shape[1]
        if length > config.max_length:
            raise ValueError(f"ids: expected at most {config.max_length} tokens, got {length}")
        initial = nn.initializers.normal(0.02)
        embed = nn.Embed(config.vocab_size, config.width, embedding_init=initial, name="embeddings", **types)
        values, causal = embed(ids), jnp.tril(jnp.ones((length, length), bool))
        for index in range(config.num_layers):
            values = Layer(config, self.dtype, name=f"layers_{index}")(values, causal)
        values = nn.LayerNorm(config.norm_epsilon, name="norm", **types)(values)
        wide = functools.partial(lax.dot_general, preferred_element_type=jnp.float32)
        top = nn.Dense(
            config.vocab_size, use_bias=False, kernel_init=initial, dot_general=wide, name="top", **types
        )
        return top(values)


class Layer(nn.Module):
    """Attention and an MLP, each on its own norm of the same values."""

    config: NeoXConfig
    dtype: Any

    @nn.compact
    def __call__(self, values: jax.Array, allowed: jax.Array) -> jax.Array:
        config, types = self.config, {"dtype": self.dtype, "param_dtype": self.dtype}
        norm = functools.partial(nn.LayerNorm, config.norm_epsilon, **types)
        dense = functools.partial(nn.Dense, kernel_init=nn.initializers.normal(0.02), **types)
        attended = SelfAttention(config, self.dtype, name="attention")(
            norm(name="attention_norm")(values), allowed
        )
        hidden = dense(config.hidden_width, name="mlp_in")(norm(name="mlp_norm")(values))
        hidden = pretrained.ACTIVATIONS[config.activation](hidden)
        return values + attended + dense(config.width, name="mlp_out")(hidden)


class SelfAttention(nn.Module):
    config: NeoXConfig
    dtype: Any

    @nn.compact
    def __call__(self, values: jax.Array, allowed: jax.Array) -> jax.Array:
        config = self.config
        dense = functools.partial(
            nn.Dense,
            config.width,
            dtype=self.dtype,
            param_dtype=self.dtype,
            kernel_init=nn.initializers.normal(0.02),
        )
        heads = (*values.shape[:2], config.num_heads, -1)
        query, key, value = (dense(name=name)(values).reshape(heads) for name in ("query", "key", "value"))
        turn = functools.partial(rotate, share=config.rotary_share, base=config.rotary_base)
        return dense(name="out")(attention.attend(turn(query), turn(key), value, allowed))


def rotate(values: jax.Array, share: float, base: float) -> jax.Array:
    """Turns pairs of a head's first elements by angles that grow with the position (arXiv 2104.09864).

    Element i is paired with the one half a part later; both turn by `position * base ** (-2i / part)`.

    Args:
      values: `[n, t, heads, size]`.
      share: how much of `size` turns.
    """
    part = int(values.shape[-1] * share)
    speeds = base ** (-np.arange(0, part, 2) / part)
    angles = np.arange(values.shape[1])[:, None, None] * speeds
    cos, sin = (jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin))
    first, second = jnp.split(values[..., :part].astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([turned.astype(values.dtype), values[..., part:]], axis=-1)


def param_shapes(model: NeoX) -> Any:
    """The params as `jax.ShapeDtypeStruct`s: nothing is allocated, whatever the size."""
    ids = np.zeros((1, 1), np.int32)  # not JAX's: a job says only later how many devices there are
    return jax.eval_shape(lambda: model.init(jax.random.key(0), ids)["params"])


# =========================================================================================== folders

OUTER_NAMES = {
    "embeddings": "gpt_neox.embed_in",
    "norm": "gpt_neox.final_layer_norm",
    "top": "embed_out",
}
LAYER_NAMES = {
    "attention/query": "attention.query_key_value",
    "attention/key": "attention.query_key_value",
    "attention/value": "attention.query_key_value",
    "attention/out": "attention.dense",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp_in": "mlp.dense_h_to_4h",
    "mlp_out": "mlp.dense_4h_to_h",
}
"""Layers here -> layers there."""


def read_neox_config(config: Mapping[str, Any]) -> NeoXConfig:
    """From config.json of a GPT-NeoX, old (rotary_pct) or new (rope_parameters)."""
    pretrained.check_config(
        config, use_parallel_residual=True, tie_word_embeddings=False, attention_bias=True, rope_scaling=None
    )
    rotary = {
        "partial_rotary_factor": config.get("rotary_pct", 0.25),
        "rope_theta": config.get("rotary_emb_base", 10000),
        **(config.get("rope_parameters") or {}),
    }
    pretrained.check_config(rotary, rope_type="default")
    return NeoXConfig(
        config["num_hidden_layers"],
        config["hidden_size"],
        config["intermediate_size"],
        config["num_attention_heads"],
        config["vocab_size"],
        config["max_position_embeddings"],
        rotary["partial_rotary_factor"],
        float(rotary["rope_theta"]),
        config["layer_norm_eps"],
        pretrained.pick_activation(config, "hidden_act"),
    )


def load_neox(folder: Path, dtype: Any = jnp.float32) -> tuple[NeoX, Any]:
    """A pretrained decoder.

    Args:
      folder: config.json and model.safetensors of a Pythia or another GPT-NeoX.
      dtype: of the params, f32 or bf16, whatever the file has.

    Returns:
      The model, and its params.

    Raises:
      ValueError: the folder is of another architecture, or does not hold what its config says.
    """
    config = read_neox_config(pretrained.read_config(folder, "gpt_neox"))
    model = NeoX(config, dtype)

    def source(layer: str) -> Source:
        if layer in OUTER_NAMES:
            return Source(OUTER_NAMES[layer])
        index, name = layer.removeprefix("layers_").split("/", 1)
        return Source(f"gpt_neox.layers.{index}.{LAYER_NAMES[name]}", cut_of(name, config.num_heads))

    return model, pretrained.load_params(param_shapes(model), pretrained.open_tensors(folder), source, {})


def cut_of(name: str, num_heads: int) -> Any:
    """Query, key and value lie in one tensor, whose rows are [head, which of the three, element]."""
    which = {"attention/query": 0, "attention/key": 1, "attention/value": 2}.get(name)
    if which is None:
        return lambda tensor: tensor
    return lambda tensor: tensor.reshape(num_heads, 3, -1, *tensor.shape[1:])[:, which].reshape(
        -1, *tensor.shape[1:]
    )
