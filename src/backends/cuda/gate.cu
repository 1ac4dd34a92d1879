// The gate of step 12 alone: v -> times sigmoid(gate) -> out. After `wide`, and for merged `proj` partials.
// Bounds: at most 6 bytes an output, 1 us at 64 rows of 96 heads; below that a kernel's start.
#include "backends/cuda/launch.h"
#include "backends/cuda/ptx/dependency.cuh"
#include "backends/cuda/value.h"
#include "backends/cuda/value_parts.cuh"

namespace dsacore::cuda {
namespace {

constexpr int kThreads = 256;

struct GateParameters {
  View<const BFloat16, 2> v;
  View<const BFloat16, 2> gate;
  View<BFloat16, 2> out;
  LiveRows live;
  bool v_pairs;
  bool gate_pairs;
  bool out_pairs;
};

/// A thread makes one pair of columns of row blockIdx.y.
__global__ void __launch_bounds__(kThreads) gate_rows(const __grid_constant__ GateParameters p) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int row = int(blockIdx.y);
  const int column = int(blockIdx.x * kThreads + threadIdx.x) * 2;
  if (column >= int(p.out.extent(1))) return;
  const Bf16Pair v = load_pair(p.v.row(row) + column, p.v_pairs);
  const Bf16Pair gate = load_pair(p.gate.row(row) + column, p.gate_pairs);
  store_pair(p.out.row(row) + column, p.live(row) ? gated(v, gate) : Bf16Pair{0}, p.out_pairs);
}

}  // namespace

void run_gate(const GateArgs& args, const Workspace& workspace) {
  const int64_t rows = args.out.extent(0);
  if (rows == 0) return;
  const int64_t pairs = args.out.extent(1) / 2;  // whole heads
  const GateParameters parameters{.v = args.v,
                                  .gate = args.gate,
                                  .out = args.out,
                                  .live = live_rows(args.seq_lens, args.q),
                                  .v_pairs = has_aligned_pairs(args.v),
                                  .gate_pairs = has_aligned_pairs(args.gate),
                                  .out_pairs = has_aligned_pairs(args.out)};
  launch(gate_rows,
         {.grid = dim3(unsigned((pairs + kThreads - 1) / kThreads), unsigned(rows)), .block = dim3(kThreads)},
         workspace, parameters);
}

}  // namespace dsacore::cuda
