#!/usr/bin/env bash
# Every C++ file as clang-format-16 writes it.
set -euo pipefail
cd "$(dirname "$0")/.."
git ls-files '*.h' '*.cpp' '*.cc' '*.cu' '*.cuh' | xargs clang-format-16 --dry-run -Werror
