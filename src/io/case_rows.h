// The projected rows of a synthetic step, before they are rounded to BF16. Part of generate.cpp.
#pragma once

#include <cstdint>
#include <vector>

#include "dsacore/problem.h"
#include "io/case_keys.h"
#include "io/generate.h"

namespace dsacore {

/// The packed projection rows of a step while they are FP32, and the parts of one.
struct CaseRows {
  std::vector<float> values;
  LayerSizes sizes;

  struct Part {
    float* data;
    int64_t size;
  };
  enum Name { kQA, kKvA, kGate, kWk, kWv, kParts };

  Part part(int64_t row, int name) {
    const int64_t at[] = {0, sizes.kv_a_at(), sizes.gate_at(), sizes.wk_at(), sizes.wv_at(), sizes.width()};
    return {values.data() + row * sizes.width() + at[name], at[name + 1] - at[name]};
  }
  void scale(int64_t row, int name, float by) {
    const Part p = part(row, name);
    for (int64_t i = 0; i < p.size; ++i) p.data[i] *= by;
  }
};

/// All rows of the step. Those of the first `live` requests have the case's adversarial kinds, one kind a row, in turn.
CaseRows make_rows(const CaseOptions& options, const LayerSizes& sizes, const CaseKinds& kinds, const KeySource& source,
                   int live);

}  // namespace dsacore
