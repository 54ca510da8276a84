"""The mathematics of ARO on batches of matrices: torch only, no distribution, no Megatron.

``step`` is the entry (the spec's steps 1 to 6); ``policies`` chooses the frame, ``projections``
holds the base optimizers f, ``orthonormal`` the QR with its fall-back ladder, ``scaling`` the
exact powers of two and the zero rules, ``precision`` the float32 matrix-product setting,
``monitor`` what is measured of a step.
"""

from megatron_aro.rotation.monitor import MEASURES, measure_after, measure_before
from megatron_aro.rotation.step import (
    FALLBACK_RUNGS,
    Attempt,
    MatrixBatch,
    advance_momentum,
    apply_updates,
    attempt_rotation,
    climb,
    compute_updates,
    finish_update,
    initial_rotation,
    is_recordable,
    new_fallback_counts,
    second_moment_shape,
)

__all__ = [
    "FALLBACK_RUNGS",
    "MEASURES",
    "Attempt",
    "MatrixBatch",
    "advance_momentum",
    "apply_updates",
    "attempt_rotation",
    "climb",
    "compute_updates",
    "finish_update",
    "initial_rotation",
    "is_recordable",
    "measure_after",
    "measure_before",
    "new_fallback_counts",
    "second_moment_shape",
]
