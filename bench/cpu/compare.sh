#!/usr/bin/env bash
# dsacore against what a user would write with PyTorch (bench/cpu/torch_cpu_layer.py), on an idle machine: alternates the two at
# least 7 times and writes bench/results/cpu.json (the six shapes) and bench/results/cpu-detail.json (every run, stages, rotating
# layers, memory, machine). bench/cpu/compare.sh [ROUNDS]
set -euo pipefail
cd "$(dirname "$0")/../.."
rounds=${1:-7}
venv=build/peer-venv
if [ ! -x $venv/bin/python ]; then
  python3 -m venv $venv
  $venv/bin/pip install --quiet -r bench/cpu/requirements.txt
fi
scripts/build.sh cpu dsacore_cli >/dev/null
$venv/bin/python bench/cpu/compare.py --rounds "$rounds" --dsacore build/cpu/cli/dsacore --python $venv/bin/python
