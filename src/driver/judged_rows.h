// Which rows of a step a comparison judges (spec 9, 10): a NaN or infinity in a row's inputs harms that row, and rows
// of its request that see the key it wrote.
#pragma once

#include <cstdint>
#include <vector>

#include "driver/inputs.h"

namespace dsacore {

struct JudgedRows {
  std::vector<bool> dirty;   ///< [B] a NaN or infinity in the row's own inputs
  std::vector<bool> empty;   ///< [B] sees no key
  std::vector<bool> padded;  ///< [B] of a request with seq_len 0, or of none
  std::vector<bool> stage;   ///< [B] judged in the query stage: live and not dirty
  std::vector<bool> rows;    ///< [B] judged from the selection on: also sees no dirty key
  int64_t left_out = 0;      ///< live rows not judged
};

JudgedRows judged_rows(const Inputs& inputs);

}  // namespace dsacore
