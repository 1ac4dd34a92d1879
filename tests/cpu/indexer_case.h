// Cases and judgement for the tests of the cpu backend's indexer and candidate merge: requests whose index keys are
// kept apart from any cache, so that the same keys can be laid out in other pages and on other ranks; scores in FP64;
// spec 9's bound.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "format/layouts.h"
#include "format/paging.h"
#include "format/score_key.h"
#include "plan/registry.h"
#include "stages/stages.h"

namespace dsacore::test {

enum class KeyKind {
  kNormal,  ///< normal, encoded as the index projection does
  kBytes,   ///< any code but NaN, scales over many binades, for `fp8` no powers of two
  kTies,    ///< seven different keys
  kNear,    ///< one key, at most one code off
  kEqual,   ///< one key
  kZero,
  kSomeNan,  ///< a third of the keys hold a NaN, in a code or in a scale
  kAllNan,
  kNegative,  ///< no positive dot product, and zeros of both signs
  kRising,    ///< scores mostly rise with the token id
};

struct IndexerOptions {
  IndexFormat format = IndexFormat::kFp8;
  int heads = 32;
  int q = 1;
  int topk = 2048;
  std::vector<int> lengths = {5000};  ///< seq_len of each request
  KeyKind kind = KeyKind::kNormal;
  uint64_t seed = 1;
};

/// How keys are laid out.
struct Layout {
  int page = 64;
  int64_t stride_rows = 64;
  bool index_table = false;
  RankShard shard = {};
  uint64_t seed = 1;  ///< of the order of the pages
};

constexpr std::byte kUnused{0xFF};
constexpr int32_t kNoPage = INT32_MAX;

/// One rank's caches of a case.
struct Placed {
  Layout layout;
  std::vector<std::byte> bytes;
  std::vector<int32_t> block_table, index_table;
  int64_t width = 0, index_width = 0;
  int64_t pages = 0;
};

/// What a run wrote.
struct Selected {
  std::vector<int32_t> tokens, rows, valid;
  std::vector<Candidate> candidates;
  bool operator==(const Selected& other) const {
    return tokens == other.tokens && rows == other.rows && valid == other.valid &&
           candidates.size() == other.candidates.size() &&
           (candidates.empty() ||
            std::memcmp(candidates.data(), other.candidates.data(), candidates.size() * sizeof(Candidate)) == 0);
  }
};

/// A score and the sum of its terms' magnitudes, in FP64.
struct Score {
  double value, size;
};

class IndexerCase {
 public:
  explicit IndexerCase(const IndexerOptions& chosen) : options(chosen), random_(chosen.seed) {
    model.sizes = {.q_lora = 1536, .heads = 12, .index_heads = options.heads};
    model.config.index_format = options.format;
    model.config.topk = options.topk;
    const int rows = int(options.lengths.size()) * options.q;
    std::normal_distribution<float> normal;
    for (int i = 0; i < rows * options.heads * kIndexDim; ++i) queries.push_back(to_e4m3(normal(random_) * 60));
    for (int i = 0; i < rows * options.heads; ++i) weights.push_back(normal(random_) * 0.01f + 0.004f);
    if (options.kind == KeyKind::kNegative) make_negative();
    for (const int length : options.lengths) keys.push_back(make_keys(length));
  }

  int requests() const { return int(options.lengths.size()); }
  int rows() const { return requests() * options.q; }
  int64_t seen(int row) const {
    return keys_seen(options.lengths[size_t(row / options.q)], options.q, row % options.q);
  }
  int64_t row_bytes() const { return dsacore::row_bytes(options.format); }
  int64_t value_bytes() const {
    return with_layout(options.format, [](auto layout) { return layout.kValueBytes; });
  }

  IndexerOptions options;
  LayerModel model;
  std::vector<uint8_t> queries;              ///< [rows, heads, 128]
  std::vector<float> weights;                ///< [rows, heads]
  std::vector<std::vector<std::byte>> keys;  ///< of each request [tokens][value bytes, then scale bytes]

 private:
  void make_negative() {
    for (uint8_t& code : queries) code &= 0x7F;
    for (float& weight : weights) weight = -std::abs(weight);
  }

