// A problem in one line of text, as benchmarks, tests and `inspect --plan` write it:
// "kv=fp8_ds_mla,index=fp8,B=16,q=1,H=12,len=65536".
#pragma once

#include <string>
#include <string_view>

#include "dsacore/problem.h"

namespace dsacore {

struct ProblemShape {
  KvFormat kv_format = KvFormat::kFp8DsMla;
  IndexFormat index_format = IndexFormat::kFp8;
  int rows = 1;  ///< B
  int q = 1;
  int heads = 12;         ///< H of one rank
  int64_t length = 4096;  ///< len: longest context
  int ranks = 1;          ///< dcp
  int interleave = 1;     ///< I
  int topk = kMaxTopk;
  int index_heads = 32;
  int q_lora = 1536;

  std::string text() const;
};

/// Keys in any order, absent ones as above: kv, index, B, q, H, len, dcp, I, topk, index_heads, q_lora. Throws
/// `kRefused` naming the key, its value and what is allowed.
ProblemShape parse_shape(std::string_view text);

}  // namespace dsacore
