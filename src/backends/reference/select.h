// Step 10 of spec.md on scored tokens: the order of candidates, and how a selection is written.
#pragma once

#include <algorithm>
#include <span>

#include "stages/stages.h"

namespace dsacore::reference {

/// The larger score first; among equal scores the smaller token id.
inline bool better(const Candidate& a, const Candidate& b) {
  return a.key != b.key ? a.key > b.key : a.token < b.token;
}

/// The best `count` of `candidates`, in ascending token id. Reorders `candidates`; `count` is at most their number.
inline std::span<const Candidate> select_best(std::span<Candidate> candidates, int64_t count) {
  const auto begin = candidates.begin();
  std::nth_element(begin, begin + count, candidates.end(), better);
  std::sort(begin, begin + count, [](const Candidate& a, const Candidate& b) { return a.token < b.token; });
  return candidates.first(size_t(count));
}

/// Writes -1 to `out[from..count-1]`.
inline void fill_rest(int32_t* out, int64_t from, int64_t count) { std::fill(out + from, out + count, -1); }

}  // namespace dsacore::reference
