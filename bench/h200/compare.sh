#!/usr/bin/env bash
# dsacore against the fastest public chain of kernels for the same layer, on one H200, in one run. Two halves, for a GPU machine without
# package access:
#   bench/h200/compare.sh prepare FOLDER             stages the peers (bench/peers) and dsacore's program in FOLDER; no GPU needed
#   bench/h200/compare.sh run FOLDER OUT [RUNS]      on the GPU machine, under 9 minutes: writes OUT/h200.json and OUT/h200.md
# RUNS: "grid modes ..." (default: all of compare.py). What each peer is: bench/peers/README.md.
set -euo pipefail
cd "$(dirname "$0")/../.."
usage() { sed -n '2,6s/^# \{0,1\}//p' "$0" >&2; exit 2; }

case ${1:-} in
  prepare)
    folder=${2:?$(usage)}
    bash bench/peers/stage.sh "$folder"
    scripts/build.sh cuda dsacore_cli
    strip -o "$folder/dsacore" build/cuda/cli/dsacore
    mkdir -p "$folder/lib"
    ldd "$folder/dsacore" | awk '/lib(tbb|fmt|hwy)/ { print $3 }' | xargs -I{} cp -L {} "$folder/lib/"
    ;;
  run)
    folder=$(cd "${2:?$(usage)}" && pwd)
    out=${3:?$(usage)}
    mkdir -p "$out" "$folder/stage"
    [ -d "$folder/stage/py" ] || tar -C "$folder/stage" -xf "$folder/peers.tar.xz"
    python3 bench/peers/bench_peers.py --stage "$folder/stage" --only ref,flashmla,pipe,pipe16,stages --json "$out/peers.json" >"$out/peers.log" 2>&1
    # SECONDS counts from the start of this script: what the peers left of 9 minutes.
    LD_LIBRARY_PATH=$folder/lib python3 bench/h200/compare.py --dsacore "$folder/dsacore" --peers "$out/peers.json" --out "$out" \
      --seconds $((530 - SECONDS)) ${4:+--runs "$4"}
    ;;
  *) usage ;;
esac
