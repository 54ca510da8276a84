#!/usr/bin/env bash
# Trains by configuration files on several machines without a scheduler. On each machine:
#   export RUN=/shared/runs/aro TRAIN_DATA=... VALID_DATA=...
#   NODES=8 HEAD=node0 scripts/multinode.sh CONFIG... [--set key=value ...]
# HEAD is one of the machines, as host or host:port. After a fault torchrun starts all processes again,
# up to $RESTARTS (10) times, and they go on from the last checkpoint if configs/logging.yaml is among
# the files. Nothing is installed: $MEGATRON_ARO_PYTHON (python3) must have torch, megatron-core and
# pyyaml, as an NGC container of PyTorch does once megatron-core is there.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
: "${NODES:?number of machines}" "${HEAD:?one of the machines, host or host:port}"
[[ $HEAD == *:* ]] || HEAD=$HEAD:29500
exec "${MEGATRON_ARO_PYTHON:-python3}" -m megatron_aro.cli.main train "$@" \
    --set "nodes=$NODES" --set "rendezvous=$HEAD" --set "max_restarts=${RESTARTS:-10}"
