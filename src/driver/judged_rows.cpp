#include "driver/judged_rows.h"

#include "format/numeric.h"

namespace dsacore {
namespace {

bool finite(const BFloat16* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if ((values[i].bits & 0x7F80) == 0x7F80) return false;
  }
  return true;
}

}  // namespace

JudgedRows judged_rows(const Inputs& inputs) {
  const Step& step = inputs.step;
  const LayerSizes& sizes = inputs.sizes;
  const int64_t rows = step.batch, live = step.projected.extent(0);
  const auto no = [&] { return std::vector<bool>(size_t(rows), false); };
  JudgedRows out{no(), no(), no(), no(), no(), 0};
  std::vector<bool> exposed = no();
  for (int64_t b = 0; b < rows; ++b) {
    const size_t at = size_t(b);
    out.padded[at] = b >= live || step.seq_lens(b / step.q) == 0;
    out.empty[at] = keys_of_row(step, b) == 0;
    if (b >= live) continue;
    const BFloat16* row = step.projected.row(b);
    out.dirty[at] = !finite(row, sizes.width());
    const bool key_dirty = (!finite(row + sizes.kv_a_at(), kQueryRow) && step.slots(b) >= 0) ||
                           (!finite(row + sizes.wk_at(), kIndexDim) && step.index_slots(b) >= 0);
    if (!key_dirty || out.padded[at]) continue;
    for (int64_t later = b; later < (b / step.q + 1) * step.q; ++later) exposed[size_t(later)] = true;
  }
  for (size_t b = 0; b < size_t(rows); ++b) {
    out.stage[b] = !out.padded[b] && !out.dirty[b];
    out.rows[b] = out.stage[b] && !exposed[b];
    out.left_out += !out.padded[b] && !out.rows[b];
  }
  return out;
}

}  // namespace dsacore
