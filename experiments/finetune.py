"""Fine-tuning a pretrained encoder, alike with every policy: what do cheap gradients cost?

    python -m experiments.finetune sst2                       # MiniLM; about 5 minutes a run on 2 cores
    python -m experiments.finetune sst2 --model distilbert    # or bert, where their folders are given

`sst2`: sentences with labels 0 and 1 in GLUE's TSV format from `--data` (sst2/train.tsv and dev.tsv), a
MiniLM (minilm/) with a new classifier, AdamW, 4 workers, one epoch. Its word embeddings are half of the
model: they travel low-bit too, although most of their rows have no gradient in most steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments import bert, calibration, data, jobs
from experiments.config import Config
from experiments.runs import Task
from nf_jax import calibrate

ROOT = Path(__file__).resolve().parent.parent
LENGTH = 32  # tokens of a sentence; what is longer is cut
MODELS = ("minilm", "bert", "distilbert")

# ============================================================================================ config


def sst2() -> Config:
    """Movie-review sentences, MiniLM of 22.7 M parameters, one epoch."""
    return Config(
        task="sst2",
        profile=ROOT / "profiles" / "sst2-minilm.toml",
        out=Path("runs/sst2"),
        steps=270,
        per_worker_batch=8,
        learning_rate=1e-4,
        devices=4,
        model="minilm",
        warmup_steps=27,
        num_evaluations=9,
        last_evaluations=3,
        checkpoint_every=90,
    )


CONFIGS: dict[str, Callable[[], Config]] = {"sst2": sst2}

# ==================================================================================== data and model


class Labelled(NamedTuple):
    """Attributes: ids: int32[n, LENGTH]; mask: bool[n, LENGTH]; labels: int32[n]."""

    ids: np.ndarray
    mask: np.ndarray
    labels: np.ndarray


def spoil_labels(rng: np.random.Generator, examples: Labelled) -> Labelled:
    return examples._replace(labels=rng.permutation(examples.labels))


def sentence_task(config: Config) -> Task:
    """Two classes of sentences, by a pretrained encoder."""
    if config.model not in MODELS:
        raise ValueError(f"model: expected one of {', '.join(MODELS)}, got {config.model!r}")
    folder = data.find_data("sst2", config.data)
    source = data.find_data(config.model, config.data)
    mean = config.model == "minilm"  # it was trained as a sentence encoder

    def load() -> tuple[Labelled, Labelled]:
        train, test = (read_split(folder / name, source) for name in ("train.tsv", "dev.tsv"))
        return train, test

    model, pretrained = bert.load_bert(source, mean=mean)

    def init(key: jax.Array, examples: Labelled) -> tuple[Any, None]:
        del examples
        kernel = 0.02 * jax.random.normal(key, pretrained["top"]["kernel"].shape)
        return {**pretrained, "top": {**pretrained["top"], "kernel": kernel}}, None

    def loss_fn(params: Any, batch: Labelled) -> tuple[jax.Array, dict[str, jax.Array]]:
        logits = jnp.asarray(model.apply({"params": params}, jnp.asarray(batch.ids), jnp.asarray(batch.mask)))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.asarray(batch.labels))
        hits = jnp.argmax(logits, axis=-1) == batch.labels
        return losses.mean(), {"accuracy": 100 * hits.astype(jnp.float32).mean()}

    def test_fn(params: Any, model_state: Any, examples: Labelled) -> dict[str, jax.Array]:
        del model_state
        loss, metrics = loss_fn(params, examples)
        return {"loss": loss, **metrics}

    return Task(load, init, loss_fn, test_fn, spoil=spoil_labels, test_size=64)


def read_split(path: Path, source: Path) -> Labelled:
    sentences = data.read_tsv(path)
    if (wrong := sentences.labels > 1).any():
        raise ValueError(f"{path}: expected labels 0 and 1, got {sentences.labels[wrong][0]}")
    tokens = bert.tokenize(source, sentences.sentences, LENGTH)
    return Labelled(tokens.ids, tokens.mask, sentences.labels)


TASKS: dict[str, Callable[[Config], Task]] = {"sst2": sentence_task}

# ======================================================================================= calibration


def calibration_job(config: Config) -> calibrate.Job:
    """What `nf-jax calibrate experiments.finetune:sst2` searches, to a point of accuracy."""
    return calibration.make_job(config, TASKS[config.task](config), tolerance=1.0, loss_tolerance=0.1)


# ============================================================================================== main


def main(args: Sequence[str] | None = None) -> None:
    jobs.main("experiments.finetune", CONFIGS, TASKS, args)


if __name__ == "__main__":
    main()
