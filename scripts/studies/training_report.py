"""Table, curves and README of the training study, from the results that came back.

    python scripts/studies/training_report.py RESULTS.json... --out docs/results/DATE-training

Speed-ups are those of `megatron-aro compare` at the end, over AdamW and over Muon at the same
learning rate, divided by the baseline's own, which is above 1 where it had its last loss before.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections import Counter, defaultdict
from pathlib import Path

import yaml
from training import TABLE, last_validation, planned, read_table

from megatron_aro.cli import compare, figures, runs

# (finding of the paper, [(better, worse)...]): methods whose validation losses decide.
FINDINGS = (
    ("ARO is ahead of AdamW", [("aro", "adamw")]),
    ("ARO is ahead of Muon", [("aro", "muon")]),
    ("ARO over eigen over none", [("aro", "eigen"), ("eigen", "none")]),
    ("Rotation matters more than projection: the worst rotated f is ahead of the best without",
     [(f"aro{f}", f"none{g}") for f in ("", "-sign", "-rownorm", "-adam")
      for g in ("", "-sign", "-rownorm", "-adam")]),
    ("ARO-Sinkhorn is the best of the projections",
     [("aro", f"aro-{f}") for f in ("sign", "rownorm", "adam")]),
    ("Full-model mode is at least as good as hybrid", [("aro-full", "aro")]),
    ("Muon in full-model mode (rownorm, eigen, qr: docs/equivalences.md) is behind ARO",
     [("aro-full", "muon-full")]),
    ("One pass of Cholesky QR costs quality, the second recovers it", [("aro", "aro-scqr")]),
    ("The residual orientation is best", [("aro", o) for o in ("min-side", "left", "right")]),
    ("Chain sharing is best", [("chain", "aro"), ("chain", "global")]),
)  # fmt: skip
SHOWN = ("adamw", "muon", "aro", "eigen")  # in the figure


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--stopped", nargs="*", type=Path, default=[], metavar="LOG",
                        help="of runs that did not end, for the table of steps")  # fmt: skip
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    found = {r["name"]: r for path in args.results for r in json.loads(path.read_text())}
    done = [r for r in found.values() if "failed" not in r]
    tell_texts_apart(done)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "config.yaml").write_text(yaml.safe_dump(read_table(args.table), sort_keys=False))
    table_of_runs = read_table(args.table)
    text = [f"# {args.out.resolve().name}", "", *about(args.table, table_of_runs, done)]
    rows = []
    for model in dict.fromkeys(r["model"] for r in done):
        of = [r for r in done if r["model"] == model]
        said, best = sweep(of)
        text += [f"## {model}", "", said, ""]
        same = [r for r in of if r["rate"] == best]
        speedups = against(same, "adamw", args.out / model) | against(same, "muon", None)
        lines, more = table(model, same, speedups)
        rows += more
        text += [*lines, "", f"![Curves]({model}.png)", "", *findings(same), ""]
        text += by_step(same, [path for path in args.stopped if path.name.startswith(model)])
    failures = [f"- {r['name']}: {r['failed']}" for r in found.values() if "failed" in r]
    runs_of_table = planned(table_of_runs)
    missing = [run for run in runs_of_table if run.name not in found]
    if missing:
        failures.append(f"- {len(missing)} of the table's {len(runs_of_table)} runs, yet.")
    text += ["## Not trained", "", *(failures or ["Nothing."]), ""]
    (args.out / "README.md").write_text("\n".join(text))
    with (args.out / "results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(args.out / "README.md")


def tell_texts_apart(done: list[dict]) -> None:
    """Seed 1b is seed 1 on other text than most: runs of both share neither start nor data."""
    texts = [text for text, _ in Counter(r["corpus"] for r in done).most_common()]
    for r in done:
        r["swept"] = r["method"] == "adamw" and r["seed"] == 1
        r["seed"] = f"{r['seed']}{' bcdefgh'[texts.index(r['corpus'])]}".strip()


def about(path: Path, table: dict, done: list[dict]) -> list[str]:
    """What was trained, on what."""
    first = done[0]["settings"]
    tokens = table["steps"] * first["global_batch_size"] * first["seq_length"]
    models = {r["model"]: r["parameters"] for r in done}
    counts = ", ".join(f"{model} of {of:,} parameters" for model, of in models.items())
    devices = ", ".join(sorted({r["device"] for r in done}))
    versions = ", ".join(f"{name} {of}" for name, of in done[0]["versions"].items())
    return [
        f"`scripts/studies/training.py --table {path.name}`, then `training_report.py`: {counts}, "
        f"{table['steps']:,} steps, {tokens / 1e6:,.0f}M tokens a run, all flags in {path.name}. "
        f"{devices}; {versions}.",
        "",
        "Over AdamW and Muon: the step at which that first has its last smoothed training loss, "
        "over the step at which the run has.",
        "",
        *(["Seeds with a letter are on other text: losses compare within a seed.", ""]
          if len({r["corpus"] for r in done}) > 1 else []),
    ]  # fmt: skip


def sweep(of: list[dict]) -> tuple[str, float]:
    """AdamW's validation losses by rate, of the text with most rates, and the best of these."""
    swept = sorted((r for r in of if r["swept"]), key=lambda r: r["rate"])
    seed = Counter(r["seed"] for r in swept).most_common(1)[0][0]
    swept = [r for r in swept if r["seed"] == seed]
    rates = [r["rate"] for r in swept]
    best = min(swept, key=last_validation)["rate"]
    said = ", ".join(f"{r['rate']:g}: {last_validation(r):.4f}" for r in swept)
    edge = " **This is the edge of the sweep.**" if best in (rates[0], rates[-1]) else ""
    said = f"AdamW by learning rate, seed {seed}: {said}. The best, {best:g}, is everybody's.{edge}"
    return said, best


