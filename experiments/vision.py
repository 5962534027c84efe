"""Image classification, trained alike with every policy: what do cheap gradients cost?

    python -m experiments.vision digits        # 3 policies x 3 seeds: 150 s of CPU time
    python -m experiments.vision cifar10 --seeds 0 1 2 3 4 --resume     # CIFAR-10: about 8 minutes a run
    python -m experiments.vision icons100      # 100 classes of icons; cifar100 likewise

`digits`: real handwritten digits (scikit-learn ships them: 1797 images of 8x8), an MLP of 0.32 M
parameters, 8 data-parallel workers as virtual CPU devices. `cifar10`, `cifar100` and `icons100` (drawings
in CIFAR-100's format) are read from `--data` and train a ResNet-8 (`--model resnet18` on accelerators)
on 4 workers for 6 epochs, with random crops and flips. Policies differ in how gradients are averaged, in
nothing else: `fp32` (plain mean), `static` (every lane as majority signs from step 0, no error
feedback), `static-ef` (with it), `guided` (a profile; the task's under profiles/ unless `--profile` says
otherwise), `bf16`.

Expected test accuracy of digits in %, mean of seeds 0 to 2, and bytes sent over FP32's: fp32 98.4 and 1,
static 96.8 and 0.035, guided 98.1 and 0.073. Under 1 point is noise. How much static loses depends on the
optimizer too: AdamW is the quickstart's. Of the others: experiments/results/.

As one of several processes: `--distributed`, or `--coordinator HOST:PORT --num-processes N --process-id I`;
README.md, "Run on a cluster". `--devices` counts the workers of all of them, and the same seeds give every
worker the same examples as in one process.

Writes under `--out`: summary.json (a row per run), <policy>-<seed>/trace.jsonl (a line per step)
and curves.png.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn import datasets

from experiments import calibration, data, jobs, resnet
from experiments.config import Config
from experiments.data import Images
from experiments.runs import Task
from nf_jax import calibrate

ROOT = Path(__file__).resolve().parent.parent

# ============================================================================================ config


def digits() -> Config:
    """Handwritten digits, MLP: the main job, small enough for a laptop."""
    return Config(
        task="digits",
        profile=ROOT / "profiles" / "digits-mlp.toml",
        out=Path("runs/digits"),
        steps=200,
        per_worker_batch=16,
        learning_rate=1e-3,
    )


def cifar10() -> Config:
    """CIFAR-10, ResNet-8: 6 epochs."""
    return images("cifar10", steps=1172)


def cifar100() -> Config:
    """CIFAR-100, ResNet-8: 6 epochs."""
    return images("cifar100", steps=1172, profile="icons100")


def icons100() -> Config:
    """100 classes of 32x32 icons, ResNet-8; the test icons are of artists that training never sees."""
    return images("icons100", steps=600)


def images(task: str, steps: int, profile: str | None = None) -> Config:
    return Config(
        task=task,
        profile=ROOT / "profiles" / f"{profile or task}-resnet8.toml",
        out=Path("runs") / task,
        steps=steps,
        per_worker_batch=64,
        learning_rate=0.2,
        devices=4,
        model="resnet8",
        optimizer="sgd",
        warmup_steps=steps // 10,
        weight_decay=5e-4,
        num_evaluations=12,
        last_evaluations=3,
        checkpoint_every=100,
    )


CONFIGS: dict[str, Callable[[], Config]] = {
    "digits": digits,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "icons100": icons100,
}

# ==================================================================================== data and models


class Examples(NamedTuple):
    """Attributes: inputs: f32[n, ...]; labels: int32[n]."""

    inputs: np.ndarray
    labels: np.ndarray


def load_digits() -> tuple[Examples, Examples]:
    """A third is for testing: one image is 0.17 points, and three images are no difference."""
    inputs, labels = datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images, labels = (inputs[order] / 16).astype(np.float32), labels[order].astype(np.int32)
    cut = len(labels) * 2 // 3
    return Examples(images[:cut], labels[:cut]), Examples(images[cut:], labels[cut:])


class MLP(nn.Module):
    """Dense layers with ReLU, then a head of one logit per class."""

    hidden_sizes: tuple[int, ...]
    num_classes: int

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        dense = functools.partial(nn.Dense, kernel_init=nn.initializers.lecun_uniform())
        values = inputs
        for index, size in enumerate(self.hidden_sizes):
            values = nn.relu(dense(size, name=f"hidden_{index}")(values))
        return dense(self.num_classes, name="head")(values)


def spoil_labels(rng: np.random.Generator, examples: Any) -> Any:
    return examples._replace(labels=rng.permutation(examples.labels))


def cross_entropy(logits: jax.Array, labels: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Mean loss, and the accuracy in percent."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    hits = jnp.argmax(logits, axis=-1) == labels
    return losses.mean(), {"accuracy": 100 * hits.astype(jnp.float32).mean()}


def classification(load: Callable[[], tuple[Examples, Examples]], model: nn.Module) -> Task:
    """Classify with softmax cross-entropy."""

    def init(key: jax.Array, examples: Examples) -> tuple[Any, None]:
        return jax.jit(model.init)(key, examples.inputs[:1])["params"], None

    def loss_fn(params: Any, batch: Examples) -> tuple[jax.Array, dict[str, jax.Array]]:
        return cross_entropy(jnp.asarray(model.apply({"params": params}, batch.inputs)), batch.labels)

    def test_fn(params: Any, model_state: Any, examples: Examples) -> dict[str, jax.Array]:
        del model_state
        loss, metrics = loss_fn(params, examples)
        return {"loss": loss, **metrics}

    return Task(load, init, loss_fn, test_fn, spoil=spoil_labels)


# ----------------------------------------------------------------------------------- 32x32 images

MODELS = {"resnet8": resnet.resnet8, "resnet18": resnet.resnet18}
PADDING = 4


def image_task(config: Config, name: str, num_classes: int) -> Task:
    """A ResNet on images in CIFAR's format; batch-norm statistics are the model's own state."""
    if config.model not in MODELS:
        raise ValueError(f"model: expected one of {', '.join(MODELS)}, got {config.model!r}")
    model = MODELS[config.model](num_classes)

    def load() -> tuple[Images, Images]:
        return data.read_cifar(data.find_data(name, config.data), num_classes)

    def init(key: jax.Array, examples: Images) -> tuple[Any, Any]:
        variables = jax.jit(functools.partial(model.init, train=False))(key, normalize(examples.images[:1]))
        return variables["params"], variables["batch_stats"]

    def loss_fn(params: Any, batch: Images, batch_stats: Any) -> tuple[jax.Array, dict[str, jax.Array], Any]:
        variables = {"params": params, "batch_stats": batch_stats}
        logits, changes = model.apply(variables, normalize(batch.images), train=True, mutable=["batch_stats"])
        return *cross_entropy(logits, batch.labels), changes["batch_stats"]

    def test_fn(params: Any, batch_stats: Any, examples: Images) -> dict[str, jax.Array]:
        variables = {"params": params, "batch_stats": batch_stats}
        logits = jnp.asarray(model.apply(variables, normalize(examples.images), train=False))
        loss, metrics = cross_entropy(logits, examples.labels)
        return {"loss": loss, **metrics}

    return Task(load, init, loss_fn, test_fn, augment=crop_and_flip, spoil=spoil_labels)


def normalize(images: Any) -> jax.Array:
    """`uint8[n, 32, 32, 3]` to about zero mean and unit variance, with CIFAR-10's mean and deviation."""
    return (jnp.asarray(images).astype(jnp.float32) / 255 - 0.47) / 0.25


