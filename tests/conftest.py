"""What every test stands on: eight virtual CPU devices, strict promotion, repeatable examples."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import jax
import pytest

# Before anything touches a backend: afterwards the number of devices is fixed.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")

# Compilation makes the first example slow, so there is no deadline; derandomised, so that a
# failure is the same everywhere and says something about the change at hand.
hypothesis.settings.register_profile("nf_jax", deadline=None, derandomize=True)
hypothesis.settings.load_profile("nf_jax")

MAPPINGS = Path("/proc/self/maps")  # where there is one: on Linux
MANY_MAPPINGS = 30_000  # Linux allows a process 65,530 by default


@pytest.fixture(scope="module", autouse=True)
def few_mappings() -> Iterator[None]:
    """Programs of earlier files go before they fill the process's table of memory mappings.

    Every compiled program takes ten and more; one process that ran the whole suite died of it inside XLA.
    """
    yield
    if MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > MANY_MAPPINGS:
        jax.clear_caches()
        gc.collect()
