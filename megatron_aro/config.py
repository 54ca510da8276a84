"""AROConfig: the one source of every ARO setting.

The optimizer's arguments, Megatron's ``--aro-*`` flags, their help texts and the table in the
README all derive from this dataclass. It imports nothing but the standard library.
"""

from __future__ import annotations

import math
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal, get_args

Projection = Literal["sinkhorn", "rownorm", "sign", "adam"]
Rotation = Literal["aro", "eigen", "polar", "rgd", "none"]
Orthonormalizer = Literal["scqr2", "scqr", "qr"]
Orientation = Literal["residual", "min-side", "left", "right"]
Precision = Literal["fp32", "tf32", "fp16", "fp16x3"]
ExchangeDtype = Literal["fp32", "bf16"]
ParamLayout = Literal["packed", "whole"]
Mode = Literal["hybrid", "full-model"]
Sharing = Literal["none", "global", "chain"]
CudaGraphs = Literal["small", "none"]

ADAMW = "adamw"  # among the rules of exceptions: not ARO's
NONE = "none"
SPLITS = ("qkv", "gate-up")


def _setting(default: Any, help: str, choices: Any = None) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices and get_args(choices)})


@dataclass(frozen=True, kw_only=True)
class AROConfig:
    """What ARO computes, beside learning rate and weight decay, which are the training loop's.

    Raises:
        ValueError: a field is outside its range; the message names field, value and rule.
    """

    mode: Mode = _setting(
        "hybrid",
        "What ARO steps: hybrid is hidden matrices, AdamW the rest; full-model is embeddings, "
        "output layer, biases and norms too (Megatron only).",
        Mode,
    )
    momentum: float = _setting(0.95, "Decay beta of the momentum M <- beta M + (1 - beta) G.")
    projection: Projection = _setting(
        "sinkhorn", "Base optimizer f that acts in the rotated frame.", Projection
    )
    rotation: Rotation = _setting(
        "aro",
        "How the frame is chosen: aro looks ahead through f, eigen is one power iteration, polar "
        "takes aro's polar factor, rgd climbs in ten gradient steps, none does not rotate.",
        Rotation,
    )
    qr: Orthonormalizer = _setting(
        "scqr2",
        "Orthonormalisation: scqr2 is QR by Cholesky, in two passes or, for square rotations by "
        "eigen or by aro with sinkhorn or rownorm, from within the old frame; scqr is the paper's "
        "single pass, qr Householder.",
        Orthonormalizer,
    )
    orientation: Orientation = _setting(
        "residual",
        "Which side is rotated: residual is the residual-stream side (the paper's rule), min-side "
        "the smaller one, left the rows as stored, right the columns.",
        Orientation,
    )
    override: str = _setting(
        NONE,
        "Exceptions by name, PATTERN=RULE,PATTERN=RULE...: the first pattern that fits decides. "
        "Patterns are the shell's, for names of parameters or of the matrices in them "
        "(*.linear_qkv.weight#v); rules are those of orientation, and adamw for parameters that "
        "AdamW is to step, *.router.weight=adamw (Megatron only).",
    )
    split: str = _setting(
        ",".join(SPLITS),
        "Which fused weights are stepped as the matrices they hold: qkv (Q, K, V, and their gate), "
        "gate-up (gated fc1), or none. Experts always are (Megatron only).",
    )
    sharing: Sharing = _setting(
        "none",
        "Which matrices share a rotation, side by side: global, all whose rotated side is the "
        "residual stream; chain, those that read the stream that enters a layer with those that "
        "write to it in the layer before; none, a rotation each (Megatron only).",
        Sharing,
    )
    beta2: float = _setting(0.95, "Decay of the second moment; projection adam only.")
    update_rms: float = _setting(
        0.2, "Root mean square of an update before the learning rate; 0.2 is AdamW's."
    )
    sinkhorn_iters: int = _setting(5, "Iterations of the sinkhorn projection.")
    scqr_eps: float = _setting(
        1e-7, "Shift of Cholesky QR, relative to the trace of the Gram matrix."
    )
    precision: Precision = _setting(
        "fp16x3",
        "Precision of matrix products on the GPU inside ARO: fp16x3, operands in two float16 "
        "halves with 22 bits, and fp16, in one with TF32's bits, both with float32 sums. Rotation "
        "eigen, and aro with sinkhorn or rownorm, do all of a step so (with scqr2 and scqr); "
        "others, and sinkhorn of one iteration, orthonormalise in float32.",
        Precision,
    )
    exchange_dtype: ExchangeDtype = _setting(
        "fp32", "What momenta and updates travel as between ranks (Megatron only).", ExchangeDtype
    )
    workspace_mib: int = _setting(
        2048,
        "Memory in MiB that stepping a batch may take beside its momenta; larger batches are cut, "
        "down to one matrix (Megatron only).",
    )
    param_layout: ParamLayout = _setting(
        "packed",
        "Where ARO's parameters lie in the distributed optimizer's flat buffers: packed is "
        "Megatron's own layout, in which a rank's range may end within a matrix; whole pads the "
        "ranges until none does (Megatron only).",
        ParamLayout,
    )
    cuda_graphs: CudaGraphs = _setting(
        "small",
        "What GPUs step by CUDA graphs: small, batches that together take at most 256 MiB (and as "
        "much for experts), which stay allocated; none (Megatron only).",
        CudaGraphs,
    )
    monitor_interval: int = _setting(
        0,
        "Iterations between two readings of the optimizer's health, which go to the log, "
        "TensorBoard and W&B (docs/monitoring.md); 0 for none (Megatron only).",
    )

    def __post_init__(self) -> None:
        for name in ("momentum", "beta2"):
            self._require(name, lambda v: 0.0 <= v < 1.0, "must be at least 0 and below 1")
        for name in ("update_rms", "scqr_eps"):
            self._require(name, lambda v: 0.0 < v < math.inf, "must be positive and finite")
        for name in ("sinkhorn_iters", "workspace_mib"):
            self._require(name, lambda v: isinstance(v, int) and v >= 1, "must be an integer >= 1")
        self._require(
            "monitor_interval", lambda v: isinstance(v, int) and v >= 0, "must be an integer >= 0"
        )
        for f in settings():
            choices = f.metadata["choices"]
            if choices:
                self._require(f.name, choices.__contains__, f"must be one of {', '.join(choices)}")

        for name, value in (("projection", "adam"), ("rotation", "rgd")):
            if self.mode == "full-model" and getattr(self, name) == value:
                raise ValueError(
                    f"ARO setting mode ({flag('mode')}) is full-model, which does not work with "
                    f"{flag(name)} {value}: vocabulary matrices are stepped in pieces, for which "
                    "it is not made; use another one, or hybrid."
                )
        if self.sharing != NONE and self.rotation in ("rgd", "none"):
            reason = "has none to share" if self.rotation == NONE else "climbs on whole matrices"
            raise ValueError(
                f"ARO setting sharing ({flag('sharing')}) is {self.sharing!r} and rotation "
                f"{self.rotation} {reason}: use {flag('rotation')} aro, eigen or polar, or "
                f"{flag('sharing')} none."
            )
        if self.mode == "full-model" and self.sharing != NONE:
            raise ValueError(
                f"ARO setting sharing ({flag('sharing')}) is {self.sharing!r} and mode "
                f"({flag('mode')}) is full-model: shared rotations leave embeddings and output "
                f"layer to AdamW; use {flag('mode')} hybrid, or {flag('sharing')} none."
            )
        known = (*get_args(Orientation), ADAMW)
        for pattern, rule in self.exceptions:
            if not pattern or rule not in known or (rule == ADAMW and "#" in pattern):
                raise ValueError(
                    f"ARO setting override ({flag('override')}) has {pattern}={rule}: it must be "
                    f"PATTERN=RULE with a rule of {', '.join(known)}, and adamw for whole "
                    "parameters, not for a part of one (#)."
                )
        if self.split != NONE and not set(self.splits) <= set(SPLITS):
            raise ValueError(
                f"ARO setting split ({flag('split')}) is {self.split!r}: it must be none, or some "
                f"of {', '.join(SPLITS)} with commas between."
            )

    @property
    def exceptions(self) -> tuple[tuple[str, str], ...]:
        """(pattern, rule) of ``override``, in order."""
        words = [] if self.override == NONE else self.override.split(",")
        return tuple((pattern, rule) for pattern, _, rule in (w.rpartition("=") for w in words))

    @property
    def splits(self) -> tuple[str, ...]:
        """What is split."""
        return () if self.split == NONE else tuple(self.split.split(","))

    @property
    def scales(self) -> bool:
        """Whether A = M (P X Q)^T with diagonal P and Q, of which QR does not see P."""
        by_f = self.rotation == "aro" and self.projection in ("sinkhorn", "rownorm")
        return by_f or self.rotation == "eigen"

    @property
    def in_halves(self) -> bool:
        """Whether a GPU turns rotations in products of float16 halves (`rotation.fast`).

        Not after a single Sinkhorn iteration, of which nothing bounds f(X): the sizes of its
        entries, and with them its own, are as far apart as those of X.
        """
        bounded = self.projection != "sinkhorn" or self.sinkhorn_iters > 1
        halved = self.precision in ("fp16", "fp16x3") and self.qr in ("scqr", "scqr2")
        return halved and self.scales and bounded

    @property
    def replays(self) -> bool:
        """Whether GPUs step small batches by CUDA graphs (`sharding.cost.recorded`)."""
        return self.cuda_graphs == "small" and (self.in_halves or self.rotation == "none")

    def _require(self, name: str, holds: Any, rule: str) -> None:
        value = getattr(self, name)
        try:
            valid = holds(value)
        except TypeError:  # a value of a type that cannot be compared
            valid = False
        if not valid:
            raise ValueError(f"ARO setting {name} ({flag(name)}) is {value!r}: it {rule}.")


def settings() -> tuple[Field, ...]:
    """The fields of AROConfig, in the order of its flags."""
    return fields(AROConfig)


def flag(name: str) -> str:
    """The command-line flag of a field, ``--aro-sinkhorn-iters`` for ``sinkhorn_iters``."""
    return "--aro-" + name.replace("_", "-")


def flags_table() -> str:
    """The flags as the Markdown table of the README."""
    rows = ["| flag | default | what it sets |", "|---|---|---|"]
    for f in settings():
        choices = f.metadata["choices"]
        choice = f" One of {', '.join(f'`{c}`' for c in choices)}." if choices else ""
        rows.append(f"| `{flag(f.name)}` | `{f.default}` | {f.metadata['help']}{choice} |")
    return "\n".join(rows)
