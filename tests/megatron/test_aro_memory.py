"""Memory: what a rank keeps, and what a step takes, are what the plan predicts."""

from __future__ import annotations

import pytest
from aro_runs import ARO, DISTRIBUTED, GATED, MOE
from pool import Pool

# Large enough for vectors of row and column norms not to count.
MODEL = ["--hidden-size", "128", "--ffn-hidden-size", "384", "--micro-batch-size", "1"]
TP2 = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
EP2 = ["--expert-model-parallel-size", "2"]
# For each of the experts far more than its smaller side, so that none is nearly singular.
TOKENS = ["--micro-batch-size", "4", "--global-batch-size", "16"]


def train_measuring(argv: list[str], chunk_elements: int) -> list[dict[str, int]]:
    """Train, and measure the last step of each MatrixOptimizer of this rank in bytes."""
    import runs
    from aro_runs import predicted_memory
    from peak import Peak

    from megatron_aro.runtime.matrix_optimizer import MatrixOptimizer
    from megatron_aro.sharding import plan

    plan.CHUNK_ELEMENTS = chunk_elements
    measured: dict[int, dict[str, int]] = {}
    original = MatrixOptimizer.step

    def step(self: MatrixOptimizer, closure: None = None) -> None:
        self.together = [self]  # to each its own memory
        self.initialize_state()
        kept = self.rotation_state()
        state = [self.state[p]["exp_avg"] for p in self._main.values()]
        main = [x for p in self._main.values() for x in (p, p.grad)]
        with Peak([*kept.values(), *state, *main]) as peak:
            original(self, closure)
        exchange = self._exchange
        measured[id(self)] = predicted_memory(self) | {
            "peak": peak.bytes,
            "momentum": sum(x.numel() * 4 for x in state),
            "held": sum(s.count(exchange.d) * 4 for s in exchange.plan.sharded) // exchange.plan.tp,
            "kept": sum(x.numel() * 4 for name, x in kept.items() if "rotation." in name),
            "climbed": sum(int(x[2]) for name, x in kept.items() if "fallbacks." in name),
        }

    MatrixOptimizer.step = step  # type: ignore[method-assign]
    assert runs.train(argv).exit_status == 0
    return list(measured.values())


@pytest.mark.parametrize(
    ("flags", "chunk_elements"),
    [
        ([*GATED, *TP2, *DISTRIBUTED], 1),
        ([*GATED, *DISTRIBUTED], 1 << 30),
        ([*GATED], 1 << 30),
        ([*GATED, *TP2], 1),
        ([*MOE, *EP2, *TOKENS, *DISTRIBUTED], 1),
    ],
    ids=["TP 2 x DP 2", "DP 4", "DP 4 replicated", "TP 2 x DP 2 replicated", "EP 2 x DP 2"],
)
def test_memory_is_what_the_plan_predicts(
    pool: Pool, flags: list[str], chunk_elements: int
) -> None:
    """Kept exactly; the step's peak at most 5% above, for vectors, masks and flags.

    Square matrices stay a fifth below: what is reckoned for them is the step in halves (GPUs).

    On the CPU one thing is done after the other: the gathered matrices stay, and the exchange's
    buffers and the largest batch's workspace come in turn. The ladder's memory is not predicted,
    and nothing climbs it here.
    """
    argv = [*ARO, *MODEL, *flags, "--train-iters", "2"]
    for optimizers in pool.run(4, train_measuring, argv, chunk_elements):
        for found in optimizers:
            assert found["kept"] == found["rotation"] and not found["climbed"]
            assert found["momentum"] == found["held"] or flags[0] == MOE[0]  # routers have copies
            predicted = found["gathered"] + max(found["exchange"], found["workspace"])
            assert 0.7 * predicted <= found["peak"] <= 1.05 * predicted + 2**14, found