def crop_and_flip(rng: np.random.Generator, examples: Images) -> Images:
    """Each image shifted by up to 4 pixels each way over a black border, and mirrored with even odds."""
    num, side, _, channels = examples.images.shape
    padded = np.pad(examples.images, ((0, 0), (PADDING, PADDING), (PADDING, PADDING), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (side, side), axis=(1, 2))
    top, left = rng.integers(0, 2 * PADDING + 1, (2, num))
    cropped = windows[np.arange(num), top, left].transpose(0, 2, 3, 1)
    mirrored = rng.random(num) < 0.5
    cropped = np.where(mirrored[:, None, None, None], cropped[:, :, ::-1], cropped)
    return examples._replace(images=np.ascontiguousarray(cropped.reshape(num, side, side, channels)))


TASKS: dict[str, Callable[[Config], Task]] = {
    "digits": lambda _: classification(load_digits, MLP((384, 384, 384), num_classes=10)),
    "cifar10": lambda config: image_task(config, "cifar10", 10),
    "cifar100": lambda config: image_task(config, "cifar100", 100),
    "icons100": lambda config: image_task(config, "icons100", 100),
}

# ======================================================================================= calibration


def calibration_job(config: Config) -> calibrate.Job:
    """What `nf-jax calibrate experiments.vision:digits` searches, to a point of accuracy."""
    return calibration.make_job(config, TASKS[config.task](config), tolerance=1.0, loss_tolerance=0.1)


# ============================================================================================== main


def main(args: Sequence[str] | None = None) -> None:
    jobs.main("experiments.vision", CONFIGS, TASKS, args)


if __name__ == "__main__":
    main()
