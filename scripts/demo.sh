#!/usr/bin/env bash
# From a fresh clone to answers: builds dsacore, runs a K3.1-sized layer over a long context, checks it against the reference,
# shows where the time goes, then asks six questions of a real text. Everything it makes is under build/demo.
set -euo pipefail
cd "$(dirname "$0")/.."
say() { printf '\n== %s\n' "$*"; }
out=build/demo

say "1/6 packages"
scripts/install-deps.sh

say "2/6 build (a few minutes on two cores)"
scripts/build.sh cpu dsacore_cli
dsacore=build/cpu/cli/dsacore
mkdir -p "$out"
"$dsacore" --version

say "3/6 a layer of Kimi K3.1's size (12 of 96 heads) and a decode step of 8 requests, contexts from 300 to 65536 tokens"
"$dsacore" generate --out "$out" --seed 1 --heads 12 --batch 8 --context 300-65536
"$dsacore" inspect "$out/step.safetensors"

say "4/6 run it, and check every stage against the reference backend"
"$dsacore" run --layer "$out/layer.safetensors" --step "$out/step.safetensors" --out "$out/out.safetensors"
"$dsacore" check --layer "$out/layer.safetensors" --step "$out/step.safetensors"

say "5/6 where the time goes, and how it grows with the context"
"$dsacore" bench --heads 12 --batch 1 --context 8192,32768,131072 --plot "$out/bench.svg"

say "6/6 six questions of 12000 tokens of licence texts: the passages that the layer selected"
text=examples/text
"$dsacore" run --layer $text/layer.safetensors --step $text/step.safetensors --out "$out/text.safetensors" --dump all
"$dsacore" inspect "$out/text.safetensors" --tokens $text/tokens.json --html "$out/text.html"

say "done"
echo "Pictures: $out/bench.svg (time) and $out/text.html (the text with what was selected marked)."
