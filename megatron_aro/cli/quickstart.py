"""Train one tiny GPT with AdamW, Muon and ARO in real Megatron, and compare them.

The text is the Python standard library's own source, byte by byte. The runs differ in the flags
of the optimizer alone. A finished run is kept and not repeated while its settings stay the same;
an interrupted one begins again. Flags unknown here go to Megatron, after the quickstart's own:
``--num-layers 6``, say.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections import deque
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from megatron_aro.cli import corpus, curves
from megatron_aro.version import __version__

OPTIMIZERS = {
    "AdamW": ["--optimizer", "adam"],
    # An update of root mean square 0.2, AdamW's, so that one learning rate suits all three.
    "Muon": [
        *("--optimizer", "muon", "--muon-momentum", "0.95"),
        *("--muon-scale-mode", "spectral", "--muon-extra-scale-factor", "0.2"),
        *("--muon-tp-mode", "duplicated"),  # whole matrices, not each shard for itself
    ],
    "ARO": ["--optimizer", "aro"],
}
# AdamW's: of 1e-3, 1.5e-3, 2e-3 and 3e-3 it has the lowest validation loss.
LR = 1.5e-3


def model_flags(steps: int, out: Path, bf16: bool) -> list[str]:
    """Everything but the optimizer: a Llama-like GPT of 0.9 million parameters."""
    flags = f"""
        --num-layers 4 --hidden-size 128 --ffn-hidden-size 384 --num-attention-heads 4
        --seq-length 128 --max-position-embeddings 128 --position-embedding-type rope
        --normalization RMSNorm --swiglu --disable-bias-linear --qk-layernorm
        --untie-embeddings-and-output-weights --make-vocab-size-divisible-by 32
        --attention-dropout 0 --hidden-dropout 0
        --transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm
        --no-masked-softmax-fusion --no-rope-fusion
        --micro-batch-size 16 --global-batch-size 16 --train-iters {steps} --seed 1234
        --lr {LR} --min-lr {LR / 10} --lr-decay-style cosine --lr-decay-iters {steps}
        --lr-warmup-iters {steps // 15} --weight-decay 0.1 --clip-grad 1.0
        --adam-beta1 0.9 --adam-beta2 0.95
        --log-interval 1 --eval-interval {steps + 1} --eval-iters {max(1, min(20, steps // 15))}
    """.split()
    data = [
        *("--train-data-path", str(out / "corpus" / "train")),
        *("--valid-data-path", str(out / "corpus" / "valid")),
        *("--data-cache-path", str(out / "cache")),
    ]
    return flags + data + corpus.TOKENIZER_FLAGS + (["--bf16"] if bf16 else [])


def standard_library() -> dict[str, Path]:
    """The .py files of the running interpreter's standard library, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    return corpus.collect([root], ".py", ["site-packages", "dist-packages", "test", "tests"])


def train(name: str, flags: list[str], settings: dict, steps: int, out: Path) -> curves.Curve:
    """Run Megatron once, or take the curve of the finished run with the same settings.

    Raises:
        SystemExit: Megatron failed; the end of its log has been printed.
    """
    log, record = out / f"{name.lower()}.log", out / f"{name.lower()}.json"
    settings = {**settings, "flags": flags}
    if record.exists():
        saved = json.loads(record.read_text())
        if saved["settings"] == settings:
            print(f"{name:6} finished earlier, kept")
            return curves.Curve(**saved["curve"])
        print(f"{name:6} the settings have changed: training again")
        record.unlink()

    curve, progress = curves.Curve(name), Progress(name, steps)
    command = [sys.executable, "-u", "-m", "megatron_aro.pretrain_gpt", *flags]
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        # OpenMP's threads spin while they wait: on busy cores that made a step three times as long.
        env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},
    )
    last: deque[str] = deque(maxlen=20)
    assert child.stdout is not None
    try:
        with log.open("w") as file:
            for line in child.stdout:
                file.write(line)
                last.append(line)
                if curve.read(line):
                    progress.show(curve.losses)
        child.wait()
    finally:  # also when interrupted: no training goes on alone
        if child.poll() is None:
            child.terminate()
            child.wait()
    progress.end()
    if child.returncode or len(curve.losses) != steps or curve.valid_loss is None:
        print(*last, sep="", file=sys.stderr)
        sys.exit(f"{name} failed (exit code {child.returncode}); its whole log is {log}")
    corpus.write_whole(record, json.dumps({"settings": settings, "curve": asdict(curve)}))
    return curve


class Progress:
    """One line for a run: rewritten on a terminal, repeated every tenth of it elsewhere."""

    def __init__(self, name: str, steps: int) -> None:
        self.name, self.steps, self.live = name, steps, sys.stdout.isatty()
        self.first = 0.0
        self._print(f"{name:6} starting Megatron")

    def show(self, losses: list[float]) -> None:
        """After a step; ``losses`` are those of all steps so far."""
        done, now = len(losses), time.monotonic()
        self.first = self.first or now
        if self.live or done % max(1, self.steps // 10) == 0:
            left = (now - self.first) / max(1, done - 1) * (self.steps - done)
            clock = f"{int(left) // 60}:{int(left) % 60:02}"
            step = f"step {done:4}/{self.steps}  train loss {losses[-1]:.4f}"
            self._print(f"{self.name:6} {step}  {clock} left")

    def end(self) -> None:
        """Leave the last line standing."""
        if self.live:
            print()

    def _print(self, text: str) -> None:
        print(f"\r\033[K{text}" if self.live else text, end="" if self.live else "\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=300, help="steps of each optimizer")
    parser.add_argument(
        "--out", type=Path, default=Path("quickstart-out"), help="folder for all files"
    )
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    args, extra = parser.parse_known_args()
    if args.steps < 1:
        parser.error("--steps must be at least 1")
    for number in (signal.SIGINT, signal.SIGTERM):  # by way of `finally`, which ends the training
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)

    import torch

    gpu = torch.cuda.is_available()
    device = f"{torch.cuda.get_device_name()}, bf16" if gpu else "CPU, fp32"
    facts = corpus.build(standard_library(), out / "corpus")
    print(
        f"Corpus: the Python standard library, {facts['train_tokens']:,} bytes to train on and "
        f"{facts['valid_tokens']:,} held out"
    )
    print(f"Device: {device}")
    settings = {
        "corpus": facts,
        "device": device,
        "megatron-aro": __version__,
        "torch": torch.__version__,
        "megatron-core": version("megatron-core"),
    }

    finished = []
    for name in args.optimizers:
        if name == "Muon" and not importlib.util.find_spec("emerging_optimizers"):
            print("Muon   skipped: the package emerging-optimizers is not installed")
            continue
        flags = model_flags(args.steps, out, gpu) + OPTIMIZERS[name] + extra
        finished.append(train(name, flags, settings, args.steps, out))

    text = curves.table(finished)
    (out / "table.txt").write_text(text + "\n")
    print(f"\n{text}\n")
    if importlib.util.find_spec("matplotlib"):
        title = f"A tiny GPT on the Python standard library, {device}"
        curves.plot(finished, out / "curves.png", title)
        print(f"Figure: {out / 'curves.png'}")
    else:
        print("No figure: the package matplotlib is not installed")


if __name__ == "__main__":
    main()
