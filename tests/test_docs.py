"""Commands, flags, links and error sentences of README.md and docs/*.md are real.

A fenced bash block runs as it stands, unless the paragraph before it says that it needs a cluster,
GPUs or the corpora, holds <placeholders> or calls a script, which has tests of its own. Those have
their commands and flags checked by the real parsers, and so have all commands and flags within the
text. Blocks that take long are marked slow; their runs are shortened by `SHORTER`.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MARK = re.compile(r"needs? (a cluster|GPUs|the corpora)")
# Steps of the tour that take long, or read what such a step leaves.
SLOW = ("doctor", "prepare-data", "for optimizer", "compare runs", "inspect runs")
# What is long in the documents is short here; the commands stay what they are.
SHORTER = {
    "configs/logging.yaml": "configs/logging.yaml --set train-iters=6 --set lr-decay-iters=6 "
    "--set lr-warmup-iters=0 --set eval-iters=1",
}
# Our commands as the interpreter of the tests, scripts by the tests that run them.
SHELL = f"""
set -euo pipefail
python() {{ {sys.executable} -W ignore "$@"; }}
megatron-aro() {{ python -m megatron_aro.cli.main "$@"; }}
"""
SCRIPT = re.compile(r"(?<![\w/])scripts/\w+\.sh")
FOREIGN = {  # programs of others, and the flags of theirs that the documents name
    "python": {
        *("--gpt2", "--out", "--data", "--results", "--minutes", "--resume", "--pack", "--table"),
    },  # of scripts/studies
    "torchrun": {"--nproc-per-node", "--nnodes"},
    "sbatch": {"--wait", "--nodes", "--gpus-per-node"},
    "pip": {"--no-deps", "-e"},
    "scripts/quickstart.sh": {"--steps", "--out", "--help"},
    "scripts/test.sh": {"--all", "-m"},
    "README": {"--timing-log-level", "--yaml-cfg"},
}


class Block(NamedTuple):
    page: str
    line: int
    text: str
    runs: bool


def blocks(path: Path) -> list[Block]:
    """The bash blocks of a page; any fence that could be a command must say what it is."""
    found = []
    text = path.read_text()
    for match in re.finditer(r"^( *)```([^\n]*)\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL):
        line = text.count("\n", 0, match.start()) + 1
        assert match[2] in ("bash", "python", "text") or "$ " not in match[3], (path.name, line)
        if match[2] == "bash":
            before = text[: match.start()].rstrip().rpartition("\n\n")[2]
            script = bool(SCRIPT.search(match[3]))
            placeholder = bool(re.search(r"<[A-Za-z ]|=\.\.\.", match[3]))
            runs = not (script or placeholder or MARK.search(before))
            found.append(Block(path.name, line, match[3], runs))
    return found


BLOCKS = [block for page in PAGES for block in blocks(page)]


def is_slow(block: Block) -> bool:
    return block.page == "tour.md" and any(word in block.text for word in SLOW)


def named(block: Block) -> str:
    return f"{block.page}:{block.line}"


def run(text: str, folder: Path) -> None:
    """As a shell would from the root of a clone, with what it writes in a folder of its own."""
    for name in ("configs", "scripts", "docs"):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    for long, short in SHORTER.items():
        text = text.replace(long, short)
    unset = {k: v for k, v in os.environ.items() if k not in ("RUN", "TRAIN_DATA", "VALID_DATA")}
    done = subprocess.run(
        ["bash", "-c", SHELL + text],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env=unset | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all blocks in their order: what one writes the next may read."""
    return tmp_path_factory.mktemp("clone")


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, id=named(block), marks=[pytest.mark.slow] if is_slow(block) else [])
        for block in BLOCKS
        if block.runs
    ],
)
def test_blocks_run(block: Block, clone: Path) -> None:
    """Exit code 0 from every command, in the order of the documents."""
    run(block.text, clone)


def test_some_run_and_some_cannot() -> None:
    """The rules above find both kinds, and the whole tour but the last step is run."""
    assert sum(block.runs for block in BLOCKS) >= 10
    tour = [block for block in BLOCKS if block.page == "tour.md"]
    assert [block.runs for block in tour] == [False, *(len(tour) - 2) * [True], False]


@pytest.mark.parametrize("block", [b for b in BLOCKS if not b.runs], ids=named)
def test_blocks_that_cannot_run_are_commands(block: Block) -> None:
    """bash reads them, every program is known, and its parser knows the flags."""
    text = re.sub(r"<[^>\n]*>", "placeholder", block.text)
    assert subprocess.run(["bash", "-n", "-c", text]).returncode == 0
    for line in text.replace("\\\n", " ").splitlines():
        check_command(line)


