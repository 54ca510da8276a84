"""Waiting of programs of one launch for one another, by counters in memory.

A program may wait only for programs of smaller index: the device starts these earlier, so that
however few programs it holds at a time, none waits for one that cannot start.
"""

from __future__ import annotations

from megatron_aro.kernels.support import tl, triton


@triton.jit
def wait(counter, target):
    """Until the counter has reached the target; returns what it holds then."""
    value = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    while value < target:
        value = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    return value


@triton.jit
def announce(counter, value):
    """Set a counter that no other program sets before; what was stored becomes visible first."""
    tl.debug_barrier()
    tl.atomic_xchg(counter, value, sem="release", scope="gpu")


@triton.jit
def count(counter):
    """Add one; what was stored becomes visible first."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release", scope="gpu")
