// Runs the cuda backend's indexer over an IndexerCase, and hands back what it wrote, its ordered keys included.
#pragma once

#include <map>
#include <memory>

#include "backends/cuda/indexer_stages.h"
#include "cpu/indexer_case.h"
#include "cuda/device_stages.h"

namespace dsacore::test {

/// What a run on the device wrote, and the ordered keys of its rows (spec 5, step 10), of which only scored ones count.
struct DeviceSelected {
  Selected selected;
  std::vector<std::vector<uint32_t>> keys;  ///< [rows][n]
  bool scratch_clear = false;               ///< histograms and counts of pages
};

/// A case's inputs and outputs on the device. Scratch is kept between runs, one a kernel.
class DeviceIndexer {
 public:
  DeviceIndexer(const IndexerCase& c, const Placed& placed)
      : case_(c), shape_(shape_of(c, placed.layout.shard)), model_(c.model) {
    Selected host;
    args_ = args_of(c, placed, host);
    args_.model = &model_;
    args_.seq_lens = upload(args_.seq_lens);
    args_.block_table = upload(args_.block_table);
    if (!args_.index_block_table.empty()) args_.index_block_table = upload(args_.index_block_table);
    args_.index.data = upload_bytes(placed.bytes.data(), int64_t(placed.bytes.size()));
    args_.index_query = upload(args_.index_query);
    args_.head_weights = upload(args_.head_weights);
    args_.topk_tokens = upload(args_.topk_tokens);
    args_.topk_rows = upload(args_.topk_rows);
    args_.valid = upload(args_.valid);
  }

  /// The same inputs with another topk of at most the case's.
  void set_topk(int topk) {
    model_.config.topk = shape_.topk = topk;
    args_.topk_tokens = View<int32_t, 2>(args_.topk_tokens.data(), case_.rows(), topk);
    args_.topk_rows = View<int32_t, 2>(args_.topk_rows.data(), case_.rows(), topk);
  }

  DeviceSelected run(std::string_view name) {
    const Kernel<IndexerArgs>& kernel = find(name);
    const std::span<std::byte> scratch = scratch_of(kernel);
    return results_of(scratch, [&] { kernel.run(args_, {scratch, nullptr, nullptr, {}}); });
  }

  /// `fused`, with scores in pieces of so many bytes of keys, which the selection gives up: made once more.
  DeviceSelected run_in_pieces(int64_t piece_bytes) {
    const std::span<std::byte> scratch = scratch_of(find("fused"));
    cuda::IndexerScratch parts(scratch, case_.rows());
    parts.piece_bytes = piece_bytes;
    const Workspace workspace{scratch, nullptr, nullptr, {}};
    return results_of(scratch, [&] {
      cuda::enqueue_scores(args_, parts, true, workspace);
      cuda::enqueue_select(args_, parts, workspace);
      cuda::enqueue_scores(args_, parts, false, workspace);
    });
  }

  const IndexerArgs& args() const { return args_; }
  const ShapeKey& shape() const { return shape_; }

 private:
  template <class Run>
  DeviceSelected results_of(std::span<std::byte> scratch, Run run) {
    for (const auto view : {args_.topk_tokens, args_.topk_rows}) {
      cuda::check(cudaMemset(view.data(), 0xAA, size_t(view.size()) * sizeof(int32_t)), "cudaMemset");
    }
    run();
    DeviceSelected out;
    out.selected.tokens = fetch(args_.topk_tokens);
    out.selected.rows = fetch(args_.topk_rows);
    out.selected.valid = fetch(args_.valid);
    const cuda::IndexerScratch parts(scratch, case_.rows());
    const auto counts = fetch(View<const uint32_t, 1>(parts.histograms, parts.keys - parts.histograms));
    out.scratch_clear = std::all_of(counts.begin(), counts.end(), [](uint32_t count) { return count == 0; });
    for (int row = 0; row < case_.rows(); ++row) {
      out.keys.push_back(fetch(View<const uint32_t, 1>(parts.keys + row * parts.key_pitch, case_.seen(row))));
    }
    return out;
  }

