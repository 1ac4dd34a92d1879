#!/usr/bin/env bash
# Installs what is missing, builds the cpu preset and runs its tests. `--cuda` does the same with the cuda preset after it (needs
# nvcc 13): the tests that need no GPU; scripts/gpu-test.sh runs those that do.
set -euo pipefail
cd "$(dirname "$0")/.."
presets=(cpu)
for option in "$@"; do
  case $option in
    --cuda) presets+=(cuda) ;;
    *) echo "usage: scripts/test.sh [--cuda]" >&2; exit 2 ;;
  esac
done
steps=$((1 + 2 * ${#presets[@]}))
step=0
say() { step=$((step + 1)); printf '\n== %d/%d %s\n' "$step" "$steps" "$*"; }

say "packages"
scripts/install-deps.sh
for preset in "${presets[@]}"; do
  say "build of the preset $preset (a few minutes on two cores)"
  scripts/build.sh "$preset"
  say "tests of the preset $preset"
  ctest --preset "$preset" --parallel "$(nproc)"
done
