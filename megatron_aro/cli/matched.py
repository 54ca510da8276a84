"""What makes two runs comparable, and by how much one is faster (arXiv 2602.09006, section 5).

The speed-up of a run over the baseline at step t is t / s, with s the first step at which the run's
smoothed loss is at most the baseline's smoothed loss at t. By time it is that times the baseline's
milliseconds an iteration over the run's.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_aro.cli.runs import Run

# What must be the same for a difference in loss to be the matrix optimizer's.
_SAME = {
    "schedule": (
        *("train_iters", "train_samples", "lr", "min_lr", "lr_decay_style", "lr_decay_iters"),
        *("lr_decay_samples", "lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction"),
        *("lr_warmup_init", "lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples"),
        *("weight_decay", "start_weight_decay", "end_weight_decay", "weight_decay_incr_style"),
        "clip_grad",
    ),
    "batch": ("global_batch_size", "rampup_batch_size", "seq_length"),
    "data": (
        *("data_path", "train_data_path", "valid_data_path", "test_data_path", "data_args_path"),
        *("per_split_data_args_path", "split", "mock_data", "tokenizer_type", "tokenizer_model"),
        *("vocab_size", "reset_position_ids", "reset_attention_mask", "eod_mask_loss"),
    ),
    "non-matrix optimizer": (
        *("adam_beta1", "adam_beta2", "adam_eps", "decoupled_lr", "decoupled_min_lr"),
        "decoupled_weight_decay",
    ),
    "model": (
        *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels"),
        *("num_query_groups", "qk_layernorm", "position_embedding_type", "rotary_base"),
        *("max_position_embeddings", "normalization", "norm_epsilon", "swiglu"),
        *("add_bias_linear", "untie_embeddings_and_output_weights", "init_method_std"),
        *("attention_dropout", "hidden_dropout", "num_experts", "moe_router_topk"),
        *("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_layer_freq"),
        *("moe_router_score_function", "moe_router_pre_softmax", "moe_aux_loss_coeff"),
        *("moe_router_load_balancing_type", "bf16", "fp16"),
    ),
}
_MATRIX_PREFIXES = ("aro_", "muon_")


def refusals(runs: Sequence[Run], baseline: Run) -> list[str]:
    """Why the runs cannot be compared, a sentence each; empty if they can."""
    reasons = []
    for run in runs:
        if not run.settings:
            reasons.append(
                f"{run.name}: its files do not say its settings. Give the log of rank 0 too."
            )
        elif run is not baseline and baseline.settings:
            for what, names in _SAME.items():
                for name in names:
                    ours, theirs = (x.settings.get(name) for x in (run, baseline))
                    if ours != theirs:
                        flag = "--" + name.replace("_", "-")
                        reasons.append(
                            f"{run.name}: another {what}, {flag} is {ours}, and {theirs} in "
                            f"{baseline.name}."
                        )
        if run.optimizer == "muon" and run.settings.get("muon_scalar_optimizer", "adam") != "adam":
            reasons.append(f"{run.name}: another non-matrix optimizer, --muon-scalar-optimizer.")
    for run in runs:
        reasons += _other_rates(run, baseline)
    return reasons


def _other_rates(run: Run, baseline: Run) -> list[str]:
    """Learning rates as trained, should a checkpoint's schedule have overridden the flags."""
    for step in sorted(run.rates.keys() & baseline.rates.keys()):
        ours, theirs = run.rates[step], baseline.rates[step]
        if abs(ours - theirs) > 1e-3 * max(abs(ours), abs(theirs)):
            return [
                f"{run.name}: another schedule, the learning rate of step {step} was {ours:g}, and "
                f"{theirs:g} in {baseline.name}."
            ]
    return []


def is_twin(run: Run, baseline: Run) -> bool:
    """Whether two runs differ in their seed, and in nothing that matters beside it."""
    names = {
        name
        for name in run.settings.keys() | baseline.settings.keys()
        if name == "optimizer"
        or name.startswith(_MATRIX_PREFIXES)
        or any(name in same for same in _SAME.values())
    }
    same = all(run.settings.get(name) == baseline.settings.get(name) for name in names)
    return same and run.settings.get("seed") != baseline.settings.get("seed")


def window(total: int) -> int:
    """Iterations that a smoothed loss is the mean of: 1% of the training, at least 20."""
    return max(1, min(max(20, total // 100), total // 4))


class Smoothed:
    """A run's loss, smoothed: at a logged step the mean over the last `width` iterations."""

    def __init__(self, run: Run, width: int) -> None:
        self.steps = run.steps
        sums = [0.0, *itertools.accumulate(run.losses[step] for step in self.steps)]
        self.losses = []
        for i, step in enumerate(self.steps):
            first = bisect.bisect_right(self.steps, step - width)
            self.losses.append((sums[i + 1] - sums[first]) / (i + 1 - first))
        self._lowest = list(itertools.accumulate(self.losses, min))

    def at(self, step: int) -> float:
        """At the last logged step that is not after `step`."""
        return self.losses[bisect.bisect_right(self.steps, step) - 1]

    def reaches(self, loss: float) -> int | None:
        """The first logged step at which the smoothed loss is at most `loss`."""
        i = bisect.bisect_left(self._lowest, -loss, key=lambda lowest: -lowest)
        return self.steps[i] if i < len(self.steps) else None


@dataclass(frozen=True)
class Point:
    """The comparison with the baseline at one of its steps.

    Attributes:
        reached: the run's first step with the baseline's loss; None if it never came so low.
        speedup: step / reached; None where `reached` is.
    """

    step: int
    loss: float
    reached: int | None

    @property
    def speedup(self) -> float | None:
        return self.step / self.reached if self.reached else None


def points(run: Smoothed, baseline: Smoothed, steps: Sequence[int]) -> list[Point]:
    """The comparison at the baseline's steps given."""
    return [Point(step, loss := baseline.at(step), run.reaches(loss)) for step in steps]
