"""`megatron-aro plan`: Megatron's flags in, a table or JSON out, no GPU and no processes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

QWEN = """--num-layers 36 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 20
    --kv-channels 128 --qk-layernorm --seq-length 4096 --max-position-embeddings 4096
    --position-embedding-type rope --rotary-base 1000000 --normalization RMSNorm
    --norm-epsilon 1e-6 --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --vocab-size 151936 --make-vocab-size-divisible-by 1187 --attention-dropout 0
    --hidden-dropout 0 --init-method-std 0.02 --bf16 --accumulate-allreduce-grads-in-fp32
    --global-batch-size 3584 --train-iters 46000 --lr 3e-4 --min-lr 3e-5
    --lr-decay-style cosine --lr-warmup-iters 400 --weight-decay 0.1 --clip-grad 1.0""".split()
SIGMA = """--num-layers 22 --hidden-size 1024 --num-attention-heads 16 --kv-channels 64
    --seq-length 2048 --max-position-embeddings 2048 --position-embedding-type rope
    --rotary-base 10000 --normalization RMSNorm --norm-epsilon 1e-6 --swiglu
    --disable-bias-linear --untie-embeddings-and-output-weights --vocab-size 128256
    --make-vocab-size-divisible-by 501 --num-experts 46 --moe-router-topk 4
    --moe-ffn-hidden-size 512 --ffn-hidden-size 512 --moe-shared-expert-intermediate-size 512
    --moe-layer-freq 1 --moe-router-score-function softmax
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.001
    --attention-dropout 0 --hidden-dropout 0 --bf16""".split()


def plan(*words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-W", "ignore", "-m", "megatron_aro.cli.main", "plan", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def planned(*words: str) -> dict:
    done = plan("--json", *words)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("layout", "flags", "parameters", "matrices"),
    [
        ("--world-size 64 --tp 4", QWEN, 8_190_735_360, 252),
        ("--world-size 512 --tp 4 --pp 2", QWEN, 8_190_735_360, 252),
        ("--world-size 64 --ep 2", SIGMA, 1_982_366_720, 3_212),
    ],
)
def test_the_recipes_models(layout: str, flags: list[str], parameters: int, matrices: int) -> None:
    """Sizes as they are known; every matrix owned once; the mean times the ranks is the total."""
    result = planned(*layout.split(), "--", *flags)
    assert (result["parameters"], result["matrices"]) == (parameters, matrices)
    ranks = result["run"]["ranks"]
    assert result["per_rank"]["matrices"]["mean"] * ranks == pytest.approx(matrices)
    assert result["per_rank"]["momentum"]["mean"] * ranks >= 4 * result["aro_parameters"]
    assert result["planning_seconds"] < 10


def test_the_table_names_every_figure() -> None:
    """One line a figure with its unit; nothing of Megatron's own output."""
    done = plan("--world-size", "8", "--replicated", "--", *QWEN)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("8,190,735,360 parameters, of which 6,945,767,424 in 252 matrices")
    titles = [line[:24].strip() for line in lines[4:]]
    assert titles[0] == "matrices owned" and titles[-2] == "imbalance (max / mean)"
    assert len(titles) == 20
    done = plan("--world-size", "8", "--", *QWEN, "--aro-param-layout", "whole")
    last = done.stdout.splitlines()[-1]
    assert last == (
        "--aro-param-layout whole pads the flat buffers of ARO's matrices by up to 33,554,432 "
        "elements a rank (0.5% more than packed)"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--world-size", "8", "--", *QWEN, "--hidden-dimension", "3"], "--hidden-dimension"),
        (["--world-size", "8", "--", *QWEN, "--fp16"], "--fp16"),
        (
            ["--world-size", "8", "--replicated", "--", *QWEN, "--aro-param-layout", "whole"],
            "--aro-param-layout whole without --use-distributed-optimizer",
        ),
        (["--world-size", "8", "--", "--num-layers", "2"], "hidden_size"),
        (
            ["--world-size", "8", "--", *QWEN, "--num-distributed-optimizer-instances", "2"],
            "plan one, with its share of --world-size",
        ),
        (["--world-size", "0", "--", *QWEN], "at least 1"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(words: list[str], message: str) -> None:
    """Exit code 2, and no traceback."""
    done = plan(*words)
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_reader_that_has_enough_ends_it_quietly() -> None:
    """`| head` closes the pipe: no traceback."""
    command = [sys.executable, "-W", "ignore", "-m", "megatron_aro.cli.main", "plan"]
    command += ["--world-size", "8", "--tp", "4", "--", *QWEN]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stderr is not None
    child.stdout.close()
    assert "Traceback" not in child.stderr.read() and child.wait(timeout=200) == 141
