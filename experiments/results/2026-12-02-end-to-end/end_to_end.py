"""Two jobs for two workers, as `nf-jax calibrate` takes them."""

import dataclasses
from pathlib import Path

from experiments import lm, vision


def digits():
    config = dataclasses.replace(vision.digits(), devices=2, per_worker_batch=64)
    return vision.calibration_job(config)


def text():
    config = dataclasses.replace(
        lm.text(), devices=2, per_worker_batch=8, steps=200, warmup_steps=20, profile=Path("text-start.toml")
    )
    return lm.calibration_job(config)
