"""BERT encoders with a classifier: BERT (arXiv 1810.04805), MiniLM (2002.10957), DistilBERT (1910.01108).

    model, params = load_bert(find_data("minilm"), num_classes=2)
    tokens = tokenize(find_data("minilm"), sentences, max_length=32)
    logits = model.apply({"params": params}, tokens.ids, tokens.mask)

The 6 layers of MiniLM are 384 wide: 22.7 M parameters, 11.7 M of them word embeddings. Region rules that fit:
`top/.*`, `.*norm/.*`, `embeddings/.*`, `.*`. There is no dropout, and every token is of the first segment.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

from experiments import attention, pretrained
from experiments.pretrained import Source

# ============================================================================================= model


@dataclasses.dataclass(frozen=True)
class BertConfig:
    """Sizes of an encoder, and how a sentence becomes one vector."""

    vocab_size: int
    width: int
    hidden_width: int
    num_layers: int
    num_heads: int
    max_length: int
    num_segments: int
    """Kinds of segment embeddings; DistilBERT has none: 0."""
    norm_epsilon: float
    activation: str
    """Of the MLPs, in `pretrained.ACTIVATIONS`."""
    pooling: Literal["mean", "tanh", "relu"]
    """The mean over the mask, or a dense layer on the first token, then BERT's tanh or DistilBERT's relu."""


class Layer(nn.Module):
    """Attention and an MLP, each normalized after its residual."""

    config: BertConfig

    @nn.compact
    def __call__(self, values: jax.Array, allowed: jax.Array) -> jax.Array:
        config = self.config
        norm = lambda name: nn.LayerNorm(config.norm_epsilon, name=name)  # noqa: E731
        attended = SelfAttention(config.num_heads, name="attention")(values, allowed)
        values = norm("attention_norm")(values + attended)
        hidden = nn.Dense(config.hidden_width, name="mlp_in")(values)
        hidden = pretrained.ACTIVATIONS[config.activation](hidden)
        return norm("mlp_norm")(values + nn.Dense(config.width, name="mlp_out")(hidden))


class SelfAttention(nn.Module):
    num_heads: int

    @nn.compact
    def __call__(self, values: jax.Array, allowed: jax.Array) -> jax.Array:
        *leading, width = values.shape
        query, key, value = (
            nn.Dense(width, name=name)(values).reshape(*leading, self.num_heads, -1)
            for name in ("query", "key", "value")
        )
        return nn.Dense(width, name="out")(attention.attend(query, key, value, allowed))


class Embeddings(nn.Module):
    config: BertConfig

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        config, length = self.config, ids.shape[1]
        values = nn.Embed(config.vocab_size, config.width, name="word")(ids)
        values += nn.Embed(config.max_length, config.width, name="position")(jnp.arange(length))
        if config.num_segments:
            values += nn.Embed(config.num_segments, config.width, name="segment")(jnp.zeros(1, jnp.int32))
        return nn.LayerNorm(config.norm_epsilon, name="norm")(values)


class Bert(nn.Module):
    """Encoder, pooling, and `top`, one logit a class; names sort as the network runs."""

    config: BertConfig
    num_classes: int

    @nn.compact
    def __call__(self, ids: jax.Array, mask: jax.Array) -> jax.Array:
        """Tokens int32[n, t], and bool[n, t] that says which are real -> logits f32[n, num_classes]."""
        config = self.config
        if ids.shape[1] > config.max_length:
            raise ValueError(f"ids: expected at most {config.max_length} tokens, got {ids.shape[1]}")
        mask = mask.astype(bool)
        values = Embeddings(config, name="embeddings")(ids)
        for index in range(config.num_layers):
            values = Layer(config, name=f"layers_{index}")(values, mask[:, None, None])
        if config.pooling == "mean":
            kept = jnp.where(mask[..., None], values, 0)
            pooled = kept.sum(1) / mask.sum(1, keepdims=True).astype(values.dtype)
        else:
            dense = nn.Dense(config.width, name="pooler")(values[:, 0])
            pooled = {"tanh": nn.tanh, "relu": nn.relu}[config.pooling](dense)
        return nn.Dense(self.num_classes, name="top")(pooled)


# =========================================================================================== folders

BERT_NAMES = {
    "embeddings/word": "embeddings.word_embeddings",
    "embeddings/position": "embeddings.position_embeddings",
    "embeddings/segment": "embeddings.token_type_embeddings",
    "embeddings/norm": "embeddings.LayerNorm",
    "attention/query": "encoder.layer.{}.attention.self.query",
    "attention/key": "encoder.layer.{}.attention.self.key",
    "attention/value": "encoder.layer.{}.attention.self.value",
    "attention/out": "encoder.layer.{}.attention.output.dense",
    "attention_norm": "encoder.layer.{}.attention.output.LayerNorm",
    "mlp_in": "encoder.layer.{}.intermediate.dense",
    "mlp_out": "encoder.layer.{}.output.dense",
    "mlp_norm": "encoder.layer.{}.output.LayerNorm",
    "pooler": "pooler.dense",
}
DISTILBERT_NAMES = {
    "embeddings/word": "embeddings.word_embeddings",
    "embeddings/position": "embeddings.position_embeddings",
    "embeddings/norm": "embeddings.LayerNorm",
    "attention/query": "transformer.layer.{}.attention.q_lin",
    "attention/key": "transformer.layer.{}.attention.k_lin",
    "attention/value": "transformer.layer.{}.attention.v_lin",
    "attention/out": "transformer.layer.{}.attention.out_lin",
    "attention_norm": "transformer.layer.{}.sa_layer_norm",
    "mlp_in": "transformer.layer.{}.ffn.lin1",
    "mlp_out": "transformer.layer.{}.ffn.lin2",
    "mlp_norm": "transformer.layer.{}.output_layer_norm",
}
"""Layers here -> layers there; those of the classifier stand outside the encoder's own prefix."""
CLASSIFIER_NAMES = {"top": "classifier", "pooler": "pre_classifier"}


