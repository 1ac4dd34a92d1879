#!/usr/bin/env bash
# Installs what is missing, builds the cpu preset and runs its tests.
set -euo pipefail
cd "$(dirname "$0")/.."
say() { printf '\n== %s\n' "$*"; }

say "1/3 packages"
scripts/install-deps.sh
say "2/3 build (a few minutes on two cores)"
scripts/build.sh cpu
say "3/3 tests"
ctest --preset cpu --parallel "$(nproc)"
