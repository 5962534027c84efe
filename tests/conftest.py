"""What every test stands on: eight virtual CPU devices, strict promotion, repeatable examples."""

from __future__ import annotations

import hypothesis
import jax

# Before anything touches a backend: afterwards the number of devices is fixed.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")

# Compilation makes the first example slow, so there is no deadline; derandomised, so that a
# failure is the same everywhere and says something about the change at hand.
hypothesis.settings.register_profile("nf_jax", deadline=None, derandomize=True)
hypothesis.settings.load_profile("nf_jax")