  std::vector<std::byte> make_keys(int length) {
    std::vector<std::byte> all(size_t(length) * size_t(row_bytes()));
    std::vector<std::byte> page(size_t(kIndexPage * row_bytes()));
    std::vector<std::byte> prototype(static_cast<size_t>(row_bytes()));
    for (int t = 0; t < length; ++t) {
      std::byte* key = all.data() + t * row_bytes();
      make_key(t, page.data(), key);
      if (options.kind == KeyKind::kTies && t >= 7)
        std::memcpy(key, all.data() + int64_t(random_() % 7) * row_bytes(), prototype.size());
      if (options.kind == KeyKind::kEqual || options.kind == KeyKind::kNear)
        std::memcpy(key, all.data(), prototype.size());
      if (options.kind == KeyKind::kNear && t > 0) key[random_() % uint64_t(value_bytes())] ^= std::byte(1);
      if (options.kind == KeyKind::kAllNan || (options.kind == KeyKind::kSomeNan && random_() % 3 == 0)) spoil(key);
    }
    return all;
  }

  void make_key(int token, std::byte* page, std::byte* key) {
    std::normal_distribution<float> normal;
    float values[kIndexDim];
    const float size = options.kind == KeyKind::kRising ? 1 + float(token) * 0.01f : std::exp(0.3f * normal(random_));
    for (float& x : values) {
      x = options.kind == KeyKind::kZero ? 0.0f : to_float(to_bf16(normal(random_) * size));
      if (options.kind == KeyKind::kNegative) x = random_() % 4 == 0 ? 0.0f : -std::abs(x);
    }
    if (options.kind == KeyKind::kNegative && random_() % 2 == 0)
      std::fill_n(values, kIndexDim, random_() % 2 == 0 ? 0.0f : -0.0f);
    encode_index(options.format, values, 0, page);
    std::memcpy(key, page, size_t(value_bytes()));
    const int64_t scales_at = kIndexPage * value_bytes();
    std::memcpy(key + value_bytes(), page + scales_at, size_t(row_bytes() - value_bytes()));
    if (options.kind == KeyKind::kBytes) randomise(key);
  }

  void randomise(std::byte* key) {
    for (int64_t i = 0; i < value_bytes(); ++i) {
      key[i] = std::byte(random_());
      if (options.format == IndexFormat::kFp8 && (key[i] & std::byte(0x7F)) == std::byte(0x7F)) key[i] ^= std::byte(1);
    }
    if (options.format == IndexFormat::kFp8) {
      const float scale = std::exp(float(random_() % 1000) * 0.02f - 10.0f);
      std::memcpy(key + value_bytes(), &scale, sizeof(scale));
    } else {
      const int around = 100 + int(random_() % 50);
      for (int b = 0; b < IndexMxfp4::kBlocks; ++b) key[value_bytes() + b] = std::byte(around + int(random_() % 8));
    }
  }

  /// Puts a NaN into a key.
  void spoil(std::byte* key) {
    if (options.format == IndexFormat::kFp8) {
      key[random_() % uint64_t(value_bytes())] = random_() % 2 == 0 ? std::byte(0x7F) : std::byte(0xFF);
    } else {
      key[value_bytes() + int64_t(random_() % IndexMxfp4::kBlocks)] = std::byte(0xFF);
      if (random_() % 2 == 0) std::memset(key, 0, size_t(value_bytes()));
    }
  }

