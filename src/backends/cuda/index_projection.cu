// The index projection's kernels, in order of preference. All take every shape of the contract and give the same bits;
// `front` needs no q_c, and is run by name where the query stage runs beside it.
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

int64_t no_scratch(const ShapeKey&, int) { return 0; }

constexpr Kernel<IndexProjectionArgs> kKernels[] = {
    {"front_from_q_c", accepts, no_scratch, run_front_from_q_c, prepare_front_from_q_c},
    {"plain", accepts, plain_scratch_bytes, run_plain, prepare_plain},
    {.name = "front",
     .accepts = accepts,
     .scratch_bytes = no_scratch,
     .run = run_front,
     .prepare = prepare_front,
     .front = true},
};

}  // namespace

std::span<const Kernel<IndexProjectionArgs>> index_projection_kernels() { return kKernels; }

}  // namespace dsacore::cuda
