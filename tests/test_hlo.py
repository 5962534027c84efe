"""Bytes and memory are read off compiled programs as they are, branches and loops included."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from workers import AXIS

from experiments import hlo


def test_bytes_are_read_from_collectives_of_every_kind():
    text = """
      %a = (f32[10]{0}, f32[3,4]{1,0}) all-reduce(%x, %y), replica_groups={{0,1,2,3}}
      %b = u32[4,8]{1,0} all-to-all(%z), dimensions={0}
      %c = u16[4,5]{1,0} all-gather(%w), dimensions={0}
      %d = f32[100]{0} add(%e, %f)
    """
    assert hlo.collective_bytes(text, num_workers=4) == [132, 96, 30]


def test_of_branches_the_least_and_the_most_are_counted_and_of_a_loop_one_trip():
    def step(x: jax.Array, which: jax.Array) -> jax.Array:
        x = lax.psum(x, AXIS)  # 2 * 3 / 4 of 64 bytes
        branches = [
            lambda x: x,
            lambda x: lax.psum(x[:4], AXIS).sum() + x,  # of 16 bytes
            lambda x: lax.psum(x[:8], AXIS).sum() + x,  # of 32 bytes
        ]
        x = lax.switch(which, branches, x)
        return lax.while_loop(lambda x: x[0] > 0, lambda x: lax.psum(x, AXIS) - 1, x)

    mapped = jax.pmap(step, axis_name=AXIS, devices=jax.devices()[:4])
    compiled = mapped.lower(jnp.zeros((4, 16)), jnp.zeros(4, jnp.int32)).compile()
    text = compiled.as_text()
    assert hlo.path_bytes(text, num_workers=4) == (96 + 96, 96 + 48 + 96)
    assert sum(hlo.collective_bytes(text, num_workers=4)) == 96 + 24 + 48 + 96


def test_what_is_donated_is_overwritten():
    double = jax.jit(lambda x, y: (x * 2, y.sum()), donate_argnums=0)
    memory = hlo.memory_of(double.lower(jnp.zeros(1000), jnp.zeros(500)).compile())
    assert (memory.arguments, memory.overwritten) == (6000, 4000)
    assert memory.results == pytest.approx(4, abs=100)
    assert memory.total == memory.arguments + memory.results + memory.temporaries
