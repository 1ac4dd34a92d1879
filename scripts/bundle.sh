#!/usr/bin/env bash
# Packs a build of the cuda preset for a machine that has a GPU and nothing else: its programs, stripped, the shared libraries
# that they need beyond the C library, and gpu-test.sh, which runs them there. Builds nothing.
#   scripts/bundle.sh [FILE]     FILE: build/dsacore-cuda.tar.xz; refused above 20 MB
set -euo pipefail
cd "$(dirname "$0")/.."
build=build/cuda
archive=${1:-build/dsacore-cuda.tar.xz}
max_bytes=20000000

programs=()
for program in "$build"/cli/dsacore "$build"/tests/cuda/cuda_*_test "$build"/tests/cuda/racecheck_findings; do
  [ -f "$program" ] && [ -x "$program" ] && programs+=("$program")
done
[ ${#programs[@]} -gt 0 ] || { echo "Nothing is built in $build: scripts/build.sh cuda" >&2; exit 1; }

staging=$(mktemp -d)
trap 'rm -rf "$staging"' EXIT
bundle=$staging/dsacore-cuda
mkdir -p "$bundle/bin" "$bundle/lib"
for program in "${programs[@]}"; do strip -o "$bundle/bin/$(basename "$program")" "$program"; done

# The C library and its loader belong to the machine; all else travels.
ldd "${programs[@]}" | awk '$2 == "=>" && $3 ~ /^\// {print $3}' | sort -u |
  grep -Ev '/(libc|libm|libdl|librt|libpthread)\.so' | while read -r library; do
    strip -o "$bundle/lib/$(basename "$library")" "$library"
  done

cp scripts/gpu-test.sh "$bundle/"
cp -r ci/sanitizer "$bundle/"
{
  echo "commit $(git rev-parse --short HEAD)$(git diff --quiet HEAD || echo ', changed')"
  nvcc --version | tail -n 2 | head -n 1
} >"$bundle/BUILD"

mkdir -p "$(dirname "$archive")"
# The programs hold the same library: a window as large as all of them stores it once.
tar -C "$staging" -c dsacore-cuda | xz --lzma2=preset=6,dict=128MiB >"$archive"
bytes=$(stat -c %s "$archive")
echo "$archive: ${#programs[@]} programs, $bytes bytes"
if [ "$bytes" -gt "$max_bytes" ]; then
  echo "More than $max_bytes bytes. The largest files:" >&2
  (cd "$bundle" && du -ab bin lib | sort -rn | sed -n 2,9p) >&2
  exit 1
fi
