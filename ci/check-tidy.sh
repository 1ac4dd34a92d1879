#!/usr/bin/env bash
# clang-tidy-16 over the sources, with the compile commands of the asan-ubsan preset.
set -euo pipefail
cd "$(dirname "$0")/.."
git ls-files 'src/*.cpp' 'cli/*.cpp' | xargs -P "$(nproc)" -n 4 clang-tidy-16 -p build/asan-ubsan --quiet --warnings-as-errors='*'
