// Cases and judgement for the tests of the cpu backend's sparse core: a cache in which only selected rows hold numbers,
// query rows, selections, a run into poisoned memory, and spec 9's bounds.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cpu/guarded.h"
#include "dsacore/formats.h"
#include "format/layouts.h"
#include "plan/registry.h"
#include "stages/stages.h"
#include "support/targets.h"

namespace dsacore {

struct CoreOptions {
  KvFormat format = KvFormat::kFp8DsMla;
  int heads = 12;
  int topk = 2048;
  std::vector<int> valid = {2048};  ///< of each row
  int page = 64;
  int64_t stride_rows = 64;
  double query_magnitude = 1;  ///< 1: logits of about 2 after scaling
  uint64_t seed = 1;
};

/// A step's sparse core, owned. Fields may be changed before a run.
class CoreCase {
 public:
  explicit CoreCase(const CoreOptions& options) : options_(options), random_(options.seed) {
    const int rows = int(options.valid.size());
    const int longest = *std::max_element(options.valid.begin(), options.valid.end());
    const int64_t pages = pages_of(longest + longest / 2 + 64, options.page);  // more than any row selects
    const int64_t cache_rows = (pages - 1) * options.stride_rows + options.page;
    cache_ = std::make_unique<Guarded<std::byte>>(cache_rows * row_bytes(options.format));
    kv = {cache_->data(), options.format, pages, options.page, options.stride_rows, row_bytes(options.format)};

    model.sizes = {.q_lora = 1536, .heads = options.heads, .index_heads = 32};
    model.config.kv_format = options.format;
    model.config.topk = options.topk;
    model.config.softmax_scale = 1 / std::sqrt(192.0);
    if (has_fp8_query(options.format)) model.q_scale = 1 / (model.config.q_scale_inv = 24.0f);
    if (options.format == KvFormat::kFp8) model.k_scale = 1 / (model.config.k_scale_inv = 48.0f);

    valid = options.valid;
    topk_rows.assign(size_t(rows) * size_t(options.topk), -1);
    std::vector<int32_t> tokens(size_t(pages * options.page));
    for (int row = 0; row < rows; ++row) {
      const int32_t count = valid[size_t(row)];
      std::iota(tokens.begin(), tokens.end(), 0);
      std::shuffle(tokens.begin(), tokens.end(), random_);
      std::sort(tokens.begin(), tokens.begin() + count);
      if (row == rows - 1 && count > 0) tokens[size_t(count - 1)] = int32_t(tokens.size() - 1);  // the cache's last row
      for (int32_t t = 0; t < count; ++t) {
        const Place place{PageId(tokens[size_t(t)] / options.page), tokens[size_t(t)] % options.page};
        selected(row)[t] = physical_row(place, options.stride_rows).value();
        encode_random(selected(row)[t]);
      }
    }
    element_ = has_fp8_query(options.format) ? 1 : 2;
    query_ = std::make_unique<Guarded<std::byte>>(int64_t(rows) * options.heads * kQueryRow * element_);
    for (int row = 0; row < rows; ++row) {
      for (int head = 0; head < options.heads; ++head) {
        for (int i = 0; i < kQueryRow; ++i) set_query(row, head, i, float(options.query_magnitude * normal()));
      }
    }
  }

  int rows() const { return int(valid.size()); }
  int heads() const { return options_.heads; }
  int32_t* selected(int row) { return topk_rows.data() + int64_t(row) * options_.topk; }
  std::byte* row(int32_t physical) { return row_at(kv, PhysicalRow(physical)); }
  double normal() { return normal_(random_); }
  std::mt19937_64& random() { return random_; }
  QueryRows query() { return {query_->data(), options_.heads, element_}; }

  /// Sets an element of a query before its quantisation.
  void set_query(int row, int head, int i, float value) {
    if (element_ == 1) {
      query().e4m3(row, head)[i] = to_e4m3(value * model.config.q_scale_inv);
    } else {
      query().bf16(row, head)[i] = to_bf16(value);
    }
  }

  void encode_random(int32_t physical) {
    float c[kLatent];
    BFloat16 pe[kPe];
    for (float& x : c) x = to_float(to_bf16(normal()));
    for (BFloat16& x : pe) x = to_bf16(normal());
    encode_kv(options_.format, c, pe, model.config.k_scale_inv, row(physical));
  }

  bool selects(int row, int32_t physical) {
    return std::binary_search(selected(row), selected(row) + valid[size_t(row)], physical);
  }

  /// Calls `f(row bytes)` for every cache row that a row of the batch selects (perhaps more than once).
  void for_selected(const std::function<void(std::byte*)>& f) {
    for (int b = 0; b < rows(); ++b) {
      for (int t = 0; t < valid[size_t(b)]; ++t) f(row(selected(b)[t]));
    }
  }

  LayerModel model;
  KvCache kv;
  std::vector<int32_t> topk_rows;
  std::vector<int32_t> valid;

