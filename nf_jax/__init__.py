"""Profile-guided low-bit gradient aggregation for data-parallel training in JAX (arXiv 2606.25759)."""

from nf_jax.candidates import Candidate
from nf_jax.load import LoadMeter
from nf_jax.moments import fresh_moments
from nf_jax.plan import Plan, plan
from nf_jax.pmean import pmean
from nf_jax.profile import Profile, Route
from nf_jax.shadow import shadow_plan
from nf_jax.stages import Substrate
from nf_jax.state import AggregateState, shadow_info, shard_state, state_spec, step_info
from nf_jax.telemetry import ShadowInfo, StepInfo
from nf_jax.transform import aggregate_gradients

__version__ = "0.1.0"

__all__ = [
    "AggregateState",
    "Candidate",
    "LoadMeter",
    "Plan",
    "Profile",
    "Route",
    "ShadowInfo",
    "StepInfo",
    "Substrate",
    "aggregate_gradients",
    "fresh_moments",
    "plan",
    "pmean",
    "shadow_info",
    "shadow_plan",
    "shard_state",
    "state_spec",
    "step_info",
]
