// The weights that the cpu backend packs at prepare: W_UK transposed per head, [heads, 512, 128], so that step 3 of
// spec 4 reads rows as every other product does. W_QB, W_IQ and W_UV (which kv_b_proj holds transposed already) are
// read where they lie.
#include "backends/cpu/kernels.h"

namespace dsacore::cpu {
namespace {

constexpr int kTile = 16;
static_assert(kLatent % kTile == 0 && kNope % kTile == 0);

/// `w_uk` is [128, 512], `out` [512, 128]; in tiles, so that both sides stay in the nearest cache.
void transpose_head(const BFloat16* w_uk, int64_t pitch, BFloat16* out) {
  for (int k = 0; k < kNope; k += kTile) {
    for (int n = 0; n < kLatent; n += kTile) {
      for (int j = 0; j < kTile; ++j) {
        for (int i = 0; i < kTile; ++i) out[(n + j) * kNope + k + i] = w_uk[(k + i) * pitch + n + j];
      }
    }
  }
}

}  // namespace

int64_t packed_bytes(const LayerSizes& sizes) {
  return int64_t(sizes.heads) * kLatent * kNope * int64_t(sizeof(BFloat16));
}

void pack(const LayerModel& model, std::byte* packed, Threads& threads) {
  BFloat16* out = reinterpret_cast<BFloat16*>(packed);
  threads.for_each(model.sizes.heads, [&](int64_t head, int) {
    transpose_head(model.kv_b.row(head), model.kv_b.stride(1), out + head * kLatent * kNope);
  });
}

}  // namespace dsacore::cpu
