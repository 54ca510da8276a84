"""What docs/tuning.md says of learning rates by group, in real Megatron."""

from __future__ import annotations

from typing import Any

import pytest
from aro_runs import ARO, GATED
from pool import Pool

UNTIED = ["--untie-embeddings-and-output-weights"]
MUP = ["--use-mup", "--mup-base-hidden-size", "16"]  # the model is 32 wide
LR = 1e-2  # of TINY


def rates(model: list, optimizer: Any) -> dict[bool, set[float]]:
    """Largest learning rates of the groups of ARO (True) and AdamW."""
    found: dict[bool, set[float]] = {True: set(), False: set()}
    for chained in optimizer.chained_optimizers:
        is_aro = chained.optimizer in optimizer.matrices
        found[is_aro] |= {group.get("max_lr") for group in chained.optimizer.param_groups}
    return found


@pytest.mark.parametrize(("flags", "expected"), [([], LR), (MUP, LR / 2)], ids=["plain", "MuP"])
def test_mup_divides_the_rate_of_matrices(pool: Pool, flags: list[str], expected: float) -> None:
    """Of ARO's by the width multiplier, 2 here; embeddings, norms and biases keep theirs."""
    argv = [*ARO, *GATED, *UNTIED, *flags]
    (result,) = pool.train(1, argv, inspect="test_tuning:rates")
    assert result.exit_status == 0
    assert result.inspected[True] == {expected}
    assert LR in result.inspected[False]