def read_bert_config(config: Mapping[str, Any], mean: bool) -> BertConfig:
    """From config.json of a BERT or a DistilBERT."""
    pretrained.check_config(config, position_embedding_type="absolute")
    if config["model_type"] == "bert":
        names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        segments, epsilon = config["type_vocab_size"], config["layer_norm_eps"]
        activation, pooling = "hidden_act", "tanh"
    else:
        names = ("dim", "hidden_dim", "n_layers", "n_heads")
        segments, epsilon = 0, 1e-12
        activation, pooling = "activation", "relu"
    width, hidden_width, num_layers, num_heads = (config[name] for name in names)
    return BertConfig(
        config["vocab_size"],
        width,
        hidden_width,
        num_layers,
        num_heads,
        config["max_position_embeddings"],
        segments,
        epsilon,
        pretrained.pick_activation(config, activation),
        "mean" if mean else pooling,
    )


def load_bert(folder: Path, num_classes: int = 2, seed: int = 0, *, mean: bool = False) -> tuple[Bert, Any]:
    """A pretrained encoder with a classifier: the folder's own, or a new one.

    Args:
      folder: of BERT, MiniLM or DistilBERT: config.json and model.safetensors, with or without a classifier.
      num_classes: logits.
      seed: of what the folder does not hold: the classifier of a folder that was only pretrained, and its
        pooler if that is missing too.
      mean: pool by the mean over the mask instead of the first token, as sentence embeddings do.

    Returns:
      The model, and its params in f32.

    Raises:
      ValueError: the folder is of another architecture, or does not hold what its config says.
    """
    config = pretrained.read_config(folder, "bert", "distilbert")
    model = Bert(read_bert_config(config, mean), num_classes)
    tensors = pretrained.open_tensors(folder)
    is_bert = config["model_type"] == "bert"
    names = BERT_NAMES if is_bert else DISTILBERT_NAMES
    prefix = f"{config['model_type']}."
    prefix = prefix if any(name.startswith(prefix) for name in tensors) else ""

    def source(layer: str) -> Source:
        inner = re.fullmatch(r"layers_(\d+)/(.*)", layer)
        index, name = inner.groups() if inner else ("", layer)
        return Source(prefix + names[name].format(index) if name in names else CLASSIFIER_NAMES[name])

    ids = np.zeros((1, 1), np.int32)  # not JAX's: a job says only later how many devices there are
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), ids, ids > 0)["params"])
    return model, pretrained.load_params(shapes, tensors, source, new_layers(model, seed))


def new_layers(model: Bert, seed: int) -> dict[str, np.ndarray]:
    """A pooler and a classifier as before fine-tuning: small normal kernels, no biases."""
    rng, fresh = np.random.default_rng(seed), {}
    width = model.config.width
    for layer, size in (("pooler", width), ("top", model.num_classes)):
        fresh[f"{layer}/kernel"] = rng.normal(0, 0.02, (width, size))
        fresh[f"{layer}/bias"] = np.zeros(size)
    return fresh


# ============================================================================================ tokens


class Tokens(NamedTuple):
    """Attributes: ids: int32[n, max_length]; mask: bool[n, max_length], false where a sentence has ended."""

    ids: np.ndarray
    mask: np.ndarray


def tokenize(folder: Path, sentences: Sequence[str], max_length: int) -> Tokens:
    """Sentences as the folder's tokenizer cuts them, each alone, all made `max_length` long."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{folder}: expected tokenizer.json, found none")
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    padding = tokenizer.token_to_id("[PAD]")
    if padding is None:
        raise ValueError(f"{path}: expected a vocabulary with [PAD], as BERT's, found none")
    tokenizer.enable_truncation(max_length)
    tokenizer.enable_padding(length=max_length, pad_id=padding)
    encoded = tokenizer.encode_batch(list(sentences))
    ids = np.array([sentence.ids for sentence in encoded], np.int32)
    return Tokens(ids, np.array([sentence.attention_mask for sentence in encoded], bool))
