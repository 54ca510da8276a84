"""The pool of real Megatron's tests, for what must agree with it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "megatron"))
from pool import Pool  # noqa: E402


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four ranks at most; see `pool`."""
    pool = Pool(size=4)
    yield pool
    pool.close()
