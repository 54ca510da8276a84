"""`megatron-aro plan --fits`: which layouts of the recipes are listed, and in which order.

What the predicted bytes are worth is shown by tests/megatron/test_fits.py.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

CONFIGS = Path(__file__).parents[1] / "configs"
QWEN = ["--config", *(str(CONFIGS / f"{name}.yaml") for name in ("qwen3_8b", "optimizer/aro"))]
SIGMA = ["--config", *(str(CONFIGS / f"{name}.yaml") for name in ("sigma_moe_2b", "optimizer/aro"))]
MUON = ["--config", *(str(CONFIGS / f"{name}.yaml") for name in ("qwen3_8b", "optimizer/muon"))]
EIGHT = ["--fits", "--gpus", "8", "--gib", "80"]
COMMANDS = {
    "qwen": [*EIGHT, "--json", *QWEN],
    "qwen text": [*EIGHT, "--tp", "2", *QWEN],
    "qwen at 40": ["--fits", "--gpus", "8", "--gib", "40", "--json", *QWEN],
    "sigma": [*EIGHT, "--json", *SIGMA, "--", "--sequence-parallel"],
    "sigma without": [*EIGHT, "--json", "--tp", "2", "--cp", "1", *SIGMA],
    "qwen at 12": ["--fits", "--gpus", "8", "--gib", "12", *QWEN],
    "one layout": [
        *("--json", "--gpus", "8", "--tp", "2", "--pp", "2"),
        *(*QWEN, "--", "--sequence-parallel"),
    ],
    "without fits": ["--gpus", "8", "--gib", "80", *QWEN],
    "without gib": ["--fits", "--gpus", "8", *QWEN],
    "little": ["--fits", "--gpus", "8", "--gib", "3", *QWEN],
    "ep 4": [*EIGHT, "--ep", "4", "--tp", "1", "--pp", "1", *SIGMA],
    "tp 3": [*EIGHT, "--tp", "3", *QWEN],
    "tp 8": [*EIGHT, "--tp", "8", *QWEN],
    "muon": [*EIGHT, *MUON],
    "flag": [*EIGHT, *QWEN, "--", "--num-leyers", "3"],
    "replicated": ["--replicated", "--json", "--gpus", "8", *QWEN],
}
# One process for all: importing Megatron takes as long as everything else.
RUN = """
import contextlib, io, json, sys
from megatron_aro.cli.main import main
results = {}
for name, words in json.loads(sys.argv[1]).items():
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["plan", *words])
    results[name] = [code, out.getvalue(), err.getvalue()]
