"""What a job depends on."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

import tyro

import nf_jax
from nf_jax import cluster

Policy = Literal[
    "fp32",
    "bf16",
    "static",
    "static-ef",
    "guided",
    "signsgd",
    "terngrad",
    "powersgd1",
    "powersgd2",
    "powersgd4",
    "dgc",
    "accordion",
    "sign-per-leaf",
    "sign-per-1mib",
    "sign-per-5mib",
    "sign-per-25mib",
]
AXIS = "batch"
LEVELS = ("hosts", "devices")  # the axes of a mesh with two levels
TROUBLE_STEPS = 20


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything a job depends on; every field is a flag."""

    task: tyro.conf.Suppress[str]
    """Data and model: a name that the experiment knows."""
    profile: Path
    """Operating profile (TOML) of the policy `guided`."""
    out: Path
    """Folder for summary.json, traces and curves.png; an earlier job's are replaced, unless `--resume`."""
    steps: int
    """Optimizer steps per run."""
    per_worker_batch: int
    """Examples per worker and step."""
    learning_rate: float
    """Peak of the learning rate, which falls to 0 along a cosine."""
    policies: tuple[Policy, ...] = ("fp32", "static", "guided")
    """How gradients are averaged. `static`: majority signs everywhere from step 0, without error feedback;
    `static-ef`: with it; `guided`: by the profile. The others: published rules, in baselines.py."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Each decides initial parameters and the order of the examples, alike for all policies."""
    devices: int = 8
    """Workers in all processes together, as virtual CPU devices by default."""
    devices_per_host: int = 1
    """Workers that average exactly among themselves: only the means of hosts are routed, between hosts."""
    substrate: Path | None = None
    """What `nf-jax probe` wrote between these workers: lanes of `guided` that would not gain stay in FP32."""
    parallel: Literal["pmap", "shard_map"] = "pmap"
    """How the step is mapped over the workers."""
    data: Path | None = None
    """Folder with the data sets; by default $NF_DATA, else ~/.cache/nf_jax_data."""
    model: str = ""
    """Which of the experiment's models; its docstring lists them."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """AdamW, or SGD with Nesterov's momentum of 0.9."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises to its peak."""
    weight_decay: float = 1e-4
    """The optimizer's."""
    signsgd_learning_rate: float = 1e-3
    """Peak of the learning rate of `signsgd`, whose every step is a sign."""
    clip_norm: float = 1.0
    """Global norm to which mean gradients are clipped."""
    num_evaluations: int = 10
    """Times that a run is tested, evenly spaced."""
    last_evaluations: int = 1
    """How many of the last tests a run's result is the mean of."""
    trouble: Literal["none", "learning_rate", "labels"] = "none"
    """What strikes for 20 steps from the middle on: 10 times the learning rate, or shuffled labels."""
    resume: bool = False
    """Keep what an earlier, stopped job of the same config has left in `out`: finished runs, and of one that
    it was in, what came before the last checkpoint."""
    checkpoint_every: int = 0
    """Steps from one checkpoint of a run to the next; 0: none, as where several processes do not share
    `out`. They are deleted when the run is whole."""
    cluster: tyro.conf.OmitArgPrefixes[cluster.Cluster] = dataclasses.field(default_factory=cluster.Cluster)
    """The processes of the run."""

    def __post_init__(self) -> None:
        counts = ("steps", "per_worker_batch", "devices", "devices_per_host", "num_evaluations")
        for name in (*counts, "last_evaluations"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if min(self.seeds, default=0) < 0:
            raise ValueError(f"seeds: expected numbers from 0 on, got {self.seeds}")
        for name in ("policies", "seeds"):
            if not (values := getattr(self, name)) or len(set(values)) != len(values):
                raise ValueError(f"{name}: expected at least one and no repeats, got {values}")
        if self.devices % self.devices_per_host:
            raise ValueError(
                f"devices_per_host: expected a divisor of devices={self.devices}, got {self.devices_per_host}"
            )
        if self.checkpoint_every < 0:
            raise ValueError(f"checkpoint_every: expected 0 or more, got {self.checkpoint_every}")
        if not 0 <= self.warmup_steps < self.steps:
            raise ValueError(f"warmup_steps: expected 0 to steps - 1, got {self.warmup_steps}")

    @property
    def num_workers(self) -> int | tuple[int, int]:
        """As `aggregate_gradients` takes it: a pair for two levels."""
        inner = self.devices_per_host
        return self.devices if inner == 1 else (self.devices // inner, inner)

    @property
    def measured(self) -> nf_jax.Substrate | None:
        """The substrate, read from its file."""
        return None if self.substrate is None else nf_jax.Substrate.load(self.substrate)

    @property
    def axis(self) -> str | tuple[str, str]:
        """What the workers lie along; pmap has one axis, whose members are grouped."""
        return LEVELS if self.devices_per_host > 1 and self.parallel == "shard_map" else AXIS

    @property
    def troubled(self) -> range:
        """The steps at which trouble strikes."""
        start = self.steps // 2
        return range(0) if self.trouble == "none" else range(start, start + TROUBLE_STEPS)
