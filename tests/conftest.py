"""What every test stands on: eight virtual CPU devices, strict promotion, repeatable examples."""

from __future__ import annotations

import gc
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import jax
import pytest

# Before anything touches a backend: afterwards the number of devices is fixed.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")

# A program that tests make twice, each with a function of its own, is compiled once, for this process alone:
# processes must not share the folder, as JAX's entries are not written whole or not at all.
PROGRAMS = tempfile.mkdtemp(prefix="nf_jax-tests-")
jax.config.update("jax_compilation_cache_dir", PROGRAMS)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_unconfigure() -> None:
    shutil.rmtree(PROGRAMS, ignore_errors=True)


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
