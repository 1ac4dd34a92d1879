#!/usr/bin/env bash
# clang-tidy-16 over the sources of the asan-ubsan preset, with its compile commands.
set -euo pipefail
cd "$(dirname "$0")/.."
git ls-files 'src/*.cpp' 'cli/*.cpp' ':!src/backends/cuda' | xargs -P "$(nproc)" -n 4 clang-tidy-16 -p build/asan-ubsan --quiet --warnings-as-errors='*'
