"""A billion parameters: what is planned, compiled and sent, and a few real steps within 24 GiB.

    python -m experiments.billion shapes --model 1.4b --devices 8
    python -m experiments.billion run --model 1b --coordinator localhost:9876 --num-processes 2 --process-id 0
    python -m experiments.billion run --model 1b --coordinator localhost:9876 --num-processes 2 --process-id 1

`shapes` allocates no array: it plans the aggregation of a Pythia's gradients in bf16, compiles it from shapes
for so many workers (every lane in FP32; all that may go low-bit; routes that are data), and stops unless the
compiled collectives send what the plan claims. 1.4b on 8: 317 MB instead of 9.9 GB a step, 3.2 %.

`run` trains: weights and residuals in bf16 on every worker, one short sequence a worker and step, plain
SGD. Two steps in FP32 to warm up, then signs; at `--spike-step` the loss is reported as infinite, health
falls back to FP32 for two steps, of which the first pays the residuals out, and goes low-bit again. It stops
unless every step sent what the plan claims for its routes, training went through FP32, SIGN, FP32 and SIGN
in this order, and all workers hold the same bits at the end.

Both write their rows as JSON under `--out`; experiments/results/ has runs on record.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import tyro
from rich.console import Console
from rich.table import Table

from experiments.billion_run import Run, run_table, train
from experiments.billion_shapes import Shapes, describe_shapes, shapes_table
from nf_jax import cluster


def shapes(config: Shapes) -> None:
    cluster.use_devices("cpu", config.devices)
    found = describe_shapes(config)
    save(found, config.out / f"shapes-{config.model}.json", shapes_table(found))


def run(config: Run) -> None:
    with cluster.joined(config.cluster, config.devices):
        found = train(config)
        if cluster.is_first():
            save(found, config.out / f"run-{config.model}.json", run_table(found))


def main(args: Sequence[str] | None = None) -> None:
    config = tyro.extras.subcommand_cli_from_dict(
        {"shapes": Shapes, "run": Run}, prog="experiments.billion", description=__doc__, args=args
    )
    try:
        shapes(config) if isinstance(config, Shapes) else run(config)
    except ValueError as error:
        sys.exit(f"error: {error}")


def save(found: dict[str, Any], path: Path, table: Table) -> None:
    found = {
        "machine": f"{platform.processor() or platform.machine()}, {jax.default_backend()}",
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
        **found,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=2) + "\n")
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)  # a file or a pipe has no edge to cut tables at
    console.print(table)
    console.print(f"written to {path}")


if __name__ == "__main__":
    main()