 private:
  CoreOptions options_;
  std::mt19937_64 random_;
  std::normal_distribution<double> normal_;
  std::unique_ptr<Guarded<std::byte>> cache_;
  std::unique_ptr<Guarded<std::byte>> query_;
  int element_ = 2;
};

struct CoreResult {
  int rows = 0, heads = 0;
  std::vector<BFloat16> latent;  ///< [rows, heads, 512]
  std::vector<float> lse;        ///< [rows, heads]
};

/// Runs the first kernel of a backend on the first `live` rows (-1: all), outputs and scratch poisoned, and checks that
/// the scratch asked for is enough.
inline CoreResult run_core(CoreCase& c, const Backend& backend, int threads, int live = -1) {
  const int rows = live < 0 ? c.rows() : live;
  CoreResult result{rows, c.heads(),
                    std::vector<BFloat16>(size_t(rows) * size_t(c.heads()) * kLatent, BFloat16{0xFFFF}),
                    std::vector<float>(size_t(rows) * size_t(c.heads()), float_of(0xFFFFFFFFu))};
  const ShapeKey shape{.sizes = c.model.sizes,
                       .kv_format = c.kv.format,
                       .index_format = IndexFormat::kFp8,
                       .topk = c.model.config.topk,
                       .rows = c.rows(),
                       .q = 1,
                       .ranks = 1,
                       .max_context = kMaxContext};
  const Kernel<SparseCoreArgs>& kernel = backend.sparse_core[0];
  EXPECT_TRUE(kernel.accepts(shape).ok);
  const int64_t bytes = kernel.scratch_bytes(shape, threads);
  constexpr int kGuard = 64;
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  std::vector<Line> lines(size_t(bytes + 63) / 64 + 1);
  std::byte* scratch = lines[0].bytes;
  std::memset(scratch, 0xFF, lines.size() * 64);
  Threads team(threads);
  kernel.run({.model = &c.model,
              .query = c.query(),
              .topk_rows = View<const int32_t, 2>(c.topk_rows.data(), rows, c.model.config.topk),
              .valid = View<const int32_t, 1>(c.valid.data(), rows),
              .kv = c.kv,
              .latent = View<BFloat16, 3>(result.latent.data(), rows, c.heads(), kLatent),
              .lse = View<float, 2>(result.lse.data(), rows, c.heads())},
             {.scratch = {scratch, size_t(bytes)}, .threads = &team, .target = backend.target_data});
  for (int i = 0; i < kGuard; ++i) EXPECT_EQ(int(scratch[bytes + i]), 0xFF) << "written past the scratch, byte " << i;
  return result;
}

inline CoreResult run_reference(CoreCase& c) { return run_core(c, reference_backend(), 2); }

/// Where of [rows, heads, 512] an element lies.
inline std::string place_in(const CoreResult& r, size_t at) {
  const size_t head = at / kLatent;
  return "row " + std::to_string(head / size_t(r.heads)) + " head " + std::to_string(head % size_t(r.heads)) +
         " column " + std::to_string(at % kLatent);
}

/// The bounds of spec 9 for `latent` and `lse`; NaN and infinity must be at the same places. Returns e of the latents.
inline double expect_agreement(const CoreResult& got, const CoreResult& want) {
  constexpr double kLatentBound = 4e-3, kLseBound = 2e-3, kRowFactor = 4;
  const size_t row_elements = size_t(want.heads) * kLatent;
  double all_gap = 0, all_norm = 0;
  for (int row = 0; row < want.rows; ++row) {
    double gap = 0, norm = 0;
    for (size_t i = row_elements * size_t(row); i < row_elements * size_t(row + 1); ++i) {
      const double x = double(to_float(got.latent[i])), y = double(to_float(want.latent[i]));
      if (!std::isfinite(x) || !std::isfinite(y)) {
        if (std::isfinite(x) || std::isfinite(y)) {
          ADD_FAILURE() << place_in(want, i) << ": latent " << x << ", must be " << y;
          return HUGE_VAL;
        }
        continue;
      }
      gap += (x - y) * (x - y);
      norm += y * y;
    }
    EXPECT_LE(std::sqrt(gap), kRowFactor * kLatentBound * std::sqrt(norm)) << "row " << row << ": e of latent";
    all_gap += gap;
    all_norm += norm;
  }
  EXPECT_LE(std::sqrt(all_gap), kLatentBound * std::sqrt(all_norm)) << "e of latent";
  for (size_t i = 0; i < want.lse.size(); ++i) {
    const double x = double(got.lse[i]), y = double(want.lse[i]);
    const bool same = std::isfinite(y) ? std::abs(x - y) <= kLseBound : std::isnan(y) ? std::isnan(x) : x == y;
    if (!same) {
      ADD_FAILURE() << place_in(want, i * kLatent) << ": lse " << x << ", must be " << y;
      break;
    }
  }
  return all_norm > 0 ? std::sqrt(all_gap / all_norm) : 0;
}

/// The first `rows` rows of both are equal bit for bit.
inline void expect_same_bits(const CoreResult& got, const CoreResult& want, int rows) {
  for (size_t i = 0; i < size_t(rows) * size_t(want.heads) * kLatent; ++i) {
    if (got.latent[i].bits == want.latent[i].bits) continue;
    ADD_FAILURE() << place_in(want, i) << ": latent bits " << got.latent[i].bits << " and " << want.latent[i].bits;
    break;
  }
  for (size_t i = 0; i < size_t(rows) * size_t(want.heads); ++i) {
    if (bits_of(got.lse[i]) == bits_of(want.lse[i])) continue;
    ADD_FAILURE() << place_in(want, i * kLatent) << ": lse " << got.lse[i] << " and " << want.lse[i];
    break;
  }
}

/// Calls `f(backend)` for every cpu target that this machine runs.
inline void for_cpu_targets(const std::function<void(const Backend&)>& f) {
  ASSERT_FALSE(test::tested_targets().empty());
  for (const std::string_view target : test::tested_targets()) {
    SCOPED_TRACE(target);
    const Backend* backend = cpu_backend(target);
    ASSERT_NE(backend, nullptr);
    ASSERT_EQ(backend->target, target);
    f(*backend);
  }
}

/// Reference and all cpu targets agree.
inline void expect_all_targets_agree(CoreCase& c) {
  const CoreResult want = run_reference(c);
  for_cpu_targets([&](const Backend& backend) { expect_agreement(run_core(c, backend, 2), want); });
}

}  // namespace dsacore
