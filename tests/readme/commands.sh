#!/usr/bin/env bash
# Runs the command block of README.md, "Use it from the command line", line by line: commands.sh SOURCE_DIR DSACORE. Files go to a temporary
# folder instead of build/case.
set -euo pipefail
source_dir=$1
binary=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
block=$(awk '/^## Use it from the command line/ {section = 1} section && /^```sh/ {inside = 1; next} inside && /^```/ {exit} inside' "$source_dir/README.md")
[ -n "$block" ] || { echo "README.md has no command block" >&2; exit 1; }
count=0
while read -r line; do
  line=${line//build\/cpu\/cli\/dsacore/$binary}
  line=${line//build\/case/$work}
  echo "+ $line"
  eval "$line"
  count=$((count + 1))
done <<<"$block"
echo "$count commands"
[ "$count" -ge 8 ]