def check_command(line: str) -> None:
    """A line of shell whose program is ours, a script of ours, or one of FOREIGN.

    Assignments before it and words of loops are passed over; LAUNCH="..." is looked into.
    """
    words = shlex.split(line, comments=True)
    while words and (re.match(r"\w+=", words[0]) or words[0] in ("export", "do")):
        value = words.pop(0).partition("LAUNCH=")[2]
        if value:
            check_command(value)
    if not words or words[0] in ("for", "done"):
        return
    program = words[0]
    if program.startswith("scripts/"):
        tests = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
        assert os.access(ROOT / program, os.X_OK) or program.endswith("slurm.sh"), program
        assert program == "scripts/test.sh" or Path(program).name in tests, f"{program}: no test"
    elif program == "megatron-aro":
        check_flags(words[1:])
    else:
        assert program in FOREIGN, f"{line}: an unknown command"
    known = {flag for flags in FOREIGN.values() for flag in flags} | megatron_flags()
    known |= {flag for flags in own_flags().values() for flag in flags}
    for word in words[1:]:
        if word.startswith("--") and word != "--":
            assert word.partition("=")[0] in known, f"{line}: unknown flag {word}"


@pytest.mark.parametrize(
    "line",
    [
        "megatron-aro plan --fit --gib 80",
        "megatron-aro plam",
        "RUN=x megatron-aro plan --gpus 8 -- --num-leyers 3",
        "torchrun --nproc-per-node 8 -m megatron_aro.run x.py --aro-speed 2",
        "scripts/missing.sh",
        "wget x",
        'LAUNCH="srun --nodes 8" scripts/benchmark.sh x',
    ],
)
def test_wrong_commands_are_found(line: str) -> None:
    """What a page could get wrong."""
    with pytest.raises(AssertionError):
        check_command(line)


def check_flags(words: list[str]) -> None:
    """A subcommand's flags are its parser's; behind -- they are Megatron's."""
    command, own, theirs = words[0], words[1:], []
    assert command in own_flags(), f"no command {command}"
    if "--" in own:
        own, theirs = own[: own.index("--")], own[own.index("--") + 1 :]
    for word in own:
        if word.startswith("--"):
            assert word in own_flags()[command], f"megatron-aro {command} has no {word}"
    for word in theirs:
        if word.startswith("--"):
            assert word in megatron_flags(), f"Megatron has no {word}"


@cache
def own_flags() -> dict[str, set[str]]:
    """Flags by subcommand."""
    from megatron_aro.cli import bench, compare, doctor, inspect, plan, prepare, train

    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    for module in (bench, compare, doctor, inspect, plan, prepare, train):
        module.add_parser(commands)
    return {name: set(sub._option_string_actions) for name, sub in commands.choices.items()}


@cache
def megatron_flags() -> set[str]:
    """Megatron's and ARO's, from its own parser in a process of its own: it patches torch here."""
    code = "from megatron_aro.cli import parsing; print(*parsing.known_flags())"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def prose(path: Path) -> str:
    return re.sub(r"^ *```.*?^ *```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_commands_and_flags_in_the_text_exist(page: Path) -> None:
    """`megatron-aro ...` in backticks by its parser, and every other `--flag`."""
    known = {flag for flags in own_flags().values() for flag in flags} | megatron_flags()
    known |= {flag for flags in FOREIGN.values() for flag in flags}
    for code in re.findall(r"`([^`]+)`", prose(page)):
        if code in quoted():  # a sentence, which has a test of its own
            continue
        words = re.sub(r"[\[\]]", " ", code).split()
        if words[0] == "megatron-aro" and len(words) > 1:
            check_flags(words[1:])
        for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", code):
            assert flag.rstrip("_") in known or flag == "--aro-", f"{page.name}: {code}"


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda path: path.name)
def test_files_that_the_text_names_exist(page: Path) -> None:
    """Links, and paths of configs, scripts and tests."""
    text = page.read_text()
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / link).exists(), link
    for path in re.findall(r"(?<![\w/.*])(?:configs|scripts|tests)/[\w/]+\.(?:yaml|sh|py)", text):
        assert (ROOT / path).exists(), path


def literals() -> list[str]:
    """Regular expressions of the package's strings; what is filled in matches anything."""
    found = []
    for path in (ROOT / "megatron_aro").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    re.escape(str(part.value)) if isinstance(part, ast.Constant) else ".+"
                    for part in node.values
                ]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts = [re.escape(node.value)]
            else:
                continue
            if sum(len(part) for part in parts if part != ".+") >= 12:
                found.append("".join(parts))
    return found


def quoted() -> list[str]:
    """Sentences of troubleshooting.md: lines of its text blocks, first cells of its table."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    lines = [
        line
        for block in re.findall(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
    ]
    cells = re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)
    return lines + [cell for cell in cells if " " in cell]


def test_sentences_of_errors_are_the_codes() -> None:
    """Every word that is quoted stands in a string of the package, or follows from one."""
    patterns = literals()
    assert len(quoted()) > 15
    for sentence in quoted():
        left = sentence
        for pattern in sorted(patterns, key=len, reverse=True):
            left = re.sub(pattern, "", left, count=1)
        rest = re.sub(r"\W", "", left)
        assert rest == "", f"{sentence!r} is not printed: {left!r} is in no string"
