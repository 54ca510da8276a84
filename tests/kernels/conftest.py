"""What the tests of kernels share."""

from collections.abc import Callable

import pytest

from megatron_aro.kernels import cholesky


@pytest.fixture
def in_blocks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the columns of a factor's launch, a multiple of its tile: small factors take several."""

    def set_size(size: int) -> None:
        monkeypatch.setattr(
            cholesky,
            "diagonal_blocks",
            lambda b, k: [slice(i, min(i + size, k)) for i in range(0, k, size)],
        )

    return set_size
