"""Laws of telemetry: every code has words, bytes are exact beyond 32 bits."""

from __future__ import annotations

from nf_jax.telemetry import REASONS, Reason


def test_every_reason_has_a_sentence():
    assert list(REASONS) == list(Reason) and all(REASONS.values())
