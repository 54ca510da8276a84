# Sourced by the scripts beside it: sets $root and $python, an interpreter of Python 3.12 that has
# scripts/requirements.txt. In this order it is
#   $MEGATRON_ARO_PYTHON, used as it is (a container's Python with its own torch, say);
#   the active virtual environment, if it has the pinned versions;
#   .venv in the repository, made or completed where needed.
# shellcheck shell=bash
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
requirements=$root/scripts/requirements.txt
venv=$root/.venv
stamp=$venv/.megatron-aro # what .venv was made from, or "incomplete" while it is being made
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}

die() {
    echo "$*" >&2
    exit 1
}

# Whether $1 runs and has every pinned version. Reads metadata only: 0.2 s.
has_pins() {
    "$1" - "$requirements" 2>/dev/null <<'PY'
import sys
from importlib.metadata import version

pins = [line.split("==") for line in open(sys.argv[1]).read().split() if "==" in line]
sys.exit(any(version(name) != pin for name, pin in pins))
PY
}

# Prints an interpreter of Python 3.12 that can make virtual environments, or nothing.
find_python() {
    local candidate
    {
        type -ap python3.12 python3 python || true
        ls -d "$(pyenv root 2>/dev/null)"/versions/3.12.*/bin/python 2>/dev/null || true
        uv python find 3.12 2>/dev/null || true
    } | while read -r candidate; do
        # A pyenv shim may exist and yet refuse to run, and Debian may lack ensurepip: try it.
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 12))' \
            >/dev/null 2>&1 </dev/null; then
            echo "$candidate"
            break
        fi
    done
}

make_venv() {
    local base log=$venv/install.log want=$1
    if [[ $(cat "$stamp" 2>/dev/null) == incomplete ]]; then
        echo "The last set-up of .venv was interrupted: making it anew."
        rm -rf "$venv"
    fi
    if [[ ! -x $venv/bin/python ]]; then
        base=$(find_python)
        [[ -n $base ]] || die "Python 3.12 with its venv module was not found: install it" \
            "(with your system's packages, pyenv or 'uv python install 3.12'), or set" \
            "MEGATRON_ARO_PYTHON to a Python that has scripts/requirements.txt."
        echo "Making .venv with $base"
        mkdir -p "$venv"
        echo incomplete >"$stamp"
        "$base" -m venv "$venv"
    fi
    echo incomplete >"$stamp"
    echo "Installing scripts/requirements.txt into .venv (torch is large: minutes on a slow line)"
    if ! PYTHONUNBUFFERED=1 "$venv/bin/python" -m pip install --disable-pip-version-check \
        --no-input --progress-bar off -r "$requirements" 2>&1 | tee "$log" |
        { grep --line-buffered -oE '(Downloading|Using cached) .*\([0-9]{3}\.[0-9] MB\)' || true; } ||
        ! "$venv/bin/python" -m pip install --disable-pip-version-check --no-input -q \
            --no-deps --no-build-isolation -e "$root" >>"$log" 2>&1; then
        tail -n 15 "$log" >&2
        die "Installing into .venv failed; the whole log is $log"
    fi
    echo "$want" >"$stamp"
}

if [[ -n ${MEGATRON_ARO_PYTHON:-} ]]; then
    python=$MEGATRON_ARO_PYTHON
    "$python" -c 'from importlib.util import find_spec as f; assert f("torch") and f("megatron.core")' \
        2>/dev/null || die "MEGATRON_ARO_PYTHON=$python does not find torch and megatron.core."
elif [[ -n ${VIRTUAL_ENV:-} && $VIRTUAL_ENV != "$venv" ]] && has_pins "$VIRTUAL_ENV/bin/python"; then
    python=$VIRTUAL_ENV/bin/python
else
    want=$({ echo "$root"; cat "$requirements" "$root/setup.py" "$root/pyproject.toml"; } | cksum)
    [[ $(cat "$stamp" 2>/dev/null) == "$want" ]] || make_venv "$want"
    python=$venv/bin/python
fi
