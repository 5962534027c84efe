"""Runs that show what nf_jax does, one script each, read from top to bottom."""