  std::mt19937_64 random_;
};

/// Lays the tokens of a rank out in a cache whose pages are in random order and whose other bytes are 0xFF.
inline Placed place(const IndexerCase& c, const Layout& layout) {
  Placed placed{.layout = layout, .bytes = {}, .block_table = {}, .index_table = {}};
  int64_t kv_pages = 1, index_pages = 1;
  for (const int length : c.options.lengths) {
    const int64_t held = local_count(layout.shard, length);
    kv_pages += pages_of(held, layout.page);
    index_pages += pages_of(held, kIndexPage);
    placed.width = std::max(placed.width, pages_of(held, layout.page) + 1);
    placed.index_width = std::max(placed.index_width, pages_of(held, kIndexPage) + 1);
  }
  placed.pages = layout.index_table ? index_pages : kv_pages * (layout.page / kIndexPage);
  placed.bytes.assign(size_t(placed.pages * kIndexPage * c.row_bytes()), kUnused);
  std::mt19937_64 random(layout.seed);
  const auto shuffled = [&](int64_t n) {
    std::vector<int32_t> ids(static_cast<size_t>(n));
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), random);
    return ids;
  };
  std::vector<int32_t> kv_ids = shuffled(kv_pages), index_ids = shuffled(index_pages);
  placed.block_table.assign(size_t(c.requests() * placed.width), kNoPage);
  if (layout.index_table) placed.index_table.assign(size_t(c.requests() * placed.index_width), kNoPage);
  for (int r = 0; r < c.requests(); ++r) {
    const int64_t held = local_count(layout.shard, c.options.lengths[size_t(r)]);
    int32_t* table = placed.block_table.data() + r * placed.width;
    int32_t* index_table = layout.index_table ? placed.index_table.data() + r * placed.index_width : nullptr;
    for (int64_t p = 0; p < pages_of(held, layout.page); ++p) table[p] = kv_ids.back(), kv_ids.pop_back();
    for (int64_t p = 0; index_table != nullptr && p < pages_of(held, kIndexPage); ++p) {
      index_table[p] = index_ids.back();
      index_ids.pop_back();
    }
    for (int64_t t = 0; t < held; ++t) {
      const LocalId local{int32_t(t)};
      const Place at = index_place(table, index_table, layout.page, local);
      std::byte* page = placed.bytes.data() + int64_t(at.page.value()) * kIndexPage * c.row_bytes();
      const std::byte* key = c.keys[size_t(r)].data() + int64_t(global_of(layout.shard, local).value()) * c.row_bytes();
      const int64_t scale_bytes = c.row_bytes() - c.value_bytes();
      std::memcpy(page + at.offset * c.value_bytes(), key, size_t(c.value_bytes()));
      std::memcpy(page + kIndexPage * c.value_bytes() + at.offset * scale_bytes, key + c.value_bytes(),
                  size_t(scale_bytes));
    }
  }
  return placed;
}

/// 64-byte aligned bytes, poisoned, followed by a guard that nothing may touch.
class Scratch {
 public:
  explicit Scratch(int64_t bytes) : bytes_(bytes), storage_(size_t(bytes) + 64 + kGuard, std::byte(0xFF)) {
    data_ = storage_.data() + (64 - reinterpret_cast<uintptr_t>(storage_.data()) % 64) % 64;
  }
  std::span<std::byte> span() const { return {data_, size_t(bytes_)}; }
  bool guard_intact() const {
    return std::all_of(data_ + bytes_, data_ + bytes_ + kGuard, [](std::byte b) { return b == std::byte(0xFF); });
  }

 private:
  static constexpr int kGuard = 1024;
  int64_t bytes_;
  std::vector<std::byte> storage_;
  std::byte* data_;
};

inline ShapeKey shape_of(const IndexerCase& c, const RankShard& shard) {
  int64_t longest = 1;
  for (const int length : c.options.lengths) longest = std::max(longest, local_count(shard, length));
  return {c.model.sizes, KvFormat::kFp8DsMla, c.options.format, c.options.topk,
          c.rows(),      c.options.q,         shard.ranks,      longest};
}

/// Runs a stage's first kernel in exactly the scratch that it asks for.
template <class Args>
void run_kernel(const Backend& backend, std::span<const Kernel<Args>> kernels, const ShapeKey& shape, const Args& args,
                int thread_count) {
  ASSERT_FALSE(kernels.empty());
  ASSERT_TRUE(kernels[0].accepts(shape).ok);
  Threads threads(thread_count);
  const Scratch scratch(kernels[0].scratch_bytes(shape, thread_count));
  kernels[0].run(args, {scratch.span(), &threads, backend.target_data});
  EXPECT_TRUE(scratch.guard_intact()) << backend.target << ": wrote past its scratch";
}

