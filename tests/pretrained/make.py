"""Makes the small Hugging Face folders beside this file, with what the public implementation computes.

    python tests/pretrained/make.py [MINILM_FOLDER]

It needs `torch` and `transformers`, which the tests do not: they read what was made. Weights are random, and
large enough for every part to matter. Given a folder of sentence-transformers/all-MiniLM-L6-v2 it makes
minilm.json too: of weights that are too large for a repository, only inputs and outputs.
"""

# Neither package is a dependency.
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

HERE = Path(__file__).resolve().parent
SENTENCES = ["A good film.", "bad films", "good , good unheard film a a a a"]
LENGTH = 9
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "good", "bad", "film", "##s", ".", ","]


def randomize(model: Any) -> Any:
    """Every parameter, so that no bias is 0 and no norm the identity."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        is_scale = "norm" in name.lower() and name.endswith("weight")
        drawn = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.3 * drawn if is_scale else 0.4 * drawn
    return model.eval()


def write(path: Path, expected: dict[str, Any]) -> None:
    lists = {name: value if isinstance(value, list) else value.tolist() for name, value in expected.items()}
    path.write_text(json.dumps(lists) + "\n")


def make_tokenizer() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocab.txt"
        path.write_text("\n".join(VOCABULARY) + "\n")
        return transformers.BertTokenizerFast(vocab=str(path))


def classify(model: Any, encoder: Any, tokens: Any) -> dict[str, Any]:
    """Logits of the public implementation, and of its classifier over the mean of the last layer."""
    inputs = {name: tokens[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        last = encoder(**inputs).last_hidden_state
        mask = inputs["attention_mask"][..., None].float()
        mean = (last * mask).sum(1) / mask.sum(1)
        found = {"logits": model(**inputs).logits, "mean_logits": model.classifier(mean)}
    return {"sentences": SENTENCES} | (found | inputs)


def make_encoder(name: str, model: Any) -> None:
    tokenizer = make_tokenizer()
    tokens = tokenizer(
        SENTENCES, padding="max_length", truncation=True, max_length=LENGTH, return_tensors="pt"
    )
    model = randomize(model)
    expected = classify(model, getattr(model, name), tokens)
    for part in (model, tokenizer):
        part.save_pretrained(HERE / name)
    (HERE / name / "tokenizer_config.json").unlink()
    write(HERE / name / "expected.json", expected)


def make_encoders() -> None:
    sizes = {"vocab_size": len(VOCABULARY), "max_position_embeddings": LENGTH, "num_labels": 3}
    bert = transformers.BertConfig(
        hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2, **sizes
    )
    make_encoder("bert", transformers.BertForSequenceClassification(bert))
    distilbert = transformers.DistilBertConfig(dim=8, hidden_dim=12, n_layers=2, n_heads=2, **sizes)
    make_encoder("distilbert", transformers.DistilBertForSequenceClassification(distilbert))


def make_decoder() -> None:
    config = transformers.GPTNeoXConfig(
        vocab_size=19,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        rotary_pct=0.5,
    )
    model = randomize(transformers.GPTNeoXForCausalLM(config))
    ids = torch.randint(19, (2, 11), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(ids).logits
    model.save_pretrained(HERE / "gpt_neox")
    (HERE / "gpt_neox" / "generation_config.json").unlink()
    write(HERE / "gpt_neox" / "expected.json", {"input_ids": ids, "logits": logits})


def make_minilm(folder: str) -> None:
    """MiniLM has no classifier: it gets one that is easy to write down again."""
    model = transformers.BertForSequenceClassification.from_pretrained(folder, num_labels=2).eval()
    kernel = np.cos(np.arange(384 * 2)).reshape(384, 2)
    model.classifier.weight.data = torch.tensor(kernel.T, dtype=torch.float32)
    model.classifier.bias.data = torch.tensor([1.0, -1.0])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(
        SENTENCES, padding="max_length", truncation=True, max_length=LENGTH, return_tensors="pt"
    )
    expected = classify(model, model.bert, tokens)
    write(HERE / "minilm.json", expected)


if __name__ == "__main__":
    make_encoders()
    make_decoder()
    for given in sys.argv[1:]:
        make_minilm(given)
