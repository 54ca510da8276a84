#!/usr/bin/env bash
# The test suite: scripts/test.sh [--all] [pytest's arguments]. --all adds the slow tests.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

# The files, without what they need, of releases that a few tests look into. Elsewhere than the
# Python that runs the tests, which is not touched; without a network those tests are skipped.
for pin in megatron-core==0.18.2 megatron-bridge==0.6.2; do
    files=$root/.releases/$pin
    [[ -d $files ]] && continue
    rm -rf "$files.part"
    if "$python" -m pip install -q --disable-pip-version-check --no-deps --target "$files.part" "$pin"
    then
        mv "$files.part" "$files"
    else
        echo "$pin could not be fetched: its tests are skipped." >&2
    fi
done

select=(-m "not slow")
if [[ ${1:-} == --all ]]; then
    select=()
    shift
fi
# One thread a process: distributed tests run several processes on few cores.
export OMP_NUM_THREADS=1
cd "$root"
exec "$python" -m pytest ${select[@]+"${select[@]}"} "$@"