inline IndexerArgs args_of(const IndexerCase& c, const Placed& placed, Selected& out) {
  const int topk = c.options.topk, rows = c.rows();
  const size_t count = size_t(rows) * size_t(topk);
  const bool alone = placed.layout.shard.ranks == 1;
  constexpr int32_t kPoisoned = -1431655766;
  if (alone) {
    out.tokens.assign(count, kPoisoned);
    out.rows.assign(count, kPoisoned);
    out.valid.assign(size_t(rows), kPoisoned);
  } else {
    out.candidates.assign(count, {0xAAAAAAAAu, kPoisoned});
  }
  const IndexCache cache{const_cast<std::byte*>(placed.bytes.data()), c.options.format, placed.pages,
                         int(c.row_bytes())};
  IndexerArgs args{.model = &c.model,
                   .q = c.options.q,
                   .shard = placed.layout.shard,
                   .seq_lens = View<const int32_t, 1>(c.options.lengths.data(), c.requests()),
                   .block_table = View<const int32_t, 2>(placed.block_table.data(), c.requests(), placed.width),
                   .index_block_table = {},
                   .page = placed.layout.page,
                   .stride_rows = placed.layout.stride_rows,
                   .index = cache,
                   .index_query = View<const uint8_t, 3>(c.queries.data(), rows, c.options.heads, kIndexDim),
                   .head_weights = View<const float, 2>(c.weights.data(), rows, c.options.heads),
                   .topk_tokens = View<int32_t, 2>(out.tokens.data(), rows, topk),
                   .topk_rows = View<int32_t, 2>(out.rows.data(), rows, topk),
                   .valid = View<int32_t, 1>(out.valid.data(), rows),
                   .candidates = View<Candidate, 2>(out.candidates.data(), rows, topk)};
  if (placed.layout.index_table) {
    args.index_block_table = View<const int32_t, 2>(placed.index_table.data(), c.requests(), placed.index_width);
  }
  return args;
}

inline Selected run_indexer(const Backend& backend, const IndexerCase& c, const Placed& placed, int threads = 2) {
  Selected out;
  const IndexerArgs args = args_of(c, placed, out);
  run_kernel(backend, backend.indexer, shape_of(c, placed.layout.shard), args, threads);
  return out;
}

// ---- scores ----

/// Values of a key, with the block scales of MXFP4, and the key's own scale.
inline double decode_key(const IndexerCase& c, const std::byte* key, double (&values)[kIndexDim]) {
  if (c.options.format == IndexFormat::kFp8) {
    for (int i = 0; i < kIndexDim; ++i) values[i] = double(e4m3_to_float(uint8_t(key[i])));
    float scale;
    std::memcpy(&scale, key + kIndexDim, sizeof(scale));
    return double(scale);
  }
  for (int i = 0; i < kIndexDim; ++i) {
    const int pair = int(key[i / 2]);
    const double scale = double(ue8m0_to_float(uint8_t(key[kIndexDim / 2 + i / IndexMxfp4::kBlock])));
    values[i] = scale * double(e2m1_to_float(uint8_t(i % 2 == 0 ? pair & 15 : pair >> 4)));
  }
  return 1;
}

/// Step 9 in FP64 for all tokens that a row sees.
inline std::vector<Score> scores_of(const IndexerCase& c, int row) {
  const int heads = c.options.heads;
  std::vector<double> query(size_t(kIndexDim * heads)), dots(static_cast<size_t>(heads));
  for (int h = 0; h < heads; ++h) {
    for (int i = 0; i < kIndexDim; ++i) {
      query[size_t(i * heads + h)] = double(e4m3_to_float(c.queries[size_t((row * heads + h) * kIndexDim + i)]));
    }
  }
  std::vector<Score> scores(size_t(c.seen(row)));
  for (size_t t = 0; t < scores.size(); ++t) {
    double key[kIndexDim];
    const double scale = decode_key(c, c.keys[size_t(row / c.options.q)].data() + int64_t(t) * c.row_bytes(), key);
    std::fill(dots.begin(), dots.end(), 0.0);
    for (int i = 0; i < kIndexDim; ++i) {
      for (int h = 0; h < heads; ++h) dots[size_t(h)] += query[size_t(i * heads + h)] * key[i];
    }
    Score score{0, 0};
    for (int h = 0; h < heads; ++h) {
      const double term = double(c.weights[size_t(row * heads + h)]) * (dots[size_t(h)] <= 0 ? 0.0 : dots[size_t(h)]);
      score.value += term;
      score.size += std::abs(term);
    }
    scores[t] = {score.value * scale, score.size * std::abs(scale)};
  }
  return scores;
}

/// The score whose key this is; NaN for key 0.
inline double score_of_key(uint32_t key) {
  if (key == kNanScoreKey) return std::nan("");
  return double(float_of(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key));
}

// ---- judgement ----

constexpr double kScoreBound = 1e-5;

