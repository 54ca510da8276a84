"""Fixtures of the tests that run real Megatron: the pool, started once a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four ranks at most; see `pool`."""
    pool = Pool(size=4)
    yield pool
    pool.close()
