#!/usr/bin/env bash
# Builds the cuda preset and runs the tests that need a GPU of compute capability 9.0: scripts/gpu-test.sh [REPLAYS]. REPLAYS (default
# 1000) is how often the layer's graphs are replayed under each overlap mode.
set -euo pipefail
cd "$(dirname "$0")/.."
export DSACORE_REPLAYS=${1:-1000}
scripts/build.sh cuda
for program in build/cuda/tests/cuda/cuda_*_test; do
  printf '\n== %s\n' "${program##*/}"
  "$program" --gtest_brief=1
done
