#!/usr/bin/env bash
# Tests a bundle (scripts/bundle.sh) on a machine with a GPU of compute capability 9.0; needs nothing else there but
# compute-sanitizer and CUPTI, which the CUDA toolkit has. A part times its share of the kernels, a program at a time; then it
# runs its share of every program's tests and of the small ones (ci/sanitizer/filters.txt) under each sanitizer, side by side.
# It ends within 8 minutes.
#   scripts/gpu-test.sh --bundle FILE [--part I/N] [--gpu K] [--out DIR] [--no-sanitizers]
#   scripts/gpu-test.sh --join DIR     puts the summaries of all parts together that were collected in DIR
# --gpu K: the part works on GPU K of the machine; tests that need two GPUs see the others as well.
# DIR (gpu-test) gets summary.IofN.txt, a line a test: what became of it, the tool, the program, its name, milliseconds;
# and a log a program and tool. Ends with 1 where anything is not ok, but for tests that need two GPUs where one is seen.
set -euo pipefail

limit=465  # seconds of a part
tools=(racecheck plain synccheck initcheck memcheck)  # the slowest first
times='*Time*'  # tests that measure, and so run alone
bundle='' part=1 parts=1 gpu='' out=gpu-test join='' sanitize=yes

usage() { sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 2; }
while [ $# -gt 0 ]; do
  case $1 in
    --bundle) bundle=${2:?} && shift ;;
    --part) part=${2%/*} parts=${2#*/} && shift ;;
    --gpu) gpu=${2:?} && shift ;;
    --out) out=${2:?} && shift ;;
    --join) join=${2:?} && shift ;;
    --no-sanitizers) sanitize=no ;;
    *) usage ;;
  esac
  shift
done

