"""Hugging Face folders: every way they may hold a tensor, and what is said when one does not hold it."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from ml_dtypes import bfloat16

from experiments import bert, gpt_neox, pretrained

FOLDERS = Path(__file__).resolve().parent / "pretrained"
BERT = FOLDERS / "bert"


@pytest.fixture
def folder(tmp_path):
    """A copy of the small BERT, to be changed."""
    return Path(shutil.copytree(BERT, tmp_path / "bert"))


def change_tensors(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    safetensors.numpy.save_file(change(safetensors.numpy.load_file(path)), path)


def change_config(folder: Path, **fields) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def assert_same(params, expected) -> None:
    jax.tree.map(np.testing.assert_array_equal, params, expected)


EXPECTED = bert.load_bert(BERT, 3)[1]


def test_weights_may_lie_in_several_files(folder):
    whole = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(whole)
    for number in range(2):
        part = dict(list(tensors.items())[number::2])
        safetensors.numpy.save_file(part, folder / f"model-0000{number + 1}-of-00002.safetensors")
    whole.unlink()
    assert_same(bert.load_bert(folder, 3)[1], EXPECTED)


def test_norms_may_have_the_names_of_the_first_bert(folder):
    def rename(name: str) -> str:
        return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")

    change_tensors(folder, lambda tensors: {rename(name): tensor for name, tensor in tensors.items()})
    assert_same(bert.load_bert(folder, 3)[1], EXPECTED)


@pytest.mark.parametrize("dtype", [np.float16, bfloat16])
def test_half_precision_is_widened(dtype, folder):
    change_tensors(folder, lambda tensors: {name: tensor.astype(dtype) for name, tensor in tensors.items()})
    rounded = jax.tree.map(lambda leaf: leaf.astype(dtype).astype(np.float32), EXPECTED)
    params = bert.load_bert(folder, 3)[1]
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(params))
    assert_same(params, rounded)


def test_without_a_classifier_it_gets_one_that_the_seed_decides(folder):
    def encoder_alone(tensors):
        return {name.removeprefix("bert."): t for name, t in tensors.items() if name.startswith("bert.")}

    change_tensors(folder, encoder_alone)
    params, again, other = (bert.load_bert(folder, 5, seed)[1] for seed in (0, 0, 1))
    top = params.pop("top")
    assert top["kernel"].shape == (8, 5) and not top["bias"].any() and 0.01 < top["kernel"].std() < 0.03
    assert_same(params, {name: layer for name, layer in EXPECTED.items() if name != "top"})
    assert_same(top, again["top"])
    assert (top["kernel"] != other["top"]["kernel"]).all()


def drop(name: str):
    return lambda folder: change_tensors(
        folder, lambda tensors: {k: v for k, v in tensors.items() if k != name}
    )


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda folder: (folder / "config.json").unlink(), "found no config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "expected model.safetensors"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"version https://"), "or a cut one"),
        (lambda folder: change_config(folder, model_type="roberta"), "bert or distilbert, got 'roberta'"),
        (lambda folder: change_config(folder, hidden_act="silu"), "hidden_act to be one of gelu"),
        (lambda folder: change_config(folder, position_embedding_type="relative_key"), "to be 'absolute'"),
        (
            lambda folder: change_config(folder, vocab_size=13),
            r"word.*expected shape \(13, 8\), got \(12, 8\)",
        ),
        (lambda folder: change_config(folder, num_hidden_layers=3), r"layers_2/.*expected a tensor"),
        (drop("bert.encoder.layer.1.output.dense.bias"), "expected a tensor 'bert.encoder.layer.1.output"),
    ],
)
def test_what_is_wrong_with_a_folder_is_said(break_it, said, folder):
    break_it(folder)
    with pytest.raises(ValueError, match=said):
        bert.load_bert(folder, 3)


def test_a_classifier_of_other_classes_is_refused():
    with pytest.raises(ValueError, match=r"top/bias: expected shape \(2,\), got \(3,\)"):
        bert.load_bert(BERT, 2)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"use_parallel_residual": False}, "use_parallel_residual to be True, got False"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings to be False, got True"),
        ({"attention_bias": False}, "attention_bias to be True, got False"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling to be None, got"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type to be 'default', got 'yarn'"),
    ],
)
def test_a_decoder_that_is_built_otherwise_is_refused(fields, said, tmp_path):
    folder = Path(shutil.copytree(FOLDERS / "gpt_neox", tmp_path / "gpt_neox"))
    change_config(folder, **fields)
    with pytest.raises(ValueError, match=said):
        gpt_neox.load_neox(folder)


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("gelu", lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2),
        ("gelu_new", lambda x: x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2),
        ("relu", lambda x: max(x, 0)),
    ],
)
def test_activations_are_their_formulas(name, formula):
    values = np.linspace(-3, 3, 25, dtype=np.float32)
    expected = [formula(float(value)) for value in values]
    np.testing.assert_allclose(pretrained.ACTIVATIONS[name](jnp.asarray(values)), expected, atol=1e-6)
