"""ResNets: sizes as published, the network written again in NumPy, statistics, and how names sort."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import resnet
from nf_jax import buckets, regions

SMALL = resnet.ResNet((1, 2), 4, num_classes=3)
SIDE = 8


def shapes_of(model: resnet.ResNet) -> Any:
    images = jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.float32)
    return jax.eval_shape(lambda key, x: model.init(key, x, train=False), jax.random.key(0), images)


@pytest.mark.parametrize(
    ("model", "parameters", "channels"),
    [
        (resnet.resnet8(), 78_042, 16 * 3 + 32 * 3 + 64 * 3),
        (resnet.resnet18(), 11_173_962, (64 + 128 + 256 + 512) * 5),
        (resnet.resnet18(100), 11_173_962 + 90 * 513, (64 + 128 + 256 + 512) * 5),
    ],
)
def test_sizes_are_the_published_ones(model, parameters, channels):
    shapes = shapes_of(model)
    for collection, expected in (("params", parameters), ("batch_stats", 2 * channels)):
        assert sum(leaf.size for leaf in jax.tree.leaves(shapes[collection])) == expected


def convolve(values: np.ndarray, kernel: np.ndarray, stride: int) -> np.ndarray:
    size = kernel.shape[0]
    padded = np.pad(values, ((0, 0), (size // 2,) * 2, (size // 2,) * 2, (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (size, size), axis=(1, 2))
    return np.einsum("nhwcij,ijco->nhwo", windows[:, ::stride, ::stride], kernel)


def reference(variables: Any, images: np.ndarray, train: bool) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Logits in float64, and the mean and variance that each norm's input has in the batch."""
    leaves = {
        collection: {path: np.asarray(leaf, np.float64) for path, leaf in regions.leaves_with_paths(tree)[0]}
        for collection, tree in variables.items()
    }
    params, stats, seen = leaves["params"], leaves["batch_stats"], {}

    def normalized(name: str, values: np.ndarray, stride: int = 1) -> np.ndarray:
        hidden = convolve(values, params[f"{name}/kernel"], stride)
        mean, var = hidden.mean((0, 1, 2)), hidden.var((0, 1, 2))
        seen[f"{name}_norm/mean"], seen[f"{name}_norm/var"] = mean, var
        if not train:
            mean, var = stats[f"{name}_norm/mean"], stats[f"{name}_norm/var"]
        scale, bias = params[f"{name}_norm/scale"], params[f"{name}_norm/bias"]
        return (hidden - mean) / np.sqrt(var + 1e-5) * scale + bias

    values = np.maximum(normalized("entry", np.asarray(images, np.float64)), 0)
    for stage, block in ((0, 0), (1, 0), (1, 1)):
        name, stride = f"stage_{stage}/block_{block}", 2 if (stage, block) == (1, 0) else 1
        hidden = np.maximum(normalized(f"{name}/conv_0", values, stride), 0)
        hidden = normalized(f"{name}/conv_1", hidden)
        shortcut = normalized(f"{name}/shortcut", values, 2) if stride == 2 else values
        values = np.maximum(shortcut + hidden, 0)
    return values.mean((1, 2)) @ params["top/kernel"] + params["top/bias"], seen


@pytest.fixture(scope="module")
def small():
    """Images, and variables of which no norm is the identity."""
    rng = np.random.default_rng(0)
    images = rng.normal(size=(3, SIDE, SIDE, 3)).astype(np.float32)
    shapes = jax.eval_shape(lambda key: SMALL.init(key, images, train=False), jax.random.key(0))
    positive = lambda s: rng.uniform(0.5, 1.5, s.shape)  # noqa: E731
    signed = lambda s: rng.normal(size=s.shape) / 3  # noqa: E731
    leaves, treedef = regions.leaves_with_paths(shapes)
    values = [(positive if p.endswith(("/scale", "/var")) else signed)(leaf) for p, leaf in leaves]
    return jax.tree.unflatten(treedef, [value.astype(np.float32) for value in values]), images


def test_with_running_statistics_it_is_the_network_written_in_numpy(small):
    variables, images = small
    logits = jax.jit(lambda v, x: SMALL.apply(v, x, train=False))(variables, images)
    np.testing.assert_allclose(logits, reference(variables, images, train=False)[0], atol=1e-4)


def test_training_normalizes_by_the_batch_and_moves_statistics_a_tenth_towards_it(small):
    variables, images = small
    apply = jax.jit(lambda v, x: SMALL.apply(v, x, train=True, mutable=["batch_stats"]))
    logits, updated = apply(variables, images)
    expected, seen = reference(variables, images, train=True)
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    before, after = (dict(regions.leaves_with_paths(v["batch_stats"])[0]) for v in (variables, updated))
    assert seen.keys() == after.keys()
    for path, value in seen.items():
        np.testing.assert_allclose(after[path], 0.9 * before[path] + 0.1 * value, atol=1e-4)


def test_names_sort_as_the_network_runs():
    paths = [path for path, _ in regions.leaves_with_paths(shapes_of(resnet.resnet18())["params"])[0]]
    order = [paths[index].split("/")[0] for index in reversed(buckets.backward_order(paths))]
    groups = list(dict.fromkeys(order))
    assert groups == ["entry", "entry_norm", *(f"stage_{i}" for i in range(4)), "top"]