# Totals of a summary, and every line that is not ok; status 1 where there is one that fails the run.
report() {
  awk '{n[$1]++; if ($1 != "ok") print} END {
    for (what in n) printf "%s%d %s", (c++ ? ", " : ""), n[what], what
    print c ? "" : "nothing ran"
    exit !(c > 0 && c == ("ok" in n) + ("needs-two-GPUs" in n))
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
if ! [[ $part =~ ^[0-9]+$ && $parts =~ ^[0-9]+$ && $gpu =~ ^[0-9]*$ ]] || ((part < 1 || part > parts)); then usage; fi
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
tar -C "$here" -xJf "$bundle"
root=$here/dsacore-cuda
mkdir -p "$out"
out=$(cd "$out" && pwd)
suffix=${part}of$parts
summary=$out/summary.$suffix.txt
: >"$summary"
export GTEST_TOTAL_SHARDS=$parts GTEST_SHARD_INDEX=$((part - 1)) GTEST_COLOR=no LD_LIBRARY_PATH=$root/lib

echo "part $part of $parts, $(head -n 1 "$root/BUILD")"
nvidia-smi --query-gpu=name,driver_version,clocks.sm --format=csv,noheader || { echo "no GPU here" >&2; exit 1; }
gpus=$(nvidia-smi -L | wc -l)
if [ -n "$gpu" ]; then
  export CUDA_VISIBLE_DEVICES=$gpu
  for ((i = 0; i < gpus; ++i)); do ((i == gpu)) || CUDA_VISIBLE_DEVICES+=,$i; done
elif [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
  gpus=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | wc -l)
fi

remaining() { echo $((limit - SECONDS > 1 ? limit - SECONDS : 1)); }

# What racecheck reports in a log and ci/sanitizer/racecheck.txt does not list for the program: writer and reader.
unlisted_races() {
  awk -v program="$1" '
    function site(line) {
      sub(/^.* access at /, "", line)
      sub(/\+0x[0-9a-f]+( in .*)?$/, "", line)
      gsub(/\(anonymous namespace\)::|<unnamed>::|\((int|bool|[A-Za-z_]+::[A-Za-z_:]+)\)/, "", line)  # what is left in brackets:
      sub(/\(.*/, "", line)                                                               # parameters
      while (gsub(/<[^<>]*>/, "", line)) {}
      sub(/^.* /, "", line)
      gsub(/(dsacore|cuda|many)::/, "", line)
      return line
    }
    FNR == NR { if ($1 == program) listed[$2 " " $3] = 1; next }
    /Race reported between (Read|Write) access at/ { first = site($0); writes = /between Write/ }
    /^=+ +and (Read|Write) access at/ {
      pair = writes ? first " " site($0) : site($0) " " first
      if (!(pair in listed) && !seen[pair]++) print pair
    }' "$root/sanitizer/racecheck.txt" "$2"
}

# Tests of a program under a tool: a log, then a line a test. job TOOL PROGRAM FILTER COMMAND...
job() {
  local tool=$1 program=$2 filter=$3 rc=0
  shift 3
  local log=$out/$tool-$program.$suffix.log
  timeout -k 5 "$(remaining)" "$@" "$root/bin/$program" --gtest_filter="$filter" >"$log" 2>&1 </dev/null || rc=$?
  [ "$tool" != racecheck ] || unlisted_races "$program" "$log" >"$log.races"
  awk -v rc="$rc" -v tool="$tool" -v program="$program" -v gpus="$gpus" -v unlisted="$log.races" '
    function line(what, name, ms) { print what, tool, program, name, ms; n++; if (what ~ /^[A-Z]/) bad++ }
    /^\[ RUN      \]/ { running = $4; lacking = 0 }
    /^needs two GPUs/ { lacking = gpus < 2 }
    /^\[       OK \]/ && running != "" { ms = $5; gsub(/[()]/, "", ms); line("ok", running, ms); running = "" }
    /^\[  SKIPPED \]/ && running != "" { line(lacking ? "needs-two-GPUs" : "SKIPPED", running, ""); running = "" }
    /^\[  FAILED  \]/ && running != "" { line("FAILED", running, ""); running = "" }
    /: Race reported between/ { races++ }
    /(ERROR|RACECHECK) SUMMARY:/ { sub(/^=* */, ""); verdict = $0; findings = $3 }
    END {
      if (running != "") line(rc == 124 || rc == 137 ? "CUT-OFF" : "CRASHED", running, "status " rc)
      if (tool == "racecheck" && races > 0 && races == findings) {
        while ((getline pair < unlisted) > 0) line("FOUND", "(race: " pair ")", "")
        if (rc == 99) rc = 0
      } else if (findings != 0) {
        line("FOUND", "(" verdict ")", "")
      }
      if (!bad && rc != 0) line(rc == 124 || rc == 137 ? "CUT-OFF" : "FAILED", "(program)", "status " rc)
      if (!bad && n == 0) line("FAILED", "(no test ran)", "")
      if (!bad && tool ~ /check$/ && verdict == "") line("FAILED", "(no verdict of the tool)", "")
    }' "$log" >"$log.lines"
  cat "$log.lines" >>"$summary"
  rm -f "$log.lines" "$log.races"
}

# The kernels that show what racecheck reports although it is right: it must report each.
known_findings() {
  local log=$out/racecheck-racecheck_findings.$suffix.log name
  timeout -k 5 "$(remaining)" "$sanitizer" --tool racecheck "$root/bin/racecheck_findings" >"$log" 2>&1 </dev/null || true
  { sed -n 's/^finding //p' "$log"; awk '!/^#/ { print $4 }' "$root/sanitizer/racecheck.txt"; } | sort -u | while read -r name; do
    [ -n "$name" ] || continue
    if grep -q "Race reported.*[ :]$name(" "$log"; then
      echo "ok racecheck racecheck_findings $name" >>"$summary"
    else
      echo "FAILED racecheck racecheck_findings $name is not reported: its entries in racecheck.txt go" >>"$summary"
    fi
  done
}

# How many tests of a program have such a name. Shards take them in turn.
count() { "$root/bin/$1" --gtest_list_tests --gtest_filter="$2" | grep -c '^  ' || true; }

# A job beside others, where this part has any of its tests.
at_once=$(($(nproc) > 16 ? 16 : $(nproc)))
side_by_side() {
  (($(count "$2" "$3") >= part)) || return 0
  while (($(jobs -rp | wc -l) >= at_once)); do wait -n || true; done
  job "$@" &
}

mapfile -t programs < <(cd "$root/bin" && ls cuda_*_test)
for program in "${programs[@]}"; do
  (($(count "$program" "$times") < part)) || job times "$program" "$times"
done

if [ "$sanitize" = yes ]; then
  sanitizer=$(command -v compute-sanitizer || find /usr/local -path '*/bin/compute-sanitizer' 2>/dev/null | tail -n 1)
  [ -n "$sanitizer" ] || { echo "no compute-sanitizer here; see --no-sanitizers" >&2; exit 1; }
  known_findings &
else
  tools=(plain)
fi
for tool in "${tools[@]}"; do
  for program in "${programs[@]}"; do
    if [ "$tool" = plain ]; then
      only=-$times
      under=()
    else
      only=$(awk -v program="$program" '$1 == program { print $2 }' "$root/sanitizer/filters.txt")
      [ "${only:=*Small*}" != none ] || continue
      under=("$sanitizer" --tool "$tool" --error-exitcode 99 --print-limit 0)
    fi
    # Also where the program cannot list its tests.
    (($(count "$program" "$only") > 0)) || echo "FAILED $tool $program (no test is named $only)" >>"$summary"
    side_by_side "$tool" "$program" "$only" "${under[@]}"
  done
done
wait

echo "$SECONDS s; logs in $out"
report "$summary"
