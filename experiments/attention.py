"""Attention, as the encoder and the decoder share it."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def attend(query: jax.Array, key: jax.Array, value: jax.Array, allowed: jax.Array) -> jax.Array:
    """Softmax attention; scores and probabilities in f32.

    Args:
      query, key, value: `[n, t, heads, size]`, one dtype.
      allowed: bool, `[n, 1, 1, t]` or `[t, t]`: which keys a query sees, at least one each.

    Returns:
      `[n, t, heads * size]`, that dtype.
    """
    scores = jnp.einsum("nqhd,nkhd->nhqk", query, key, preferred_element_type=jnp.float32)
    scores = jnp.where(allowed, scores * query.shape[-1] ** -0.5, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores).astype(value.dtype)
    mixed = jnp.einsum("nhqk,nkhd->nqhd", weights, value)
    return mixed.reshape(*mixed.shape[:2], -1)
