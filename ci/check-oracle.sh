#!/usr/bin/env bash
# The independent NumPy oracle judges what `dsacore run` writes: ci/check-oracle.sh [oracle.py's options; default --part ci].
# Needs the cpu preset built and a package index for numpy.
set -euo pipefail
cd "$(dirname "$0")/.."
original=../shared/oracle
if [ -d "$original" ]; then  # where the oracle's own folder is at hand, the copy must be the same
  for file in "$original"/*.py "$original"/README.md "$original"/requirements.txt "$original"/cases; do
    diff -r --exclude=__pycache__ "$file" "tests/oracle/$(basename "$file")"
  done
  diff -r "$original/text" examples/text
fi
venv=build/oracle-venv
if [ ! -x $venv/bin/python ]; then
  python3 -m venv $venv
  $venv/bin/pip install --quiet -r tests/oracle/requirements.txt
fi
$venv/bin/python ci/oracle.py "${@:---part=ci}"
