// Synthetic layers and steps from a seed, in memory: what `dsacore generate` writes to files and what tests run on.
// Options have the names and meanings of the oracle's make_case.py; the bytes differ from its.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "dsacore/problem.h"

namespace dsacore {

enum class SlotsKind : uint8_t { kOwned, kNegative, kMixed };

struct CaseOptions {
  uint64_t seed = 0;
  int heads = 12;
  int batch = 8;  ///< rows B, padded requests included
  int q = 1;
  std::string context = "1-4096";  ///< N, A,B,C (cycled), or LO-HI (log-uniform, both ends used)
  KvFormat kv_format = KvFormat::kFp8DsMla;
  IndexFormat index_format = IndexFormat::kFp8;
  int page = 64;
  int64_t stride_rows = 0;   ///< 0: page; above page the cache is flat with foreign rows (0xFF) between pages
  bool index_table = false;  ///< an index block table of its own
  int topk = 2048;
  int index_heads = 32;
  int q_lora = 1536;
  int pitch_pad = 0;     ///< columns after the projected row, all NaN
  int pad_requests = 0;  ///< how many of the requests, the last ones, are padding
  SlotsKind slots = SlotsKind::kOwned;
  int spare_pages = 2;
  bool k_norm_bf16 = false;
  bool no_k_bias = false;
  /// Of ties, equal, magnitude, subnormal, zero, negzero, nan, inf; or {"all"}.
  std::vector<std::string> adversarial;
};

/// A layer and a step that own their bytes. Views stay valid for the object's life, also when it is moved.
class Case {
 public:
  LayerConfig config;
  LayerSizes sizes;
  LayerWeights weights;
  Step step;  ///< `out` is empty; `batch` = B; every request of the batch is given, padded ones with seq_len 0
  KvCache kv;
  IndexCache index;

  /// Storage behind the views, in the order it was made.
  std::vector<std::unique_ptr<std::byte[]>> storage;
};

/// Throws `Exception` (kRefused) naming the option. Same options, same bytes, on every machine.
Case make_case(const CaseOptions& options);

/// The same but for the bytes of the caches, which are described and not made: `data` is null.
Case make_case_without_caches(const CaseOptions& options);

}  // namespace dsacore
