#!/usr/bin/env bash
# Trains a tiny GPT on the Python standard library with AdamW, Muon and ARO and compares them:
# scripts/quickstart.sh [--steps N] [--out FOLDER] [--optimizers AdamW Muon ARO] [flags of Megatron]
if [[ ${1:-} == --help || ${1:-} == -h ]]; then # without making an environment first
    sed -n '2,3s/^# //p' "${BASH_SOURCE[0]}"
    exit
fi
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

exec "$python" -m megatron_aro.cli.quickstart --out "$root/quickstart-out" "$@"