/// Judges the tokens of a row as the oracle's check.py does: an exchanged token's score lies within `bound` of the
/// threshold, relative to the larger of it and the token's magnitudes; of tokens with equal bytes the earlier ones are
/// selected.
inline testing::AssertionResult judge_tokens(const IndexerCase& c, int row, std::span<const int32_t> got,
                                             const std::vector<Score>& scores, double bound = kScoreBound) {
  const int64_t n = c.seen(row), valid = std::min<int64_t>(n, c.options.topk);
  const auto fail = [&] { return testing::AssertionFailure() << "row " << row << ", n " << n << ": "; };
  for (int64_t i = 0; i < int64_t(got.size()); ++i) {
    const int32_t token = got[size_t(i)];
    if (i >= valid ? token != -1 : token < (i == 0 ? 0 : got[size_t(i - 1)] + 1) || token >= n) {
      return fail() << "topk_tokens[" << i << "] = " << token << ", valid " << valid;
    }
  }
  if (n <= valid) return testing::AssertionSuccess();
  std::vector<int32_t> order(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  const auto value = [&](int32_t t) {
    return std::isnan(scores[size_t(t)].value) ? -INFINITY : scores[size_t(t)].value;
  };
  const auto nan = [&](int32_t t) { return std::isnan(scores[size_t(t)].value); };
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return nan(a) != nan(b) ? nan(b) : value(a) > value(b); });
  const double threshold = value(order[size_t(valid - 1)]);
  std::vector<bool> best(static_cast<size_t>(n)), taken(static_cast<size_t>(n));
  for (int64_t i = 0; i < valid; ++i) best[size_t(order[size_t(i)])] = taken[size_t(got[size_t(i)])] = true;
  for (int32_t t = 0; t < n; ++t) {
    if (best[size_t(t)] == taken[size_t(t)]) continue;
    const double distance = std::abs(value(t) - threshold);
    if (value(t) != threshold && !(distance <= bound * std::max(std::abs(threshold), scores[size_t(t)].size))) {
      return fail() << "token " << t << " is " << (taken[size_t(t)] ? "" : "not ") << "selected: score "
                    << scores[size_t(t)].value << ", threshold " << threshold << ", magnitudes "
                    << scores[size_t(t)].size;
    }
  }
  // Ties: by their bytes, or by having no term at all. A selected token must not follow an equal one that is not
  // selected.
  std::vector<std::pair<std::string, int32_t>> by_bytes;
  for (int32_t t = 0; t < n; ++t) {
    const auto* key = reinterpret_cast<const char*>(c.keys[size_t(row / c.options.q)].data() + t * c.row_bytes());
    by_bytes.emplace_back(scores[size_t(t)].size == 0 ? ""
                          : nan(t)                    ? "nan"
                                                      : std::string(key, size_t(c.row_bytes())),
                          t);
  }
  std::sort(by_bytes.begin(), by_bytes.end());
  for (size_t i = 1; i < by_bytes.size(); ++i) {
    const int32_t before = by_bytes[i - 1].second, after = by_bytes[i].second;
    if (by_bytes[i - 1].first == by_bytes[i].first && taken[size_t(after)] && !taken[size_t(before)]) {
      return fail() << "token " << after << " is selected and " << before << " with an equal key is not";
    }
  }
  return testing::AssertionSuccess();
}

/// Judges everything that a run at D = 1 wrote. `scores[row]` as scores_of; only read where n > topk.
inline testing::AssertionResult judge(const IndexerCase& c, const Placed& placed, const Selected& got,
                                      const std::vector<std::vector<Score>>& scores, double bound = kScoreBound) {
  const int topk = c.options.topk;
  for (int row = 0; row < c.rows(); ++row) {
    const int64_t n = c.seen(row), valid = std::min<int64_t>(n, topk);
    if (got.valid[size_t(row)] != valid) {
      return testing::AssertionFailure() << "row " << row << ": valid " << got.valid[size_t(row)] << ", must be "
                                         << valid;
    }
    const std::span<const int32_t> tokens(got.tokens.data() + row * topk, size_t(topk));
    if (auto result = judge_tokens(c, row, tokens, scores[size_t(row)], bound); !result) return result;
    const int32_t* table = placed.block_table.data() + row / c.options.q * placed.width;
    for (int i = 0; i < topk; ++i) {
      const int32_t token = tokens[size_t(i)];
      const int64_t want =
          i >= valid ? -1 : table[token / placed.layout.page] * placed.layout.stride_rows + token % placed.layout.page;
      if (got.rows[size_t(row * topk + i)] != want) {
        return testing::AssertionFailure()
               << "topk_rows[" << row << "][" << i << "] = " << got.rows[size_t(row * topk + i)] << ", must be " << want
               << " (token " << token << ")";
      }
    }
  }
  return testing::AssertionSuccess();
}

