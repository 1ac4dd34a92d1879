// Requests with an index cache whose scores a test sets key by key: only dimension 0 of index head 0 counts.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "reference/fixture.h"

namespace dsacore::test {

/// One indexer call: `seq_lens.size()` requests of `q` rows, each with pages of its own.
class IndexScene {
 public:
  IndexScene(IndexFormat format, int topk, std::vector<int32_t> lengths, int rows_each = 1, RankShard ranks_shard = {})
      : shard(ranks_shard),
        seq_lens(std::move(lengths)),
        requests(int64_t(seq_lens.size())),
        rows(requests * rows_each),
        q(rows_each),
        pages_each(pages_of(most_tokens(), kIndexPage) + 1),
        table(requests, pages_each),
        index_query(rows, 8, kIndexDim),
        head_weights(rows, 8),
        tokens(rows, topk),
        physical(rows, topk),
        valid(rows),
        candidates(rows, topk),
        bytes(size_t(requests * pages_each * kIndexPage * row_bytes(format)), std::byte(0xFF)) {
    layer.model.config.topk = topk;
    layer.model.config.index_format = format;
    index = {bytes.data(), format, requests * pages_each, row_bytes(format)};
    // Pages in an order that is not the tokens': in steps that have no factor in common with their number.
    const int64_t stride = pages_each % 3 == 0 ? pages_each - 1 : 3;
    for (int64_t r = 0; r < requests; ++r) {
      for (int64_t i = 0; i < pages_each; ++i) table(r, i) = int32_t(r * pages_each + (i * stride + 1) % pages_each);
    }
    index_query.fill(0);
    head_weights.fill(0);
    for (int64_t row = 0; row < rows; ++row) {
      index_query(row, 0, 0) = to_e4m3(1.0f);
      head_weights(row, 0) = 1;
    }
  }

  /// The page bytes and place of a request's local token.
  std::byte* page_of(int64_t request, int32_t local, int* offset) {
    const Place place = index_place(table.view().row(request), nullptr, kIndexPage, LocalId(local));
    *offset = place.offset;
    return bytes.data() + int64_t(place.page.value()) * kIndexPage * index.row_bytes;
  }

  /// `fp8` cache: the key's value 0 is `code`, the others zero, so that the token scores `value(code) * scale`.
  void set_key(int64_t request, int32_t local, uint8_t code, float scale = 1) {
    int offset = 0;
    std::byte* page = page_of(request, local, &offset);
    std::memset(page + IndexFp8::value_at(offset), 0, IndexFp8::kValueBytes);
    page[IndexFp8::value_at(offset)] = std::byte(code);
    std::memcpy(page + IndexFp8::scale_at(offset), &scale, sizeof(float));
  }

  IndexerArgs args() {
    return {&layer.model,
            q,
            shard,
            View<const int32_t, 1>(seq_lens.data(), requests),
            table.view(),
            {},
            kIndexPage,
            kIndexPage,
            index,
            index_query.view(),
            head_weights.view(),
            tokens.view(),
            physical.view(),
            valid.view(),
            candidates.view()};
  }

  void run(int threads = 2) {
    run_stage(reference_backend().indexer, args(), shape_of(layer.model, rows, q, shard.ranks, most_tokens()), threads);
  }

  /// The tokens of a row up to the first -1.
  std::vector<int32_t> selected(int64_t row) const {
    std::vector<int32_t> out;
    for (int64_t i = 0; i < tokens.view().extent(1) && tokens(row, i) != -1; ++i) out.push_back(tokens(row, i));
    return out;
  }

  /// Of the longest request, on this rank.
  int64_t most_tokens() const {
    int64_t most = 0;
    for (const int32_t n : seq_lens) most = std::max<int64_t>(most, local_count(shard, n));
    return most;
  }

  TinyLayer layer;
  RankShard shard;
  std::vector<int32_t> seq_lens;
  int64_t requests, rows;
  int q;
  int64_t pages_each;
  Tensor<int32_t, 2> table;
  Tensor<uint8_t, 3> index_query;
  Tensor<float, 2> head_weights;
  Tensor<int32_t, 2> tokens, physical;
  Tensor<int32_t, 1> valid;
  Tensor<Candidate, 2> candidates;
  std::vector<std::byte> bytes;
  IndexCache index;
};

}  // namespace dsacore::test
