// A prepared layer over a Case through the public interface, with private caches and a poisoned output.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "dsacore/layer.h"
#include "format/numeric.h"
#include "io/generate.h"

namespace dsacore::test {

/// Bytes of a case's caches that a run may change.
struct CaseCaches {
  explicit CaseCaches(const Case& source) : kv(source.kv), index(source.index) {
    const int64_t rows = (source.kv.pages - 1) * source.kv.stride_rows + source.kv.page;
    kv_bytes.assign(source.kv.data, source.kv.data + rows * source.kv.row_bytes);
    index_bytes.assign(source.index.data, source.index.data + source.index.pages * kIndexPage * source.index.row_bytes);
    kv.data = kv_bytes.data();
    index.data = index_bytes.data();
  }
  KvCache kv;
  IndexCache index;
  std::vector<std::byte> kv_bytes;
  std::vector<std::byte> index_bytes;
};

inline int64_t longest_context(const Step& step) {
  int64_t longest = 1;
  for (int64_t r = 0; r < step.seq_lens.extent(0); ++r) longest = std::max<int64_t>(longest, step.seq_lens(r));
  return longest;
}

inline PrepareOptions options_for(const Case& c) {
  PrepareOptions options;
  options.batches = {{c.step.batch, c.step.projected.stride(0)}};
  options.queries = {c.step.q};
  options.max_context = test::longest_context(c.step);
  return options;
}

/// What one run left behind.
struct LayerOutput {
  std::vector<uint16_t> out;
  std::vector<int32_t> tokens, rows, valid;
  std::vector<uint16_t> latent;
  std::vector<float> lse;
  std::vector<std::byte> kv, index;
};

/// A step of the case's first `requests` requests (-1: all).
inline Step first_requests(const Case& c, int64_t requests) {
  Step step = c.step;
  if (requests < 0) return step;
  const int64_t rows = requests * step.q;
  step.projected = step.projected.first(rows);
  step.slots = step.slots.first(rows);
  step.index_slots = step.index_slots.first(rows);
  step.block_table = step.block_table.first(requests);
  if (!step.index_block_table.empty()) step.index_block_table = step.index_block_table.first(requests);
  step.seq_lens = step.seq_lens.first(requests);
  return step;
}

inline LayerOutput run_layer(const Case& c, const ContextOptions& context_options, int64_t requests = -1,
                             std::vector<int> plan_rows = {}) {
  Context context(context_options);
  CaseCaches caches(c);
  PrepareOptions options = options_for(c);
  options.plan_rows = std::move(plan_rows);
  PreparedLayer layer(context, c.config, c.weights, options);
  layer.prepare_cache(caches.kv, caches.index);
  LayerOutput result;
  result.out.assign(size_t(c.step.batch) * size_t(c.sizes.heads) * kValue, 0xFFFF);
  Step step = first_requests(c, requests);
  step.out =
      View<BFloat16, 2>(reinterpret_cast<BFloat16*>(result.out.data()), c.step.batch, int64_t(c.sizes.heads) * kValue);
  const Status status = layer.run(step);
  if (!status.ok()) ADD_FAILURE() << status.error().message();
  const StageViews v = layer.stages();
  const auto copy = [](auto view, auto& to) {
    to.resize(size_t(view.size()));
    std::memcpy(to.data(), view.data(), to.size() * sizeof(to[0]));
  };
  copy(v.topk_tokens, result.tokens);
  copy(v.topk_rows, result.rows);
  copy(v.valid, result.valid);
  copy(v.latent, result.latent);
  copy(v.lse, result.lse);
  result.kv = caches.kv_bytes;
  result.index = caches.index_bytes;
  return result;
}

/// The first place where two vectors differ, or nothing.
template <class T>
::testing::AssertionResult same_bits(const std::vector<T>& a, const std::vector<T>& b, const char* what) {
  if (a.size() != b.size())
    return ::testing::AssertionFailure() << what << ": " << a.size() << " and " << b.size() << " elements";
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::memcmp(&a[i], &b[i], sizeof(T)) != 0) {
      return ::testing::AssertionFailure()
             << what << " differs first at " << i << ": " << ::testing::PrintToString(a[i]) << " and "
             << ::testing::PrintToString(b[i]);
    }
  }
  return ::testing::AssertionSuccess();
}

inline void expect_same_bits(const LayerOutput& a, const LayerOutput& b) {
  EXPECT_TRUE(same_bits(a.tokens, b.tokens, "topk_tokens"));
  EXPECT_TRUE(same_bits(a.rows, b.rows, "topk_rows"));
  EXPECT_TRUE(same_bits(a.valid, b.valid, "valid"));
  EXPECT_TRUE(same_bits(a.latent, b.latent, "latent"));
  EXPECT_TRUE(same_bits(a.lse, b.lse, "lse"));
  EXPECT_TRUE(same_bits(a.out, b.out, "out"));
  EXPECT_TRUE(same_bits(a.kv, b.kv, "kv_cache"));
  EXPECT_TRUE(same_bits(a.index, b.index, "index_cache"));
}

/// ||a - b|| / ||b|| over BF16 codes.
inline double relative_error(const std::vector<uint16_t>& a, const std::vector<uint16_t>& b) {
  double difference = 0;
  double size = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    const double x = to_float(BFloat16{a[i]});
    const double y = to_float(BFloat16{b[i]});
    difference += (x - y) * (x - y);
    size += y * y;
  }
  return size == 0 ? (difference == 0 ? 0 : 1e300) : std::sqrt(difference / size);
}

/// The error that `f` throws; a test failure where it throws none.
template <class F>
Error error_of(F&& f) {
  try {
    f();
  } catch (const Exception& e) {
    return e.error();
  }
  ADD_FAILURE() << "nothing was refused";
  return {};
}

}  // namespace dsacore::test
