"""What a worker of the link benchmark does whatever its library: shapes, values, turns, messages.

`experiments.links` starts `experiments.links_jax` and `experiments.links_torch` on every host; both hand
their arms to `serve`, which takes one JSON message a line from stdin and answers each on stdout. Imports
neither JAX nor PyTorch: each worker has only one of them.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

import numpy as np

INTERFACE_BYTES = Path("/sys/class/net/eth0/statistics/tx_bytes")

# ============================================================================================= shapes

Shapes = dict[str, tuple[int, ...]]
"""Path of a parameter -> its shape, as Flax lays it out: dense [in, out], convolution [h, w, in, out]."""


def one_bucket(side: int) -> Shapes:
    """One square matrix of float32."""
    return {"kernel": (side, side)}


def resnet18() -> Shapes:
    """ResNet-18 for 1000 classes (arXiv 1512.03385): 11.7 M parameters in 62 arrays."""
    shapes: Shapes = {}

    def add_convolution(name: str, size: int, num_in: int, num_out: int) -> None:
        shapes[f"{name}/kernel"] = (size, size, num_in, num_out)
        shapes.update({f"{name}_norm/{part}": (num_out,) for part in ("scale", "bias")})

    add_convolution("stem", 7, 3, 64)
    num_in = 64
    for stage, num_out in enumerate((64, 128, 256, 512)):
        for block in range(2):
            name = f"stage_{stage}/block_{block}"
            add_convolution(f"{name}/conv_0", 3, num_in, num_out)
            add_convolution(f"{name}/conv_1", 3, num_out, num_out)
            if num_in != num_out:
                add_convolution(f"{name}/shortcut", 1, num_in, num_out)
            num_in = num_out
    return {**shapes, "top/kernel": (512, 1000), "top/bias": (1000,)}


def bert6() -> Shapes:
    """The 6-layer BERT of DistilBERT (arXiv 1910.01108): 66.4 M parameters in 100 arrays."""
    width, hidden = 768, 3072
    norm = lambda name: {f"{name}/{part}": (width,) for part in ("scale", "bias")}  # noqa: E731
    shapes: Shapes = {"embed/words": (30522, width), "embed/positions": (512, width), **norm("embed/norm")}
    for layer in range(6):
        sizes = dict.fromkeys(("query", "key", "value", "out"), (width, width))
        sizes |= {"mlp_in": (width, hidden), "mlp_out": (hidden, width)}
        for name, (num_in, num_out) in sizes.items():
            shapes[f"layer_{layer}/{name}/kernel"] = (num_in, num_out)
            shapes[f"layer_{layer}/{name}/bias"] = (num_out,)
        shapes |= norm(f"layer_{layer}/attention_norm") | norm(f"layer_{layer}/mlp_norm")
    return shapes


SHAPES: dict[str, Callable[[], Shapes]] = {
    "64KiB": functools.partial(one_bucket, 128),
    "1MiB": functools.partial(one_bucket, 512),
    "16MiB": functools.partial(one_bucket, 2048),
    "resnet18": resnet18,
    "bert6": bert6,
}


def gradient_bytes(shapes: str) -> int:
    """Bytes of one worker's gradient in float32."""
    return sum(4 * int(np.prod(shape)) for shape in SHAPES[shapes]().values())


def make_values(shapes: str, host: int) -> dict[str, np.ndarray]:
    """A host's gradient: normal values, the same for every arm, other ones on every host."""
    table = SHAPES[shapes]()
    return {name: _values_of(host, index, shape) for index, (name, shape) in enumerate(table.items())}


def mean_of_first(shapes: str, hosts: int) -> np.ndarray:
    """The exact mean of the first array over all hosts, to see whether an arm averages."""
    shape = next(iter(SHAPES[shapes]().values()))
    return np.mean([_values_of(host, 0, shape) for host in range(hosts)], axis=0)


