#!/usr/bin/env bash
# Installs the build into a temporary prefix and builds examples/cpp against it: install.sh SOURCE_DIR BUILD_DIR COMPILER.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cmake --install "$2" --prefix "$work/prefix" >/dev/null
cmake -G Ninja -S "$1/examples/cpp" -B "$work/build" -DCMAKE_CXX_COMPILER="$3" -DCMAKE_PREFIX_PATH="$work/prefix" >/dev/null
cmake --build "$work/build" >/dev/null
"$work/build/minimal"
"$work/prefix/bin/dsacore" --version
