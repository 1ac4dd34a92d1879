#include "io/case_rows.h"

#include <algorithm>
#include <initializer_list>
#include <utility>

#include "format/numeric.h"

namespace dsacore {
namespace {

CaseRows draw_rows(const CaseOptions& o, const LayerSizes& sizes, const KeySource& source) {
  CaseRows rows{std::vector<float>(size_t(o.batch * sizes.width())), sizes};
  Rng rng(part_seed(o.seed, CasePart::kRows));
  std::vector<int64_t> outliers(size_t(std::max(1, o.q_lora / 256)));
  for (int64_t& channel : outliers) channel = rng.below(o.q_lora);
  for (int64_t b = 0; b < o.batch; ++b) {
    Noise noise(part_seed(o.seed, CasePart::kRows, 1, uint64_t(b)));
    const CaseRows::Part q_a = rows.part(b, CaseRows::kQA);
    noise.heavy(q_a.data, q_a.size);
    for (const int64_t channel : outliers) q_a.data[channel] *= 8;
    float inputs[KeySource::kInputs];
    source.draw(noise, int(rng.below(KeySource::kCentres)), inputs);
    std::copy_n(inputs, kQueryRow, rows.part(b, CaseRows::kKvA).data);
    std::copy_n(inputs + kQueryRow, kIndexDim, rows.part(b, CaseRows::kWk).data);
    const CaseRows::Part gate = rows.part(b, CaseRows::kGate);
    noise.normal(gate.data, gate.size);
    rows.scale(b, CaseRows::kGate, 2.0f);
    const CaseRows::Part wv = rows.part(b, CaseRows::kWv);
    noise.heavy(wv.data, wv.size);
    for (int64_t i = 0; i < wv.size; ++i) wv.data[i] += 0.3f;
  }
  return rows;
}

enum class RowAct { kLarge, kSmall, kZero, kZeroQ, kSubnormal, kNegzero, kPlain };

void spoil_row(CaseRows& rows, int64_t b, RowAct act, Rng& rng) {
  const auto scale = [&](std::initializer_list<std::pair<int, float>> parts) {
    for (const auto& [name, by] : parts) rows.scale(b, name, by);
  };
  switch (act) {
    case RowAct::kLarge:
      scale({{CaseRows::kQA, 1e4f},
             {CaseRows::kKvA, 1e4f},
             {CaseRows::kWk, 1e4f},
             {CaseRows::kWv, 1e3f},
             {CaseRows::kGate, 60.0f}});
      // The position part stays of ordinary size: it goes into the cache without a norm.
      for (int i = kLatent; i < kQueryRow; ++i) rows.part(b, CaseRows::kKvA).data[i] *= 3e-4f;
      break;
    case RowAct::kSmall:
      for (int name = 0; name < CaseRows::kParts; ++name) rows.scale(b, name, 1e-7f);
      break;
    case RowAct::kZero:
      for (int name = 0; name < CaseRows::kParts; ++name) {
        const CaseRows::Part p = rows.part(b, name);
        std::fill_n(p.data, p.size, 0.0f);
      }
      break;
    case RowAct::kZeroQ: {
      const CaseRows::Part q_a = rows.part(b, CaseRows::kQA);
      std::fill_n(q_a.data, q_a.size, 0.0f);
      break;
    }
    case RowAct::kSubnormal: scale({{CaseRows::kQA, 3e-39f}, {CaseRows::kKvA, 3e-39f}, {CaseRows::kWk, 3e-39f}}); break;
    case RowAct::kNegzero:
      for (int name = 0; name < CaseRows::kParts; ++name) {
        const CaseRows::Part p = rows.part(b, name);
        for (int64_t i = 0; i < p.size; ++i) p.data[i] = rng.chance(0.1f) ? -0.0f : p.data[i];
      }
      break;
    case RowAct::kPlain: break;
  }
}

/// Adversarial inputs, one kind a row, in turn over the rows of real requests.
void spoil_rows(CaseRows& rows, const CaseOptions& o, const CaseKinds& kinds, int live) {
  std::vector<RowAct> acts;
  if (kinds.magnitude) acts.push_back(RowAct::kLarge);
  if (kinds.magnitude) acts.push_back(RowAct::kSmall);
  if (kinds.zero) acts.push_back(RowAct::kZero);
  if (kinds.subnormal) acts.push_back(RowAct::kSubnormal);
  if (kinds.zero) acts.push_back(RowAct::kZeroQ);
  if (kinds.negzero) acts.push_back(RowAct::kNegzero);
  acts.push_back(RowAct::kPlain);

  // NaN and infinity go into the last row of a request, whose key no other row sees.
  const int64_t nan_row = kinds.nan && live >= 2 ? int64_t(live) * o.q - 1 : -1;
  const int64_t inf_row = kinds.inf && live >= 3 ? int64_t(live - 1) * o.q - 1 : -1;
  Rng rng(part_seed(o.seed, CasePart::kRows, 2));
  size_t turn = 0;
  for (int64_t b = 0; b < int64_t(live) * o.q; ++b) {
    if (b == nan_row || b == inf_row) {
      const CaseRows::Part p = rows.part(b, int(rng.below(CaseRows::kParts)));
      p.data[rng.below(p.size)] = float_of(b == nan_row ? 0x7FC00000u : 0x7F800000u);
      continue;
    }
    spoil_row(rows, b, acts[turn++ % acts.size()], rng);
    if (kinds.ties && b % 3 == 0) {
      const CaseRows::Part wv = rows.part(b, CaseRows::kWv);
      for (int64_t i = 0; i < wv.size; ++i) wv.data[i] = magnitude(wv.data[i]);
    }
  }
}

}  // namespace

CaseRows make_rows(const CaseOptions& options, const LayerSizes& sizes, const CaseKinds& kinds, const KeySource& source,
                   int live) {
  CaseRows rows = draw_rows(options, sizes, source);
  if (kinds.any()) spoil_rows(rows, options, kinds, live);
  return rows;
}

}  // namespace dsacore
