#!/usr/bin/env bash
# Configures and builds a preset: scripts/build.sh PRESET [TARGET...]. The other scripts call it.
set -euo pipefail
cd "$(dirname "$0")/.."
preset=$1
shift
launcher=()
if command -v ccache >/dev/null; then  # paths relative to the checkout, so that two checkouts share what they compile
  launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
  export CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1
fi
cmake --preset "$preset" "${launcher[@]}" >"build-$preset.log" 2>&1 || { cat "build-$preset.log" >&2; exit 1; }
rm -f "build-$preset.log"
cmake --build --preset "$preset" --parallel "$(nproc)" ${1:+--target "$@"}
