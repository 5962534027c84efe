"""Hugging Face folders: a config, tensors by name, and the params of a model filled from them.

A folder holds `config.json` and `model.safetensors`, or several `model-....safetensors`. Pickled weights
(`pytorch_model.bin`) are not read: a pickle can run anything.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
import safetensors

from nf_jax import regions

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": functools.partial(nn.gelu, approximate=False),
    "gelu_new": functools.partial(nn.gelu, approximate=True),
    "relu": nn.relu,
}
"""By their names in a config."""

# What torch calls the parts of a layer, and whether it lays them out the other way round.
PARTS = {"kernel": ("weight", True), "embedding": ("weight", False), "scale": ("weight", False)}
OLD_NAMES = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}


class Source(NamedTuple):
    """Where a leaf comes from.

    Attributes:
      name: of a tensor, as torch calls it.
      cut: from that tensor, in torch's layout, to the part that the leaf takes.
    """

    name: str
    cut: Callable[[np.ndarray], np.ndarray] = lambda tensor: tensor


def read_config(folder: Path, *known: str) -> dict[str, Any]:
    """config.json, of one of the model types that are known."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder}: expected a Hugging Face folder, found no config.json in it")
    config = json.loads(path.read_text())
    if config.get("model_type") not in known:
        raise ValueError(
            f"{path}: expected model_type to be {' or '.join(known)}, got {config.get('model_type')!r}"
        )
    return config


def check_config(config: Mapping[str, Any], **expected: Any) -> None:
    """Refuses what a model here does not have; what a config does not say is as expected."""
    for name, value in expected.items():
        if config.get(name, value) != value:
            raise ValueError(f"config.json: expected {name} to be {value!r}, got {config[name]!r}")


def pick_activation(config: Mapping[str, Any], name: str) -> str:
    """The activation in a config, if it is known."""
    if config[name] not in ACTIVATIONS:
        raise ValueError(
            f"config.json: expected {name} to be one of {', '.join(ACTIVATIONS)}, got {config[name]!r}"
        )
    return config[name]


def open_tensors(folder: Path) -> dict[str, Any]:
    """Every tensor's name -> the open file that holds it; nothing is read yet."""
    whole = folder / "model.safetensors"
    paths = [whole] if whole.is_file() else sorted(folder.glob("model-*.safetensors"))
    if not paths:
        raise ValueError(f"{folder}: expected model.safetensors, found none")
    tensors = {}
    for path in paths:
        try:
            file = safetensors.safe_open(path, framework="numpy")
        except safetensors.SafetensorError as error:
            raise ValueError(
                f"{path}: expected a safetensors file, got another or a cut one: {error}"
            ) from None
        tensors |= dict.fromkeys(file.keys(), file)
    return tensors


def load_params(
    shapes: Any, tensors: Mapping[str, Any], source: Callable[[str], Source], fresh: Mapping[str, np.ndarray]
) -> Any:
    """Fills a model's params, one leaf after the other.

    Args:
      shapes: of the params, as from `jax.eval_shape`, whose dtypes decide.
      tensors: from `open_tensors`.
      source: path of a leaf's layer (`layers_0/mlp_in`) -> where it comes from, as torch calls the layer.
      fresh: by path, what leaves become whose tensors are not there.

    Raises:
      ValueError: a tensor is missing, or its shape is not the leaf's.
    """
    leaves, treedef = regions.leaves_with_paths(shapes)
    return jax.tree.unflatten(treedef, [_load(path, leaf, tensors, source, fresh) for path, leaf in leaves])


def _load(
    path: str,
    leaf: jax.ShapeDtypeStruct,
    tensors: Mapping[str, Any],
    source: Callable[[str], Source],
    fresh: Mapping[str, np.ndarray],
) -> np.ndarray:
    layer, _, kind = path.rpartition("/")
    part, is_transposed = PARTS.get(kind, (kind, False))
    name, cut = source(layer)
    name = f"{name}.{part}"
    if name not in tensors:
        old = [name.replace(*pair) for pair in OLD_NAMES.items() if name.endswith(pair[0])]
        name = next((other for other in old if other in tensors), name)
    if name not in tensors:
        if path in fresh:
            return np.asarray(fresh[path], leaf.dtype)
        raise ValueError(
            f"{path}: expected a tensor {name!r}, found {len(tensors)} others: {list(tensors)[:3]}..."
        )
    value = cut(tensors[name].get_tensor(name))
    value = value.T if is_transposed else value
    if value.shape != leaf.shape:
        raise ValueError(f"{path}: expected shape {leaf.shape}, got {value.shape} from tensor {name!r}")
    return np.ascontiguousarray(value, leaf.dtype)
