#!/bin/bash
# Fills DEST with what bench_peers.py needs on the GPU machine, as one archive DEST/peers.tar.xz.
#   stage.sh DEST [WHEELS]
# WHEELS: a folder that already holds some of the wheels below (they are not downloaded again).
# Needs: pip, unzip, xz, strip. FLASHINFER_ARCHIVE names a flashinfer_sm90a.tar.xz with FlashInfer's modules compiled for sm_90a from the
# 0.7.2.post1 package by its own JIT; without it they are compiled here, which needs a python (PY) that can import torch and
# flashinfer's requirements, nvcc (CUDA 13.0) and ninja, and takes about 10 minutes on two cores. SKIP_FLASHINFER=1 leaves them out.
set -euo pipefail
DEST=$(mkdir -p "$1" && cd "$1" && pwd); WHEELS=${2:-}
PY=${PY:-python3}
HERE=$(cd "$(dirname "$0")" && pwd)
W=$(mktemp -d); trap 'rm -rf "$W"' EXIT
get() { # NAME VERSION -> path of the wheel
  local n=${1//-/_} f=
  for d in ${WHEELS:+"$WHEELS"} "$W/dl"; do f=$(ls "$d/${n}-$2"*.whl 2>/dev/null | head -1 || true); [ -n "$f" ] && { echo "$f"; return; }; done
  "$PY" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 -d "$W/dl" "$1==$2" >&2
  ls "$W/dl/${n}-$2"*.whl | head -1
}
S=$W/stage; mkdir -p "$S/lib" "$S/py"
# vLLM 0.33.0: FlashMLA, DeepGEMM (JIT) and the indexer top-k kernels, all on torch's stable ABI
v=$(get vllm 0.33.0); mkdir "$W/v"
unzip -q -o "$v" 'vllm/_C_stable_libtorch.abi3.so' 'vllm/_flashmla_C.abi3.so' 'vllm/third_party/deep_gemm/*' -d "$W/v"
"$PY" "$HERE/prune_fatbin.py" "$W/v/vllm/_C_stable_libtorch.abi3.so" "$S/lib/_C_stable_libtorch.abi3.so" 90
cp "$W/v/vllm/_flashmla_C.abi3.so" "$S/lib/"
cp -r "$W/v/vllm/third_party/deep_gemm" "$S/py/deep_gemm"
strip --strip-debug "$S"/lib/*.so "$S"/py/deep_gemm/*.so
# sgl-flash-mla 1.0.0: its frozen SM90 kernels
f=$(get sgl-flash-mla 1.0.0); unzip -q -o -j "$f" 'flash_mla/_C_legacy.abi3.so' -d "$W"
"$PY" "$HERE/prune_fatbin.py" "$W/_C_legacy.abi3.so" "$S/lib/_C_legacy.abi3.so" 90
if [ -z "${SKIP_FLASHINFER:-}" ]; then
  fi=$(get flashinfer-python 0.7.2.post1); t=$(get apache-tvm-ffi 0.1.15.post2)
  mkdir "$W/fi"; unzip -q -o "$fi" -d "$W/fi"; unzip -q -o "$t" -d "$S/py"
  if [ -n "${FLASHINFER_ARCHIVE:-}" ]; then mkdir "$W/aot"; tar -C "$W/aot" -xJf "$FLASHINFER_ARCHIVE"; else
    FLASHINFER_CUDA_ARCH_LIST=9.0a FLASHINFER_WORKSPACE_BASE=$W/ws PYTHONPATH=$W/fi:$S/py "$PY" - "$W/aot" <<'P'
import shutil, sys, os, torch
from flashinfer.jit.topk import gen_topk_module
from flashinfer.jit.attention.modules import gen_batch_mla_module
specs = [gen_topk_module()] + [gen_batch_mla_module("fa3", torch.bfloat16, d, torch.bfloat16, torch.int32, 512, 64, False) for d in (torch.float8_e4m3fn, torch.bfloat16)]
for s in specs:
    s.build(verbose=True)
    os.makedirs(f"{sys.argv[1]}/{s.name}", exist_ok=True)
    shutil.copy(s.jit_library_path if hasattr(s, "jit_library_path") else s.get_library_path(), f"{sys.argv[1]}/{s.name}/{s.name}.so")
P
  fi
  (cd "$W/fi" && { find flashinfer -name '*.py' -not -path '*/data/*' -not -path '*/experimental/*/csrc/*' -print0; find flashinfer/data/csrc -name 'batch_mla*' -print0; } | tar -cf - --null -T -) | tar -xf - -C "$S/py"
  mkdir -p "$S/py/flashinfer/data/aot"; cp -r "$W"/aot/* "$S/py/flashinfer/data/aot/"; strip --strip-debug "$S"/py/flashinfer/data/aot/*/*.so
fi
find "$S" -name '__pycache__' -prune -exec rm -rf {} +
tar -C "$S" -cf - . | xz -6 -T2 > "$DEST/peers.tar.xz"
cp "$HERE/bench_peers.py" "$DEST/"
ls -la "$DEST"
