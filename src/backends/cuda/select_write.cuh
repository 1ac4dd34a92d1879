// The selection: from marks to token ids and physical rows, in the order of tokens (select.cu).
#pragma once

#include "backends/cuda/select_part.cuh"

namespace dsacore::cuda::select {

/// Asks for the block table's entries of the CTA's tokens, one for each 64, where their physical rows will be. Before
/// the wait.
__device__ __forceinline__ void copy_entries(const Part& part) {
  const int32_t* table = part.p.block_table.row(part.row / part.p.q);
#pragma unroll 1
  for (int i = int(threadIdx.x); 64 * i < part.held; i += kThreads) {
    async_copy4(shared_address(part.rows + i), table + (part.begin + 64 * i) / part.p.page);
  }
  async_commit();
}

/// Turns the thread's entries into physical rows; a barrier must follow.
__device__ __forceinline__ void rows_of_entries(const Part& part) {
  async_wait<0>();
#pragma unroll 1
  for (int i = int(threadIdx.x); 64 * i < part.count; i += kThreads) {
    const Place place = kv_place(part.rows + i, part.p.page, LocalId((part.begin + 64 * i) % part.p.page));
    part.rows[i] = physical_row(place, part.p.stride_rows).value();
  }
}

/// The lowest `quota` bits of a word.
__device__ __forceinline__ uint32_t lowest_bits(uint32_t word, int quota) {
#pragma unroll 1
  for (int left = __popc(word); left > max(quota, 0); --left) word &= ~(0x80000000u >> __clz(int(word)));
  return word;
}

/// Writes the tokens marked above the range and the first `quota` of the `inside` marked in it, in ascending order, and
/// their physical rows, from place `first` of the row on.
__device__ __forceinline__ void write_marked(const Part& part, int quota, int inside, int first) {
  const int words = (part.count + 31) / 32, each = (words + kThreads - 1) / kThreads;
  const int begin = min(words, int(threadIdx.x) * each), end = min(words, begin + each);
  const bool some = quota > 0 && quota < inside;
  int before = 0;
  if (some) {
    int sum = 0;
#pragma unroll 1
    for (int word = begin; word < end; ++word) sum += __popc(part.marks[word].inside);
    before = sum_before(sum, part.board.totals[1]);
  }
  int selected = 0;
#pragma unroll 1
  for (int word = begin; word < end; ++word) {
    Marks mine = part.marks[word];
    if (quota > 0) {
      const int count = __popc(mine.inside);
      mine.above |= some ? lowest_bits(mine.inside, quota - before) : mine.inside;
      before += count;
      part.marks[word].above = mine.above;
    }
    selected += __popc(mine.above);
  }
  int at = sum_before(selected, part.board.totals[2]);
#pragma unroll 1
  for (int word = begin; word < end; ++word) {
    uint32_t bits = part.marks[word].above;
    int last = at += __popc(bits);
#pragma unroll 1
    for (int next = at - __popc(bits); bits != 0; ++next) {  // from both ends, which do not wait for each other
      const int low = __ffs(int(bits)) - 1, high = 31 - __clz(int(bits));
      part.list[next] = 32 * word + low;
      part.list[--last] = 32 * word + high;
      bits &= ~(1u << low | 1u << high);
    }
  }
  __syncthreads();
  const int lane = int(threadIdx.x) % 32;
  const int all = __reduce_add_sync(~0u, lane < kWarps ? part.board.totals[2][lane] : 0);
  if (all == 0) return;
  int32_t *tokens = part.p.topk_tokens.row(part.row) + first, *rows = part.p.topk_rows.row(part.row) + first;
  constexpr int kMost = kMaxTopk / kThreads;
  int32_t token[kMost], row[kMost];
  for (int i = 0; i < kMost; ++i) token[i] = part.list[min(int(threadIdx.x) + i * kThreads, all - 1)];
  for (int i = 0; i < kMost; ++i) row[i] = part.rows[token[i] / 64] + token[i] % 64;
  for (int i = 0; i < kMost; ++i) {
    const int place = int(threadIdx.x) + i * kThreads;
    if (place >= all) break;
    tokens[place] = part.begin + token[i];
    rows[place] = row[i];
  }
}

}  // namespace dsacore::cuda::select