  static const Kernel<IndexerArgs>& find(std::string_view name) {
    for (const Kernel<IndexerArgs>& kernel : cuda::indexer_kernels()) {
      if (kernel.name == name) return kernel;
    }
    throw Exception({ErrorCode::kInternal, "kernel", std::string(name), "is not there"});
  }
  std::span<std::byte> scratch_of(const Kernel<IndexerArgs>& kernel) {
    auto& scratch = scratch_[std::string(kernel.name)];
    if (!scratch) {
      const Verdict verdict = kernel.accepts(shape_);
      if (!verdict.ok) throw Exception({ErrorCode::kRefused, "kernel", std::string(kernel.name), verdict.reason});
      scratch = std::make_unique<DeviceBuffer>(kernel.scratch_bytes(shape_, 1));
      cuda::check(cudaMemset(scratch->data(), 0, size_t(scratch->bytes())), "cudaMemset");
      kernel.prepare(shape_);
    }
    return {scratch->data(), size_t(scratch->bytes())};
  }
  std::byte* upload_bytes(const void* from, int64_t bytes) {
    buffers_.push_back(std::make_unique<DeviceBuffer>(bytes));
    cuda::check(cudaMemcpy(buffers_.back()->data(), from, size_t(bytes), cudaMemcpyHostToDevice), "cudaMemcpy");
    return buffers_.back()->data();
  }
  template <class T, int Rank>
  View<T, Rank> upload(const View<T, Rank>& v) {
    T* data = reinterpret_cast<T*>(upload_bytes(v.data(), v.size() * int64_t(sizeof(T))));
    if constexpr (Rank == 1) return View<T, 1>(data, v.extent(0));
    if constexpr (Rank == 2) return View<T, 2>(data, v.extent(0), v.extent(1));
    if constexpr (Rank == 3) return View<T, 3>(data, v.extent(0), v.extent(1), v.extent(2));
  }

  const IndexerCase& case_;
  ShapeKey shape_;
  LayerModel model_;
  IndexerArgs args_;
  std::vector<std::unique_ptr<DeviceBuffer>> buffers_;
  std::map<std::string, std::unique_ptr<DeviceBuffer>> scratch_;
};

/// The best `topk` of ordered keys, ascending by token id, then -1: larger keys first, among equal ones smaller ids.
inline std::vector<int32_t> best_of_keys(const std::vector<uint32_t>& keys, int topk) {
  const size_t take = std::min(keys.size(), size_t(topk));
  std::vector<uint64_t> order(keys.size());
  for (size_t t = 0; t < keys.size(); ++t) order[t] = uint64_t(~keys[t]) << 32 | t;
  std::nth_element(order.begin(), order.begin() + std::ptrdiff_t(take) - (take > 0), order.end());
  std::vector<int32_t> best;
  for (size_t i = 0; i < take; ++i) best.push_back(int32_t(order[i] & 0xFFFFFFFFu));
  std::sort(best.begin(), best.end());
  best.resize(size_t(topk), -1);
  return best;
}

/// Whether the selection of every row is exactly the best of the device's own keys, and the scratch is as it was.
inline testing::AssertionResult selects_exactly(const IndexerCase& c, int topk, const DeviceSelected& got) {
  if (!got.scratch_clear) return testing::AssertionFailure() << "the scratch's counts are not clear after the run";
  for (int row = 0; row < c.rows(); ++row) {
    const std::vector<uint32_t>& keys = got.keys[size_t(row)];
    std::vector<int32_t> want(size_t(topk), -1);
    if (int64_t(keys.size()) <= topk) {
      std::iota(want.begin(), want.begin() + std::ptrdiff_t(keys.size()), 0);
    } else {
      want = best_of_keys(keys, topk);
    }
    for (int i = 0; i < topk; ++i) {
      const int32_t token = got.selected.tokens[size_t(row * topk + i)];
      if (token != want[size_t(i)]) {
        return testing::AssertionFailure()
               << "topk_tokens[" << row << "][" << i << "] = " << token << ", must be " << want[size_t(i)]
               << " of the device's keys; n " << keys.size() << ", key there "
               << (token >= 0 && size_t(token) < keys.size() ? keys[size_t(token)] : 0) << ", wanted key "
               << (want[size_t(i)] >= 0 ? keys[size_t(want[size_t(i)])] : 0);
      }
    }
  }
  return testing::AssertionSuccess();
}

}  // namespace dsacore::test
