// The stages of one step: what goes in and out of each, for every backend. Shapes use spec 1's words; `rows` counts
// live rows (requests given times q). Kernels write nothing but their outputs, and every output element of a live row.
#pragma once

#include <cstdint>

#include "dsacore/ids.h"
#include "dsacore/problem.h"
#include "dsacore/view.h"
#include "format/paging.h"
#include "stages/model.h"

namespace dsacore {

/// Query rows `[rows, heads, 576]`, BF16 or e4m3 by the cache format.
struct QueryRows {
  std::byte* data = nullptr;
  int heads = 0;
  int element = 2;  ///< bytes

  DSACORE_HD std::byte* at(int64_t row, int head) const { return data + ((row * heads + head) * kQueryRow) * element; }
  DSACORE_HD BFloat16* bf16(int64_t row, int head) const { return reinterpret_cast<BFloat16*>(at(row, head)); }
  DSACORE_HD uint8_t* e4m3(int64_t row, int head) const { return reinterpret_cast<uint8_t*>(at(row, head)); }
};

/// Step 1 alone, where the query comes later: bit for bit the `q_c` that it would write.
struct NormArgs {
  const LayerModel* model;
  View<const BFloat16, 2> projected;  ///< [rows, width]
  View<BFloat16, 2> q_c;              ///< out [rows, q_lora]
};

/// Steps 1 to 5: norms, W_QB, W_UK, quantise, MLA cache insert.
struct QueryArgs {
  const LayerModel* model;
  View<const BFloat16, 2> projected;  ///< [rows, width]
  View<const int64_t, 1> slots;       ///< [rows]
  KvCache kv;                         ///< rows with slot >= 0 are written
  View<BFloat16, 2> q_c;              ///< out [rows, q_lora]; in where it is ready
  QueryRows query;                    ///< out
  bool q_c_ready = false;             ///< cuda: `q_c` has been written, before the kernel ahead of the query began
};

/// Steps 6 to 8: index query, head weights, index key insert.
struct IndexProjectionArgs {
  const LayerModel* model;
  View<const BFloat16, 2> projected;   ///< [rows, width]
  View<const BFloat16, 2> q_c;         ///< [rows, q_lora]; cuda's kernel `front` does step 1 itself instead
  View<const int64_t, 1> index_slots;  ///< [rows]
  IndexCache index;                    ///< tokens with index_slot >= 0 are written
  View<uint8_t, 3> index_query;        ///< out [rows, index_heads, 128] e4m3
  View<float, 2> head_weights;         ///< out [rows, index_heads]
  View<BFloat16, 2> q_c_out{};         ///< out [rows, q_lora], of cuda's kernel `front`; empty: not asked for
};

/// A scored token: `key` is the score as an ordered integer (format/score_key.h), larger is better.
struct Candidate {
  uint32_t key;
  int32_t token;  ///< global token id
};

/// Steps 9 and 10 over the tokens that this rank holds.
///
/// At D = 1 writes tokens, rows and valid. At D > 1 a row that sees `n > topk` tokens (global) writes instead its local
/// best `min(topk, local n)` to `candidates`, ascending by token id, then `{0, INT32_MAX}`; a row with `n <= topk` is
/// left to CandidateMerge.
struct IndexerArgs {
  const LayerModel* model;
  int q;
  RankShard shard;
  View<const int32_t, 1> seq_lens;           ///< [requests] global
  View<const int32_t, 2> block_table;        ///< [requests, W], over local indices
  View<const int32_t, 2> index_block_table;  ///< [requests, W'] or empty
  int page;                                  ///< P
  int64_t stride_rows;
  IndexCache index;
  View<const uint8_t, 3> index_query;  ///< [rows, index_heads, 128]
  View<const float, 2> head_weights;   ///< [rows, index_heads]
  View<int32_t, 2> topk_tokens;        ///< out [rows, topk], D = 1
  View<int32_t, 2> topk_rows;          ///< out [rows, topk], D = 1
  View<int32_t, 1> valid;              ///< out [rows], D = 1
  View<Candidate, 2> candidates;       ///< out [rows, topk], D > 1
};

/// Step 2 of spec 7: the global best of all ranks' candidates, and this rank's part of it. Where `n <= topk` every
/// token is selected and the candidates are not read.
struct CandidateMergeArgs {
  const LayerModel* model;
  int q;
  RankShard shard;
  View<const int32_t, 1> seq_lens;     ///< [requests] global
  View<const int32_t, 2> block_table;  ///< [requests, W], over local indices
  int page;
  int64_t stride_rows;
  View<const Candidate, 3> candidates;  ///< [D, rows, topk]
  View<int32_t, 2> topk_tokens;         ///< out [rows, topk] global ids ascending, then -1
  View<int32_t, 1> valid;               ///< out [rows] of topk_tokens
  View<int32_t, 2> local_rows;          ///< out [rows, topk] physical rows of the owned ones, then -1
  View<int32_t, 1> local_valid;         ///< out [rows] of local_rows
};

/// Step 11: attention of every head over the selected cache rows.
struct SparseCoreArgs {
  const LayerModel* model;
  QueryRows query;                   ///< [rows, query.heads, 576]; all ranks' heads under DCP
  View<const int32_t, 2> topk_rows;  ///< [rows, topk] physical rows
  View<const int32_t, 1> valid;      ///< [rows]
  KvCache kv;
  View<BFloat16, 3> latent;   ///< out [rows, query.heads, 512]
  View<float, 2> lse;         ///< out [rows, query.heads] natural log; -inf where valid is 0
  bool leaves_parts = false;  ///< cuda: `latent` and `lse` are left to a value kernel that merges parts
};

/// Step 12 from the latent: `v = latent . W_UV`, and the gate where one is given.
struct ValueArgs {
  const LayerModel* model;
  View<const BFloat16, 3> latent;  ///< [rows, heads', 512]
  View<const BFloat16, 3> w_uv;    ///< [heads', 128, 512]: W_UV transposed; the heads may be all ranks' (`proj`)
  View<const BFloat16, 2> gate;    ///< [rows, heads'*128], or empty: `out` is v itself
  View<BFloat16, 2> out;           ///< out [rows, heads'*128]
  /// cuda: [requests] global lengths; rows of a request of length 0, and rows past the requests, give zeros. Empty, or
  /// the other backends: src/layer/run.cpp writes them.
  View<const int32_t, 1> seq_lens{};
  int q = 1;
  /// cuda: of a kernel that merges parts: what the sparse core was given, and the scratch that it left them in. The
  /// kernel writes `core->latent` and `core->lse`, and does not read `latent`.
  const SparseCoreArgs* core = nullptr;
  std::byte* parts = nullptr;
};

/// The gate of step 12 alone, from merged `v` (`proj` partials).
struct GateArgs {
  View<const BFloat16, 2> v;          ///< [rows, heads*128]
  View<const BFloat16, 2> gate;       ///< [rows, heads*128]
  View<BFloat16, 2> out;              ///< out [rows, heads*128]
  View<const int32_t, 1> seq_lens{};  ///< cuda: as in ValueArgs
  int q = 1;
};

/// Step 4 of spec 7: merges the ranks' partials of this rank's heads by their LSE, in rank order.
struct PartialMergeArgs {
  View<const BFloat16, 4> partials;  ///< [D, rows, heads, width], width 512 (`bf16`) or 128 (`proj`)
  View<const float, 3> partial_lse;  ///< [D, rows, heads]; -inf: no rows, its partial is not read
  View<BFloat16, 3> merged;          ///< out [rows, heads, width]
  View<float, 2> lse;                ///< out [rows, heads]
};

/// Rows past the requests given: no token, no latent, output zero (spec 4, 5). Tensors of all B rows, of which the
/// first `live_rows` are left as they are; an empty view is left out.
struct PadArgs {
  int64_t live_rows;
  View<int32_t, 2> topk_tokens;  ///< -1
  View<int32_t, 2> topk_rows;    ///< -1
  View<int32_t, 1> valid;        ///< 0
  View<BFloat16, 3> latent;      ///< 0
  View<float, 2> lse;            ///< -inf
  View<BFloat16, 2> out;         ///< 0
};

}  // namespace dsacore
