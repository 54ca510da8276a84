#!/usr/bin/env bash
# Trains AdamW, Muon and ARO by the paper's benchmarking rules (section 5), and compares them:
#   OUT=bench scripts/benchmark.sh configs/gpt2_124m.yaml configs/parallel/8_gpus.yaml [--set key=value ...]
# The runs differ in the matrix optimizer alone: the same model, data, batch, seed and number of steps;
# the same schedule, decayed to the end; AdamW for all parameters that are no matrices; AdamW's learning
# rate for all, by matching the RMS of updates. The rest is the config's: realistic batch and context,
# bf16, and at least 20 tokens a parameter (`megatron-aro compare` notes less).
#   OPTIMIZERS="adamw muon aro"   names of files in configs/optimizer, the baseline first
#   LRS="3e-4 6e-4 1.2e-3"        trains the baseline to the end with each, and takes the best for all
#   TWIN=1                        trains the baseline with another seed too, for the metric's noise
#   LAUNCH="sbatch --wait --nodes 8 --gpus-per-node 8 scripts/slurm.sh"
#                                 starts each run so; without it, on this machine
# A finished run is kept; one that was cut short goes on from its last checkpoint.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
python=${MEGATRON_ARO_PYTHON:-python3}
out=${OUT:-benchmark}
read -r -a optimizers <<<"${OPTIMIZERS:-adamw muon aro}"
read -r -a launch <<<"${LAUNCH:-$python -m megatron_aro.cli.main train}"
files=()
while (($#)) && [[ $1 != --* ]]; do
    files+=("$1")
    shift
done
((${#files[@]})) || { sed -n '2,16p' "${BASH_SOURCE[0]}" >&2; exit 2; }

# run NAME OPTIMIZER [--set key=value ...]
run() {
    local name=$1 optimizer=$2
    shift 2
    export RUN=$out/$name
    if [[ ! -e $RUN/finished ]]; then
        echo "== $name"
        mkdir -p "$RUN"
        "${launch[@]}" "${files[@]}" "$root/configs/optimizer/$optimizer.yaml" \
            "$root/configs/logging.yaml" "${overrides[@]}" "$@"
        touch "$RUN/finished"
    fi
}

overrides=("$@")
base=${optimizers[0]}
rate=()
if [[ -n ${LRS:-} ]]; then
    swept=()
    for lr in $LRS; do
        # As low at the end, in proportion, as the paper's runs.
        at=(--set "lr=$lr" --set "min-lr=$(awk "BEGIN {print $lr / 10}")")
        run "sweep/$lr" "$base" "${at[@]}"
        swept+=("$out/sweep/$lr")
    done
    best=$("$python" - "${swept[@]}" <<'PY'
import sys
from pathlib import Path

from megatron_aro.cli import matched, runs

found = [runs.read(Path(path)) for path in sys.argv[1:]]
width = matched.window(found[0].total or found[0].steps[-1])
print(min(found, key=lambda run: matched.Smoothed(run, width).losses[-1]).path)
PY
    )
    echo "Of these learning rates $(basename "$best") ends lowest."
    lr=$(basename "$best")
    rate=(--set "lr=$lr" --set "min-lr=$(awk "BEGIN {print $lr / 10}")")
fi
runs=()
for optimizer in "${optimizers[@]}"; do
    run "$optimizer" "$optimizer" ${rate[@]+"${rate[@]}"}
    runs+=("$out/$optimizer")
done
if [[ ${TWIN:-} == 1 ]]; then
    run "${base}_twin" "$base" ${rate[@]+"${rate[@]}"} --set seed=4321
    runs+=("$out/${base}_twin")
fi
exec "$python" -m megatron_aro.cli.main compare "${runs[@]}" --baseline "$base" \
    --out "$out/comparison"
