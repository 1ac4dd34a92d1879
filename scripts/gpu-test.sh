#!/usr/bin/env bash
# Tests a bundle (scripts/bundle.sh) on a machine with a GPU of compute capability 9.0; needs nothing else there but
# compute-sanitizer and CUPTI, which the CUDA toolkit has. A part runs its share of every program's tests, then that of the
# small ones (ci/sanitizer/filters.txt) under each sanitizer, side by side, and ends within 8 minutes.
#   scripts/gpu-test.sh --bundle FILE [--part I/N] [--out DIR] [--no-sanitizers]
#   scripts/gpu-test.sh --join DIR     puts the summaries of all parts together that were collected in DIR
# DIR (gpu-test) gets summary.IofN.txt, a line a test: what became of it, the tool, the program, its name, milliseconds;
# and a log a program and tool. Ends with 1 where anything is not ok.
set -euo pipefail

limit=465  # seconds of a part
tools=(memcheck racecheck synccheck initcheck)
bundle='' part=1 parts=1 out=gpu-test join='' sanitize=yes

usage() { sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 2; }
while [ $# -gt 0 ]; do
  case $1 in
    --bundle) bundle=${2:?} && shift ;;
    --part) part=${2%/*} parts=${2#*/} && shift ;;
    --out) out=${2:?} && shift ;;
    --join) join=${2:?} && shift ;;
    --no-sanitizers) sanitize=no ;;
    *) usage ;;
  esac
  shift
done

# Totals of a summary, and every line that is not ok; status 1 where there is one.
report() {
  awk '{n[$1]++; if ($1 != "ok") print} END {
    for (what in n) printf "%s%d %s", (c++ ? ", " : ""), n[what], what
    print c ? "" : "nothing ran"
    exit !(c == 1 && n["ok"] > 0)
  }' "$1"
}

if [ -n "$join" ]; then
  first=$(find "$join" -name 'summary.*of*.txt' | head -n 1)
  [ -n "$first" ] || { echo "$join holds no summary" >&2; exit 1; }
  parts=${first##*of} parts=${parts%.txt}
  : >"$join/summary.txt"
  for ((i = 1; i <= parts; ++i)); do
    file=$(find "$join" -name "summary.${i}of$parts.txt" | head -n 1)
    [ -n "$file" ] || { echo "MISSING part $i of $parts" >>"$join/summary.txt"; continue; }
    cat "$file" >>"$join/summary.txt"
  done
  report "$join/summary.txt"
  exit
fi

[ -f "$bundle" ] || usage
if ! [[ $part =~ ^[0-9]+$ && $parts =~ ^[0-9]+$ ]] || ((part < 1 || part > parts)); then usage; fi
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
tar -C "$here" -xJf "$bundle"
root=$here/dsacore-cuda
mkdir -p "$out"
out=$(cd "$out" && pwd)
suffix=${part}of$parts
summary=$out/summary.$suffix.txt
: >"$summary"
export GTEST_TOTAL_SHARDS=$parts GTEST_SHARD_INDEX=$((part - 1)) GTEST_COLOR=no

echo "part $part of $parts, $(head -n 1 "$root/BUILD")"
nvidia-smi --query-gpu=name,driver_version,clocks.sm --format=csv,noheader || { echo "no GPU here" >&2; exit 1; }

remaining() { echo $((limit - SECONDS > 1 ? limit - SECONDS : 1)); }
# The programs' tests may run for most of the time; the sanitizers must still get theirs.
program_limit() { echo $(($(remaining) * 6 / 10 + 1)); }

# Runs a test program: log, then a line a test. run_program TOOL PROGRAM SECONDS COMMAND...
run_program() {
  local tool=$1 program=$2 seconds=$3 rc=0
  shift 3
  local log=$out/$tool-$program.$suffix.log
  timeout -k 5 "$seconds" env LD_LIBRARY_PATH="$root/lib" "$@" "$root/bin/$program" \
    ${only:+"--gtest_filter=$only"} >"$log" 2>&1 </dev/null || rc=$?
  awk -v rc="$rc" -v tool="$tool" -v program="$program" '
    function line(what, name, ms) { print what, tool, program, name, ms; if (what != "ok") bad++ }
    /^\[ RUN      \]/ { running = $4 }
    /^\[       OK \]/ && running != "" { ms = $5; gsub(/[()]/, "", ms); line("ok", running, ms); running = ""; n++ }
    /^\[  SKIPPED \]/ && running != "" { line("SKIPPED", running, ""); running = "" }
    /^\[  FAILED  \]/ && running != "" { line("FAILED", running, ""); running = "" }
    /(ERROR|RACECHECK) SUMMARY:/ { sub(/^=* */, ""); verdict = $0 }
    END {
      if (running != "") line(rc == 124 || rc == 137 ? "CUT-OFF" : "CRASHED", running, "status " rc)
      else if (rc != 0 && !bad) line(rc == 124 || rc == 137 ? "CUT-OFF" : "FAILED", "(program)", "status " rc)
      if (verdict != "" && verdict !~ /SUMMARY: 0 /) line("FOUND", "(" verdict ")", "")
      if (tool != "plain" && n > 0 && verdict == "" && !bad) line("FAILED", "(no verdict of the tool)", "")
    }' "$log" >"$log.lines"
  cat "$log.lines" >>"$summary"
  rm "$log.lines"
}

only=''
for program in $(cd "$root/bin" && ls cuda_*_test); do run_program plain "$program" "$(program_limit)"; done

if [ "$sanitize" = yes ]; then
  sanitizer=$(command -v compute-sanitizer || find /usr/local -path '*/bin/compute-sanitizer' 2>/dev/null | tail -n 1)
  [ -n "$sanitizer" ] || { echo "no compute-sanitizer here; see --no-sanitizers" >&2; exit 1; }
  at_once=$(($(nproc) > 16 ? 16 : $(nproc)))
  for tool in "${tools[@]}"; do
    options=(--tool "$tool" --error-exitcode 99)
    # One entry a finding that is the tool's own, each with its reason.
    [ ! -f "$root/sanitizer/$tool.xml" ] || options+=(--suppressions "$root/sanitizer/$tool.xml")
    for program in $(cd "$root/bin" && ls cuda_*_test); do
      only=$(awk -v program="$program" '$1 == program { print $2 }' "$root/sanitizer/filters.txt")
      only=${only:-*Small*}
      [ "$only" != none ] || continue
      if ! env LD_LIBRARY_PATH="$root/lib" "$root/bin/$program" --gtest_list_tests --gtest_filter="$only" | grep -q '^  '; then
        echo "FAILED $tool $program (no test is named $only)" >>"$summary"
        continue
      fi
      while (($(jobs -rp | wc -l) >= at_once)); do wait -n || true; done
      run_program "$tool" "$program" "$(remaining)" "$sanitizer" "${options[@]}" &
    done
  done
  wait
fi

echo "$SECONDS s; logs in $out"
report "$summary"
