#!/usr/bin/env bash
# Runs each fuzz target for SECONDS (default 60) from its corpus: ci/fuzz.sh [SECONDS]. Needs the asan-ubsan preset built.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-60}
for target in build/asan-ubsan/fuzz/fuzz_*; do
  [ -x "$target" ] || continue
  name=$(basename "$target")
  work=$(mktemp -d)
  echo "$name: $seconds s"
  "$target" -max_total_time="$seconds" -timeout=20 -rss_limit_mb=4096 -artifact_prefix="$work/" -print_final_stats=1 "$work" "fuzz/corpus/$name" 2>&1 |
    grep -E 'ERROR|SUMMARY|stat::number_of_executed_units|Test unit written' || true
  status=${PIPESTATUS[0]}
  [ "$status" -eq 0 ] || { echo "$name found something; reproducer in $work" >&2; exit 1; }
  rm -rf "$work"
done
