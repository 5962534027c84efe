"""Encoders: the numbers of the public implementation (tests/pretrained/make.py), tokens, and masks."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from experiments import bert, data
from nf_jax import buckets, regions

FOLDERS = Path(__file__).resolve().parent / "pretrained"
NAMES = ("bert", "distilbert")


@functools.partial(jax.jit, static_argnums=0)
def apply(model: bert.Bert, params: Any, tokens: bert.Tokens) -> Any:
    return model.apply({"params": params}, *tokens)


def logits_of(model: bert.Bert, params: Any, tokens: bert.Tokens) -> np.ndarray:
    return np.asarray(apply(model, params, tokens))


@functools.cache
def expected_of(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def tokens_of(folder: Path, expected: dict[str, Any]) -> bert.Tokens:
    length = len(expected["input_ids"][0])
    tokens = bert.tokenize(folder, expected["sentences"], length)
    assert (tokens.ids.dtype, tokens.mask.dtype) == (np.int32, bool)
    return tokens


@pytest.mark.parametrize("name", NAMES)
def test_sentences_are_cut_as_the_public_implementation_cuts_them(name):
    expected = expected_of(FOLDERS / name / "expected.json")
    tokens = tokens_of(FOLDERS / name, expected)
    np.testing.assert_array_equal(tokens.ids, expected["input_ids"])
    np.testing.assert_array_equal(tokens.mask, expected["attention_mask"])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("mean", "logits"), [(False, "logits"), (True, "mean_logits")])
def test_logits_are_those_of_the_public_implementation(name, mean, logits):
    expected = expected_of(FOLDERS / name / "expected.json")
    model, params = bert.load_bert(FOLDERS / name, 3, mean=mean)
    tokens = tokens_of(FOLDERS / name, expected)
    np.testing.assert_allclose(logits_of(model, params, tokens), expected[logits], atol=1e-5)


@pytest.mark.parametrize(("mean", "logits"), [(False, "logits"), (True, "mean_logits")])
def test_logits_of_minilm_are_those_of_the_public_implementation(mean, logits):
    try:
        folder = data.find_data("minilm")
    except ValueError as error:
        pytest.skip(str(error))
    expected = expected_of(FOLDERS / "minilm.json")
    tokens = tokens_of(folder, expected)
    np.testing.assert_array_equal(tokens.ids, expected["input_ids"])
    model, params = bert.load_bert(folder, 2, mean=mean)
    # The classifier that the public implementation was given.
    kernel = np.cos(np.arange(384 * 2)).reshape(384, 2).astype(np.float32)
    params["top"] = {"kernel": kernel, "bias": np.array([1, -1], np.float32)}
    np.testing.assert_allclose(logits_of(model, params, tokens), expected[logits], atol=1e-4)


@pytest.mark.parametrize("mean", [False, True])
def test_padding_changes_nothing(mean):
    model, params = bert.load_bert(FOLDERS / "bert", 3, mean=mean)
    short, long = (
        logits_of(model, params, bert.tokenize(FOLDERS / "bert", ["bad films"] * 3, length))
        for length in (5, 9)
    )
    np.testing.assert_allclose(short, long, atol=1e-6)


def test_more_tokens_than_positions_are_refused():
    model, params = bert.load_bert(FOLDERS / "bert", 3)
    tokens = bert.tokenize(FOLDERS / "bert", ["a"], 10)
    with pytest.raises(ValueError, match="expected at most 9 tokens, got 10"):
        logits_of(model, params, tokens)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"expected tokenizer\.json"):
        bert.tokenize(tmp_path, ["a"], 10)


@pytest.mark.parametrize("name", NAMES)
def test_names_sort_as_the_network_runs(name):
    params = bert.load_bert(FOLDERS / name, 3)[1]
    paths = [path for path, _ in regions.leaves_with_paths(params)[0]]
    order = [paths[index].split("/")[0] for index in reversed(buckets.backward_order(paths))]
    assert list(dict.fromkeys(order)) == ["embeddings", "layers_0", "layers_1", "pooler", "top"]
