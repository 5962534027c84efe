"""One process of a run that does nothing but average, until something ends it; run as a script.

python cluster_worker.py for-ever|to-the-end|raise|asleep [START_TIMEOUT_SECONDS [HEARTBEAT_TIMEOUT_SECONDS]]
"""

from __future__ import annotations

import sys
import time

import jax
import numpy as np

from nf_jax import cluster


def main(what: str, timeout_seconds: int = 60, heartbeat_seconds: int = 4) -> None:
    options = cluster.Cluster(
        distributed=True, start_timeout_seconds=timeout_seconds, heartbeat_timeout_seconds=heartbeat_seconds
    )
    with cluster.joined(options, num_devices=2):
        average = jax.pmap(lambda x: jax.lax.pmean(x, "i"), axis_name="i", devices=jax.devices())
        print(f"process {jax.process_index()} is up", flush=True)
        for step in range(150 if what == "to-the-end" else 100_000):
            mean = jax.block_until_ready(average(np.full((1, 4), step, np.float32)))
            assert np.all(np.asarray(mean) == step)
            if what == "raise" and step == 3 and jax.process_index() == 1:
                raise ValueError("too much of something")
            if what == "asleep" and step == 3:
                time.sleep(1000)
            time.sleep(0.01)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
