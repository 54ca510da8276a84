#!/usr/bin/env bash
#SBATCH --job-name=megatron-aro
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
# Trains by configuration files on the nodes of a Slurm job, and goes on in the next job where the
# time limit or a fault ended this one:
#   export RUN=/shared/runs/aro TRAIN_DATA=... VALID_DATA=...
#   sbatch --nodes 8 --gpus-per-node 8 scripts/slurm.sh CONFIG... [--set key=value ...]
# Among the files must be configs/logging.yaml, or one of yours with --save, --load and logs.
#
# Nothing is installed. $MEGATRON_ARO_PYTHON (python3) must have torch, megatron-core and pyyaml; in a
# container (pyxis) that is the container's own: CONTAINER=image.sqsh MOUNTS=/shared:/shared.
# $EXIT_MINUTES (10) before the limit Megatron saves and ends; the job then queues itself again, as it
# does after a fault, as long as each start reaches a new checkpoint.
set -euo pipefail
[[ -n ${SLURM_JOB_ID:-} ]] || { echo "Start this with sbatch: see its first lines." >&2; exit 2; }
root=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's|^ *Command=\([^ ]*\)/scripts/slurm.sh.*|\1|p')
export PYTHONPATH=${root:-$SLURM_SUBMIT_DIR}${PYTHONPATH:+:$PYTHONPATH}
container=()
if [[ -n ${CONTAINER:-} ]]; then
    container=(--container-image "$CONTAINER" --container-workdir "$SLURM_SUBMIT_DIR"
        --container-mounts "${MOUNTS:+$MOUNTS,}${root:-$SLURM_SUBMIT_DIR}")
fi
train=("${MEGATRON_ARO_PYTHON:-python3}" -m megatron_aro.cli.main train "$@")
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
train+=(--set "nodes=$SLURM_NNODES" --set "gpus_per_node=${SLURM_GPUS_ON_NODE:-1}"
    --set "rendezvous=$head:$((20000 + SLURM_JOB_ID % 10000))")
if [[ -n ${SLURM_JOB_END_TIME:-} ]]; then
    minutes=$(((SLURM_JOB_END_TIME - $(date +%s)) / 60 - ${EXIT_MINUTES:-10}))
    ((minutes > 0)) && train+=(--set "exit-duration-in-mins=$minutes")
fi

# Wrong settings end here, and are not tried again.
line=$(srun --nodes 1 --ntasks 1 "${container[@]}" "${train[@]}" --dry-run)
value() { sed -n "s/^ *--$1 '\{0,1\}\([^' ]*\).*/\1/p" <<<"$line" | head -n 1; }
save=$(value save)
[[ -n $save && $save == "$(value load)" ]] || {
    echo "A job that goes on by itself needs --save and --load, the same: add configs/logging.yaml." >&2
    exit 2
}
reached() { cat "$save/latest_checkpointed_iteration.txt" 2>/dev/null || echo 0; }

before=$(reached)
code=0
srun --kill-on-bad-exit=1 "${container[@]}" "${train[@]}" || code=$?
after=$(reached)
if [[ $after == "$(value train-iters)" ]]; then
    echo "Finished: iteration $after."
elif ((after > before)); then
    echo "Iteration $after of $(value train-iters) (exit code $code): the job is queued again."
    scontrol requeue "$SLURM_JOB_ID"
else
    echo "No new checkpoint since iteration $before (exit code $code): the job ends." >&2
    exit $((code ? code : 1))
fi