print(json.dumps(results))
"""
Answer = tuple[int, str, str]


@pytest.fixture(scope="module")
def answers() -> dict[str, Answer]:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUN, json.dumps(COMMANDS)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 200  # 15 questions; some 30 s on a free core
    return json.loads(done.stdout)


def listed(answers: dict[str, Answer], name: str) -> dict:
    code, out, error = answers[name]
    assert (code, error) == (0, "")
    return json.loads(out)


def layouts(found: list[dict]) -> list[tuple]:
    return [(x["tp"], x["pp"], x["cp"], x["ep"], x["distributed"]) for x in found]


def test_qwen_on_8_gpus(answers: dict[str, Answer]) -> None:
    """20 heads allow TP 1, 2, 4 and 36 layers PP 1, 2, 4; TP 1 with all parameters is too large.

    Each layout is there once: with the smallest CP that fits.
    """
    found = listed(answers, "qwen")
    assert found["parameters"] == 8_190_735_360
    fits = layouts(found["fits"])
    assert {(tp, pp) for tp, pp, *_ in fits} == {
        *((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2)),
    }
    assert all(ep == 1 for _, _, _, ep, _ in fits)
    assert (1, 1, 1, 1, True) not in fits and (1, 1, 2, 1, True) in fits
    assert len({(tp, pp, on) for tp, pp, _, _, on in fits}) == len(fits)
    assert (1, 1, 1, 1, False) in layouts(found["too_large"])  # 16 bytes a parameter, and more
    assert {"20 attention heads do not divide by TP 8."} < found["refused"].keys()


def test_memory_is_what_a_pencil_says(answers: dict[str, Answer]) -> None:
    """DP 4 x PP 2: each stage has half of the layers, and a matrix as large as the embedding."""
    found = listed(answers, "qwen")
    (at,) = [x for x in found["fits"] if (x["tp"], x["pp"], x["distributed"]) == (1, 2, True)]
    of_stage = found["parameters"] / 2
    matrices = 6_945_767_424 / 2
    got = at["bytes"]
    assert got["weights"] == pytest.approx(2 * of_stage, rel=1e-3)
    assert got["gradients"] == pytest.approx(4 * of_stage, rel=1e-3)
    moments = 4 * matrices + 8 * (of_stage - matrices)
    rotations = 4 * 18 * (4 * 4096 * 2560 + 3 * 4096 * 4096)
    # Ranges of buckets end within matrices, so rotations and moments are not quite equal shares.
    assert got["optimizer"] == pytest.approx((4 * of_stage + moments + rotations) / 4, rel=0.03)
    assert got["total"] == pytest.approx(
        got["weights"] + got["gradients"] + got["optimizer"] + max(got["step"], got["activations"])
    )
    # A layer keeps, for each of 4,096 tokens in bf16: 4 times the hidden state, QKV and queries and
    # keys with their norm and embedding, the attention's result, gate, up and their product.
    layer = 2 * 4096 * (4 * 4096 + 3 * 2560 + 2 * 2560 + 2560 + 3 * 12288)
    assert got["activations"] == 2 * 18 * layer  # two micro batches under way


def test_sigma_on_8_gpus(answers: dict[str, Answer]) -> None:
    """46 experts allow EP 1 and 2, 22 layers PP 1 and 2; experts with TP need a flag."""
    found = listed(answers, "sigma")
    assert found["parameters"] == 1_982_366_720
    fits = layouts(found["fits"])
    assert {ep for _, _, _, ep, _ in fits} == {1, 2} and {pp for _, pp, *_ in fits} == {1, 2}
    assert {tp for tp, *_ in fits} == {1, 2, 4, 8}
    code, out, error = answers["ep 4"]
    assert (code, out) == (2, "") and "Number of experts should be a multiple" in error
    code, out, error = answers["sigma without"]
    assert (code, out) == (2, "") and "--sequence-parallel" in error


def test_less_memory_holds_fewer_layouts(answers: dict[str, Answer]) -> None:
    """Whatever fits into 40 GiB fits into 80; what is listed fits, what is not does not."""
    small, large = listed(answers, "qwen at 40"), listed(answers, "qwen")
    whole, part = ({x[:2] + x[3:] for x in layouts(f["fits"])} for f in (large, small))
    assert part < whole
    for found in (small, large):
        room = (found["gib"] - found["reserve_gib"]) * 2**30
        assert all(x["bytes"]["total"] <= room for x in found["fits"])
        assert all(x["bytes"]["total"] > room for x in found["too_large"])


@pytest.mark.parametrize("name", ["qwen", "sigma"])
def test_the_best_come_first(answers: dict[str, Answer], name: str) -> None:
    """By bands of 10% of the predicted step; within a band the smallest first."""
    fits = listed(answers, name)["fits"]
    fastest = min(x["milliseconds"] for x in fits)
    assert fits[0]["milliseconds"] < 1.1 * fastest
    for before, after in zip(fits, fits[1:], strict=False):
        slower = after["milliseconds"] > before["milliseconds"] / 1.1
        assert slower  # never a band back
        if max(before["milliseconds"], after["milliseconds"]) < 1.1 * fastest:
            assert before["bytes"]["total"] <= after["bytes"]["total"]


def test_times_are_those_of_the_plan(answers: dict[str, Answer]) -> None:
    """A layout's time in the list is that of `plan` for it alone."""
    (at,) = [
        x
        for x in listed(answers, "qwen")["fits"]
        if (x["tp"], x["pp"], x["distributed"]) == (2, 2, True)
    ]
    alone = listed(answers, "one layout")
    assert alone["run"]["stages"] == 2 and alone["run"]["distributed"]
    assert at["milliseconds"] == alone["per_rank"]["milliseconds"]["max"]


def test_the_table(answers: dict[str, Answer]) -> None:
    """A line a layout, with the size that was asked for; then what the columns mean."""
    code, out, error = answers["qwen text"]
    assert (code, error) == (0, "")
    rows = [line.split() for line in out.splitlines() if line.startswith(" ")]
    assert rows[0][:6] == ["TP", "PP", "CP", "EP", "DP", "parameters"] and len(rows) == 6
    assert all(row[0] == "2" and len(row) == 14 for row in rows[1:])
    for text in ("The first as flags: --tensor-model-parallel-size 2", "Estimated:", "Order:"):
        assert text in out


def test_nothing_fits_is_an_answer(answers: dict[str, Answer]) -> None:
    """Exit code 1, and the layout that lacks least."""
    code, out, error = answers["qwen at 12"]
    assert (code, error) == (1, "")
    nearest = r"Nothing fits. The nearest, TP 4, PP 2, CP 1, EP 1, distributed, lacks 1\d\.\d GiB"
    assert re.search(nearest, out)


def test_replicated_configs_are_planned(answers: dict[str, Answer]) -> None:
    """--replicated drops the distributed optimizer's overlapped gather, which configs ask for."""
    assert not listed(answers, "replicated")["run"]["distributed"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("without fits", "--fits and --gib go together"),
        ("without gib", "--fits and --gib go together"),
        ("little", "--gib 3: 4 GiB of a GPU are kept free; give more."),
        ("tp 3", "8 GPUs do not divide by the sizes given."),
        ("tp 8", "num_attention_heads (20) must be a multiple of tensor_model_parallel_size (8)"),
        ("muon", "the config's optimizer is muon: add configs/optimizer/aro.yaml"),
        ("flag", "--num-leyers"),
    ],
)
def test_nonsense_is_one_sentence(answers: dict[str, Answer], name: str, message: str) -> None:
    """Exit code 2."""
    code, out, error = answers[name]
    assert (code, out, error.count("\n")) == (2, "", 1) and message in error