def against(same: list[dict], baseline: str, figure: Path | None) -> dict[tuple[str, str], str]:
    """(run, baseline) -> speed-up in steps at the end, each seed against the baseline's own."""
    found: dict[tuple[str, str], str] = {}
    most: list[runs.Run] = []
    for seed in sorted({r["seed"] for r in same}):
        of = [as_run(r) for r in same if r["seed"] == seed]
        name = f"{baseline}-{seed}"
        if all(run.name != name for run in of):
            continue
        comparison = compare.compare(of, name)
        own = comparison.points[name][-1].speedup
        for run in comparison.runs:
            speedup = comparison.points[run.name][-1].speedup
            found[run.name, baseline] = "not reached" if speedup is None else f"{speedup / own:.3f}"
        shown = [run for run in of if run.name.removesuffix(f"-{seed}") in SHOWN]
        most = max(most, shown, key=len)
    if figure and most:
        name = next(run.name for run in most if run.name.startswith(baseline))
        figures.plot(compare.compare(most, name), [figure.with_suffix(".png")])
    return found


def as_run(result: dict) -> runs.Run:
    """What megatron-aro compare works with."""

    def by_step(name: str) -> dict[int, float]:
        return {int(step): value for step, value in result[name].items()}

    return runs.Run(
        name=f"{result['method']}-{result['seed']}",
        path=Path(result["name"]),
        settings=result["settings"],
        **{name: by_step(name) for name in ("losses", "rates", "times", "validation")},
    )


def table(model: str, same: list[dict], speedups: dict) -> tuple[list[str], list[dict]]:
    rows = []
    for r in sorted(same, key=last_validation):
        key = f"{r['method']}-{r['seed']}"
        rows.append({
            "model": model, "method": r["method"], "seed": r["seed"], "rate": r["rate"],
            "validation": f"{last_validation(r):.4f}",
            "over AdamW": speedups.get((key, "adamw"), "-"),
            "over Muon": speedups.get((key, "muon"), "-"),
            "seconds": r["seconds"], "device": r["device"],
        })  # fmt: skip
    names = list(rows[0])[1:]
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return lines + ["| " + " | ".join(str(row[n]) for n in names) + " |" for row in rows], rows


def by_step(same: list[dict], stopped: list[Path]) -> list[str]:
    """Validation losses on the way, of runs that did not end too."""
    losses = {as_run(r).name: as_run(r).validation for r in same}
    losses |= {f"{path.stem} (stopped)": runs.read(path).validation for path in stopped}
    steps = sorted({step for of in losses.values() for step in of})
    lines = ["Validation loss by step:", "", f"| run | {' | '.join(map(str, steps))} |"]
    lines.append("|" + "---|" * (len(steps) + 1))
    for name, of in sorted(losses.items()):
        found = (f"{of[step]:.4f}" if step in of else "-" for step in steps)
        lines.append(f"| {name} | {' | '.join(found)} |")
    return [*lines, ""]


def findings(same: list[dict]) -> list[str]:
    """Each finding by differences within a seed, whose runs share start and data.

    A pair is decided where two seeds or more agree and the mean difference is beyond their spread.
    """
    losses: dict[str, dict[int, float]] = defaultdict(dict)
    for r in same:
        losses[r["method"]][r["seed"]] = last_validation(r)
    lines = ["Loss of the worse method minus loss of the better, seed by seed:", "",
             "| finding | here | differences |", "|---|---|---|"]  # fmt: skip
    for what, pairs in FINDINGS:
        gaps = []
        for better, worse in pairs:
            seeds = sorted(losses[better].keys() & losses[worse].keys())
            gaps.append([losses[worse][seed] - losses[better][seed] for seed in seeds])
        said = [f"{better} over {worse} " + ", ".join(f"{gap:+.4f}" for gap in of)
                for (better, worse), of in zip(pairs, gaps, strict=True) if of]  # fmt: skip
        lines.append(f"| {what} | {verdict(gaps)} | {'; '.join(said)} |")
    return [*lines, objectives(same)]


def verdict(gaps: list[list[float]]) -> str:
    """Of pairs of methods, each with its differences by seed."""
    decided = [len(of) > 1 and abs(sum(of) / len(of)) > max(of) - min(of) for of in gaps]
    if any(sure and max(of) < 0 for sure, of in zip(decided, gaps, strict=True)):
        return "not reproduced"
    if not all(gaps):
        return "not testable: runs are missing"
    if any(len(of) < 2 for of in gaps):
        return "undecided: one seed"
    return "reproduced" if all(decided) else "undecided: within the spread of seeds"


def objectives(same: list[dict]) -> str:
    """J of ARO over the eigen-rotation's, of each kind of matrix at the last reading, by seed."""
    what = "J of ARO is above eigen's for most parameters"
    of = {r["seed"]: r["objectives"] for r in same if r["method"] == "aro" and r.get("objectives")}
    if not of:
        return f"| {what} | not testable: no reading | |"
    most = [sum(ratio > 1 for ratio in kinds.values()) > len(kinds) / 2 for kinds in of.values()]
    said = "reproduced" if all(most) else "undecided: by seed" if any(most) else "not reproduced"
    ratios = "; ".join(
        f"{kind} " + ", ".join(f"{kinds[kind]:.3f}" for _, kinds in sorted(of.items()))
        for kind in next(iter(of.values()))
    )
    return f"| {what} | {said} | {ratios} |"


if __name__ == "__main__":
    main()