def _values_of(host: int, index: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng([3, host, index]).standard_normal(shape, np.float32)


# ============================================================================================== turns


class Arm(Protocol):
    """One way to average a gradient, ready to run."""

    def get_ready(self) -> None:
        """What is not timed: in training, the forward pass and the freeing of old gradients."""
        ...

    def step(self) -> None:
        """Local gradients in, their means out; returns when they are there."""
        ...

    def first_mean(self) -> np.ndarray:
        """The last mean of the first array, in the layout of `SHAPES`."""
        ...

    def describe(self) -> str:
        """What the last step did, say its routes; shown where it is not what was asked."""
        ...

    def release(self) -> None:
        """Drops results that the next step makes anew; state stays."""
        ...


class Backend(Protocol):
    """What one library offers."""

    def load(self, values: dict[str, np.ndarray]) -> Any:
        """A host's gradient in the library's own form, shared by all arms."""
        ...

    def make_arm(self, name: str, values: Any, substrate: str | None = None) -> Arm:
        """The arm of a name, for values as `load` made them; `substrate`: what `probe` told, for `auto`."""
        ...

    def probe(self, link: str, sizes_bytes: Sequence[int]) -> str:
        """Measures the hosts and their links, and returns a substrate's text."""
        ...


def take_turn(arm: Arm, barrier: Callable[[], None], num_uncounted: int, num_counted: int) -> dict[str, Any]:
    """Seconds of every counted step, and the bytes that left this host per counted step.

    Every step starts after a barrier, which is not timed. Its bytes (under 1 kB a step) and those of
    acknowledgements are in the count; a last barrier makes sure that all of the last step has left.
    """
    for _ in range(num_uncounted):
        arm.get_ready()
        barrier()
        arm.step()
    seconds = []
    gc.collect()
    barrier()
    before = int(INTERFACE_BYTES.read_text())
    for _ in range(num_counted):
        arm.get_ready()
        barrier()
        start = time.perf_counter()
        arm.step()
        seconds.append(time.perf_counter() - start)
    barrier()
    sent = int(INTERFACE_BYTES.read_text()) - before
    arm.release()
    return {"seconds": seconds, "tx_bytes": sent}


def prepare(arm: Arm, barrier: Callable[[], None], shapes: str, hosts: int, num_steps: int) -> dict[str, Any]:
    """Compiles and warms up; says how well the arm's mean agrees with the exact one.

    Two arrays agree by the cosine of their angle: 1 for an exact mean, near 0 for noise.
    """
    start = time.perf_counter()
    for _ in range(num_steps):
        arm.get_ready()
        barrier()
        arm.step()
    got, want = arm.first_mean().ravel(), mean_of_first(shapes, hosts).ravel()
    cosine = float(got @ want / max(float(np.linalg.norm(got)) * float(np.linalg.norm(want)), 1e-30))
    done = {"cosine": cosine, "seconds": time.perf_counter() - start, "did": arm.describe()}
    arm.release()
    return done


def claim_stdout() -> TextIO:
    """Stdout for answers alone; whatever else is printed from now on goes to stderr.

    Call it first: gloo greets on stdout when processes meet.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


def serve(
    backend: Backend,
    barrier: Callable[[], None],
    host: int,
    hosts: int,
    answers: TextIO,
    messages: Iterable[str] = sys.stdin,
) -> None:
    """Answers the parent until it closes stdin.

    Messages: `{"do": "prepare", "arm", "shapes", "steps"}` (and "substrate"), `{"do": "turn", "arm",
    "uncounted", "counted"}`, `{"do": "probe", "link", "sizes_bytes"}`, and `{"do": "drop"}`, which forgets
    arms and values.
    """
    arms: dict[str, Arm] = {}
    values: dict[str, Any] = {}
    print(json.dumps({"ready": os.getpid()}), file=answers)
    for line in messages:
        message = json.loads(line)
        answer: dict[str, Any] = {}
        if message["do"] == "drop":
            arms.clear()
            values.clear()
            gc.collect()
        elif message["do"] == "prepare":
            shapes = message["shapes"]
            if shapes not in values:
                values[shapes] = backend.load(make_values(shapes, host))
            arm = backend.make_arm(message["arm"], values[shapes], message.get("substrate"))
            arms[message["arm"]] = arm
            answer = prepare(arm, barrier, shapes, hosts, message["steps"])
        elif message["do"] == "probe":
            answer = {"substrate": backend.probe(message["link"], message["sizes_bytes"])}
        else:
            answer = take_turn(arms[message["arm"]], barrier, message["uncounted"], message["counted"])
        print(json.dumps(answer), file=answers)
