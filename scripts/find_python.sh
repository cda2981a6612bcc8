#!/usr/bin/env bash
# Prints a Python >= 3.12: the one asked for, else one on PATH that really answers, else pyenv's newest.
set -u

good() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

asked=${1:-}
if [ -n "$asked" ]; then
    good "$asked" && { echo "$asked"; exit 0; }
    echo "PYTHON=$asked is not a working Python >= 3.12" >&2
    exit 1
fi
for name in python3.12 python3.13 python3.14 python3; do
    if command -v "$name" >/dev/null 2>&1 && good "$name"; then
        command -v "$name"
        exit 0
    fi
done
for found in $(ls -d "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python 2>/dev/null | sort -V); do
    good "$found" && { echo "$found"; exit 0; }
done
echo "no Python >= 3.12 found. Install one (Debian/Ubuntu: apt-get install python3.12 python3.12-venv," \
    "or 'pyenv install 3.12') or name it: make PYTHON=/path/to/python3.12 ..." >&2
exit 1
