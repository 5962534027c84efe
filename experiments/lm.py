"""Language modelling, trained alike with every policy: what do cheap gradients cost in nats per byte?

    python -m experiments.lm text                    # 3 policies x 3 seeds: about 10 minutes on 2 cores
    python -m experiments.lm text --model 6m         # larger
    python -m experiments.lm text --model pythia-70m # goes on from the weights of that folder

`text`: plain prose from `--data` (text/train.txt and test.txt), a GPT-NeoX decoder that reads bytes, trained
from scratch with AdamW on 4 workers. With `--model pythia-*` the text is cut by that folder's tokenizer
instead. Results are losses on held-out text in nats per byte, which do not depend on the tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers

from experiments import calibration, data, gpt_neox, jobs
from experiments.config import Config
from experiments.runs import Task
from nf_jax import calibrate

ROOT = Path(__file__).resolve().parent.parent
LENGTH = 64  # tokens that are predicted in a window
NUM_TEST = 512  # windows that are tested, evenly spaced over the held-out text

# ============================================================================================ config


def text() -> Config:
    """Plain prose, a decoder of 1.9 M parameters that reads bytes."""
    return Config(
        task="text",
        profile=ROOT / "profiles" / "text-2m.toml",
        out=Path("runs/text"),
        steps=400,
        per_worker_batch=4,
        learning_rate=2e-3,
        devices=4,
        model="2m",
        warmup_steps=40,
        num_evaluations=8,
        last_evaluations=3,
        checkpoint_every=100,
    )


CONFIGS: dict[str, Callable[[], Config]] = {"text": text}

# ============================================================================================== data


class Windows(NamedTuple):
    """Attributes: ids: int32[n, LENGTH + 1], each token but the first is predicted from those before it."""

    ids: np.ndarray


def cut_windows(ids: np.ndarray) -> Windows:
    """Side by side; neighbours share the token that ends one and starts the next."""
    num = (len(ids) - 1) // LENGTH
    if num < 1:
        raise ValueError(f"text: expected more than {LENGTH} tokens, got {len(ids)}")
    starts = LENGTH * np.arange(num)[:, None]
    return Windows(ids[starts + np.arange(LENGTH + 1)].astype(np.int32))


def some_windows(windows: Windows, num: int) -> Windows:
    """At most so many, evenly spaced."""
    total = len(windows.ids)
    return Windows(windows.ids[np.linspace(0, total - 1, min(num, total)).astype(int)])


def spoil_windows(rng: np.random.Generator, windows: Windows) -> Windows:
    """Every window's tokens in another order."""
    return Windows(rng.permuted(windows.ids, axis=1))


# ============================================================================================= model


def text_task(config: Config) -> Task:
    """Predict the next token; a decoder from scratch over bytes, or a pretrained one over its own tokens."""
    folder = data.find_data("text", config.data)
    texts = [data.read_text(folder / name) for name in ("train.txt", "test.txt")]
    if config.model.startswith("pythia-"):
        source = data.find_data(config.model, config.data)
        model, pretrained = gpt_neox.load_neox(source)
        tokenizer = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
        ids = [np.array(tokenizer.encode(text).ids) for text in texts]
    else:
        readers = {name: size for name, size in gpt_neox.CONFIGS.items() if size.vocab_size == 256}
        if config.model not in readers:
            sizes = ", ".join([*readers, "pythia-*"])
            raise ValueError(f"model: expected one of {sizes}, got {config.model!r}")
        model, pretrained = gpt_neox.NeoX(readers[config.model]), None
        ids = [np.frombuffer(text.encode(), np.uint8) for text in texts]
    tokens_per_byte = len(ids[1]) / len(texts[1].encode())
    windows = cut_windows(ids[0]), some_windows(cut_windows(ids[1]), NUM_TEST)

    def init(key: jax.Array, examples: Windows) -> tuple[Any, None]:
        if pretrained is not None:
            return pretrained, None
        return jax.jit(model.init)(key, examples.ids[:1, :-1])["params"], None

    def loss_fn(params: Any, batch: Windows) -> jax.Array:
        ids = jnp.asarray(batch.ids)
        logits = jnp.asarray(model.apply({"params": params}, ids[:, :-1]))
        return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()

    def test_fn(params: Any, model_state: Any, examples: Windows) -> dict[str, jax.Array]:
        del model_state
        loss = loss_fn(params, examples)
        return {"loss": loss, "loss_per_byte": loss * tokens_per_byte}

    return Task(
        lambda: windows, init, loss_fn, test_fn, metric="loss_per_byte", spoil=spoil_windows, test_size=64
    )


TASKS: dict[str, Callable[[Config], Task]] = {"text": text_task}

# ======================================================================================= calibration


def calibration_job(config: Config) -> calibrate.Job:
    """What `nf-jax calibrate experiments.lm:text` searches, to 0.02 nats per byte."""
    return calibration.make_job(config, TASKS[config.task](config), tolerance=0.02, loss_tolerance=0.01)


# ============================================================================================== main


def main(args: Sequence[str] | None = None) -> None:
    jobs.main("experiments.lm", CONFIGS, TASKS, args)


if __name__ == "__main__":
    main()
