#!/usr/bin/env bash
# Trains a tiny GPT on the Python standard library with AdamW, Muon and ARO and compares them:
# scripts/quickstart.sh [--steps N] [--out FOLDER] [any flag of Megatron]; --help lists more.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

exec "$python" -m megatron_aro.cli.quickstart --out "$root/quickstart-out" "$@"
