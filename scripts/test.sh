#!/usr/bin/env bash
# The test suite: scripts/test.sh [--all] [pytest's arguments]. --all adds the slow tests.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

select=(-m "not slow")
if [[ ${1:-} == --all ]]; then
    select=()
    shift
fi
# One thread a process: distributed tests run several processes on few cores.
export OMP_NUM_THREADS=1
cd "$root"
exec "$python" -m pytest ${select[@]+"${select[@]}"} "$@"
