// The index projection's kernels, in order of preference. All can compute every shape of the contract, and give the
// same bits; the fronts refuse where `plain` is faster. `front` needs no q_c, and is run where the query stage runs
// beside it.
#include "backends/cuda/index_projection_kernels.h"
#include "backends/cuda/kernels.h"

namespace dsacore::cuda {
namespace {

Verdict accepts(const ShapeKey& shape) {
  const auto refuse = [](const char* what, int value, const char* allowed) {
    return Verdict{false, std::string(what) + " " + std::to_string(value) + ": takes " + allowed};
  };
  const LayerSizes& sizes = shape.sizes;
  if (sizes.q_lora < kQLoraStep || sizes.q_lora > kMaxQLora || sizes.q_lora % kQLoraStep != 0) {
    return refuse("q_lora", sizes.q_lora, "multiples of 128 up to 2048");
  }
  if (sizes.index_heads < kMinIndexHeads || sizes.index_heads > kMaxIndexHeads) {
    return refuse("index heads", sizes.index_heads, "8..64");
  }
  if (shape.rows < 1 || shape.rows > kMaxRows) return refuse("rows", shape.rows, "1..256");
  return {};
}

/// The fronts read the weights again for every 64 rows, and twice as many for a cluster that has two heads in turn.
Verdict accepts_front(const ShapeKey& shape) {
  const int most = shape.sizes.index_heads < 62 ? 64 : 16;
  if (shape.rows > most) {
    return {false, "rows " + std::to_string(shape.rows) + ": above " + std::to_string(most) + " plain is faster"};
  }
  return accepts(shape);
}

int64_t no_scratch(const ShapeKey&, int) { return 0; }

constexpr Kernel<IndexProjectionArgs> kKernels[] = {
    {"front_from_q_c", accepts_front, no_scratch, run_front_from_q_c, prepare_front_from_q_c},
    {"plain", accepts, plain_scratch_bytes, run_plain, prepare_plain},
    {.name = "front",
     .accepts = accepts_front,
     .scratch_bytes = no_scratch,
     .run = run_front,
     .prepare = prepare_front,
     .front = true},
};

}  // namespace

std::span<const Kernel<IndexProjectionArgs>> index_projection_kernels() { return kKernels; }

}  // namespace dsacore::cuda