inline std::vector<std::vector<Score>> all_scores(const IndexerCase& c) {
  std::vector<std::vector<Score>> scores(static_cast<size_t>(c.rows()));
  for (int row = 0; row < c.rows(); ++row) {
    if (c.seen(row) > c.options.topk) scores[size_t(row)] = scores_of(c, row);
  }
  return scores;
}

/// Index of the first element that differs, for messages.
template <class T>
std::string first_difference(const std::vector<T>& a, const std::vector<T>& b, int width) {
  std::ostringstream text;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    if (a[i] == b[i]) continue;
    text << "[" << i / size_t(width) << "][" << i % size_t(width) << "]: " << a[i] << " and " << b[i];
    return text.str();
  }
  return a.size() == b.size() ? "none" : "sizes differ";
}

// ---- decoding: keys of every code ----

/// One request of `keys` [tokens, row bytes] whose score is value `place` of the key, times its scale: relu(x) -
/// relu(-x).
inline IndexerCase value_case(IndexFormat format, int place, int topk, const std::vector<std::byte>& keys) {
  constexpr uint8_t kOne = 0x38;
  IndexerCase c({.format = format, .heads = 8, .topk = topk, .lengths = {}});
  c.options.lengths = {int(keys.size()) / row_bytes(format)};
  c.queries.assign(8 * kIndexDim, 0);
  c.queries[size_t(place)] = kOne;
  c.queries[size_t(kIndexDim + place)] = kOne | 0x80;
  c.weights.assign(8, 0.0f);
  c.weights[0] = 1.0f;
  c.weights[1] = -1.0f;
  c.keys = {keys};
  return c;
}

/// 256 keys of scale 1/4: key `code` has that code at `place`, among normal ones.
inline std::vector<std::byte> keys_of_e4m3_codes(int place) {
  std::vector<std::byte> keys(256 * IndexFp8::kRowBytes, std::byte(0x40));
  for (int code = 0; code < 256; ++code) {
    std::byte* key = keys.data() + code * IndexFp8::kRowBytes;
    const float scale = 0.25f;
    key[place] = std::byte(code);
    std::memcpy(key + IndexFp8::kValueBytes, &scale, sizeof(scale));
  }
  return keys;
}

/// 1024 keys: every scale with a quarter of the codes at `place`; four places cover all codes.
inline std::vector<std::byte> keys_of_e2m1_codes(int place) {
  std::vector<std::byte> keys;
  for (int scale = 0; scale < 256; ++scale) {
    for (int code = place % 4; code < 16; code += 4) {
      std::vector<std::byte> key(IndexMxfp4::kValueBytes, std::byte(0x22));
      key[size_t(place / 2)] = std::byte(place % 2 == 0 ? code | 0x20 : code << 4 | 2);
      key.resize(IndexMxfp4::kRowBytes, std::byte(127));
      key[size_t(IndexMxfp4::kValueBytes + place / IndexMxfp4::kBlock)] = std::byte(scale);
      keys.insert(keys.end(), key.begin(), key.end());
    }
  }
  return keys;
}

/// Whether the scores' keys are those of `keys_of_e2m1_codes`. At the ends of the range, far outside the contract,
/// values may be saturated or flushed; but a number stays a number.
inline testing::AssertionResult decodes_e2m1_codes(const std::vector<uint32_t>& got, int place) {
  for (int i = 0; i < 1024; ++i) {
    const int scale = i / 4, code = i % 4 * 4 + place % 4;
    const float value = e2m1_to_float(uint8_t(code)) * ue8m0_to_float(uint8_t(scale));
    const uint32_t key = got[size_t(i)];
    const bool in_range = scale >= 2 && scale <= 252;
    const bool right = scale == 255 ? key == kNanScoreKey : in_range ? key == score_key(value) : key != kNanScoreKey;
    if (!right) {
      return testing::AssertionFailure() << "code " << code << ", scale " << scale << " at " << place << ": score "
                                         << score_of_key(key) << ", must be " << value;
    }
  }
  return testing::AssertionSuccess();
}

}  // namespace dsacore::test
