// Judges a selection (spec 5, steps 9 and 10) on scores recomputed in FP64 from the index query, head weights and index
// cache that made it: exchanged tokens must lie at the threshold, ties must go to the smaller token id.
#pragma once

#include <vector>

#include "driver/agreement.h"
#include "driver/inputs.h"
#include "threads/threads.h"

namespace dsacore {

struct SelectionInputs {
  const uint8_t* index_query;  ///< [B, index_heads, 128]
  const float* head_weights;   ///< [B, index_heads]
  const int32_t* topk_tokens;  ///< [B, topk]
  IndexCache index;            ///< after the step
};

struct SelectionVerdict {
  AgreementLine line;
  std::vector<int32_t> best;   ///< [B, topk]: the recomputed selection, ascending, then -1
  std::vector<int32_t> valid;  ///< [B]: min(topk, n)
};

/// `judged` [B] says which rows count; `tolerance` is relative to the larger of the threshold and the token's sum of
/// absolute terms (spec 9).
SelectionVerdict judge_selection(const Inputs& inputs, const SelectionInputs& given, const std::vector<bool>& judged,
                                 double tolerance, Threads& threads);

}  // namespace dsacore
