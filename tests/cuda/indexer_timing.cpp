// Times of the cuda backend's indexer at real sizes, with the selection of each shape checked against its own keys and
// the keys against scores in FP64. A step's launches are replayed in a CUDA graph; they take their keys from pages that
// L2 does not hold.
#include <random>

#include "cuda/indexer_device.h"
#include "cuda/timing.h"

namespace dsacore::test {
namespace {

constexpr double kBytesPerSecond = 4.5e12;  // DRAM, read
constexpr int64_t kPastL2 = 240 << 20;
constexpr int kCopies = 5;  ///< of as many different pages: no launch of the largest shape reads a page twice

struct TimedShape {
  IndexFormat format;
  int requests, q;
  int context;
};

/// e4m3 codes at equally likely steps of a normal distribution, so that random bytes become normal keys.
std::vector<uint8_t> normal_codes() {
  std::mt19937_64 random(5);
  std::normal_distribution<float> normal;
  std::vector<float> values(4096);
  for (float& x : values) x = normal(random);
  std::sort(values.begin(), values.end());
  std::vector<uint8_t> codes;
  for (int i = 0; i < 256; ++i) codes.push_back(to_e4m3(100 * values[size_t(16 * i + 8)]));
  return codes;
}

/// A cache of random keys that L2 does not hold.
std::vector<std::byte> random_pages(IndexFormat format) {
  const std::vector<uint8_t> codes = normal_codes();
  const int64_t page_bytes = kIndexPage * row_bytes(format), pages = kPastL2 / page_bytes;
  std::vector<std::byte> bytes(size_t(pages * page_bytes));
  std::mt19937_64 random(7);
  for (size_t i = 0; i + 8 <= bytes.size(); i += 8) {
    const uint64_t word = random();
    std::memcpy(bytes.data() + i, &word, 8);
  }
  for (int64_t page = 0; page < pages; ++page) {
    std::byte* at = bytes.data() + page * page_bytes;
    with_layout(format, [&](auto layout) {
      for (int i = 0; format == IndexFormat::kFp8 && i < layout.kScalesAt; ++i) at[i] = std::byte(codes[size_t(at[i])]);
      for (int t = 0; t < kIndexPage; ++t) {
        std::byte* scales = at + layout.scale_at(t);
        const float scale = 0.002f + 0.0001f * float(uint8_t(scales[0]) % 16);
        if (format == IndexFormat::kFp8) std::memcpy(scales, &scale, sizeof(scale));
        for (int b = 0; format == IndexFormat::kMxfp4 && b < layout.kScaleBytes; ++b)
          scales[b] = std::byte(120 + int(scales[b]) % 4);
      }
    });
  }
  return bytes;
}

template <class T>
std::unique_ptr<DeviceBuffer> upload(const std::vector<T>& host) {
  auto buffer = std::make_unique<DeviceBuffer>(int64_t(host.size() * sizeof(T)));
  cuda::check(cudaMemcpy(buffer->data(), host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  return buffer;
}

/// The pages of a format, here and on the device; made once.
struct TimedPages {
  std::vector<std::byte> bytes;
  std::unique_ptr<DeviceBuffer> cache;

  static const TimedPages& of(IndexFormat format) {
    static std::map<IndexFormat, TimedPages> all;
    TimedPages& pages = all[format];
    if (!pages.cache) {
      pages.bytes = random_pages(format);
      pages.cache = std::make_unique<DeviceBuffer>(int64_t(pages.bytes.size()) * kCopies);
      for (int copy = 0; copy < kCopies; ++copy) {
        cuda::check(cudaMemcpy(pages.cache->data() + copy * int64_t(pages.bytes.size()), pages.bytes.data(),
                               pages.bytes.size(), cudaMemcpyHostToDevice),
                    "cudaMemcpy");
      }
    }
    return pages;
  }
};

/// A shape on the device, with `launches` block tables.
class TimedCase {
 public:
  explicit TimedCase(const TimedShape& shape) : shape_(shape), keys_(TimedPages::of(shape.format)) {
    model_.sizes = {.q_lora = 1536, .heads = 12, .index_heads = 32};
    model_.config.index_format = shape.format;
    const int64_t page_bytes = kIndexPage * row_bytes(shape.format), each = pages_of(shape.context, kIndexPage);
    const int64_t step_pages = shape.requests * each;
    pages_ = kPastL2 / page_bytes * kCopies;
    launches = int(std::clamp<int64_t>(kPastL2 / (step_pages * page_bytes), 4, 48));
    rows_ = shape.requests * shape.q;
    std::mt19937_64 random(11);
    tables_.resize(size_t(launches * step_pages));
    std::vector<int32_t> ids(static_cast<size_t>(pages_));
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), random);
    for (size_t i = 0; i < tables_.size(); ++i) tables_[i] = ids[i % ids.size()];
    std::normal_distribution<float> normal;
    for (int i = 0; i < rows_ * 32 * kIndexDim; ++i) queries_.push_back(to_e4m3(normal(random) * 60));
    for (int i = 0; i < rows_ * 32; ++i) weights_.push_back(normal(random) * 0.01f + 0.004f);
    lengths_.assign(size_t(shape.requests), shape.context);
    table_ = upload(tables_), query_ = upload(queries_), weight_ = upload(weights_), length_ = upload(lengths_);
    const int64_t outputs = int64_t(rows_) * kMaxTopk;
    tokens_ = std::make_unique<DeviceBuffer>(outputs * 4), physical_ = std::make_unique<DeviceBuffer>(outputs * 4);
    valid_ = std::make_unique<DeviceBuffer>(rows_ * 4);
    key_ = {model_.sizes, KvFormat::kFp8DsMla, shape.format, kMaxTopk, rows_, shape.q, 1, shape.context};
    scratch_ = std::make_unique<DeviceBuffer>(cuda::IndexerScratch::bytes(key_));
    clear_scratch();
  }

  IndexerArgs args(int launch) const {
    const int64_t each = pages_of(shape_.context, kIndexPage);
    const auto* table = reinterpret_cast<const int32_t*>(table_->data()) + launch * shape_.requests * each;
    return {
        .model = &model_,
        .q = shape_.q,
        .shard = {},
        .seq_lens = View<const int32_t, 1>(reinterpret_cast<const int32_t*>(length_->data()), shape_.requests),
        .block_table = View<const int32_t, 2>(table, shape_.requests, each),
        .index_block_table = {},
        .page = kIndexPage,
        .stride_rows = kIndexPage,
        .index = {keys_.cache->data(), shape_.format, pages_, row_bytes(shape_.format)},
        .index_query = View<const uint8_t, 3>(reinterpret_cast<const uint8_t*>(query_->data()), rows_, 32, kIndexDim),
        .head_weights = View<const float, 2>(reinterpret_cast<const float*>(weight_->data()), rows_, 32),
        .topk_tokens = View<int32_t, 2>(reinterpret_cast<int32_t*>(tokens_->data()), rows_, kMaxTopk),
        .topk_rows = View<int32_t, 2>(reinterpret_cast<int32_t*>(physical_->data()), rows_, kMaxTopk),
        .valid = View<int32_t, 1>(reinterpret_cast<int32_t*>(valid_->data()), rows_),
        .candidates = {}};
  }
  const ShapeKey& key() const { return key_; }
  std::span<std::byte> scratch() const { return {scratch_->data(), size_t(scratch_->bytes())}; }
  void clear_scratch() { cuda::check(cudaMemset(scratch_->data(), 0, size_t(scratch_->bytes())), "cudaMemset"); }
  double floor_us() const {
    return 1e6 * double(shape_.requests) * shape_.context * row_bytes(shape_.format) / kBytesPerSecond;
  }

  /// Checks what the last run left, of the block table of `launch`. The keys may have been given up: they are made
  /// anew.
  void check(int launch) {
    const cuda::IndexerScratch parts(scratch(), rows_);
    cuda::enqueue_scores(args(launch), parts, false, {scratch(), nullptr, nullptr, {}});
    sync();
    const auto tokens = fetch(args(0).topk_tokens);
    const auto rows = fetch(args(0).topk_rows);
    for (const int row : {0, rows_ / 2, rows_ - 1}) {
      const int64_t n = keys_seen(shape_.context, shape_.q, row % shape_.q);
      const auto keys = fetch(View<const uint32_t, 1>(parts.keys + row * parts.key_pitch, n));
      const std::vector<int32_t> want = best_of_keys(keys, kMaxTopk);
      const int32_t* table =
          tables_.data() + (int64_t(launch) * shape_.requests + row / shape_.q) * pages_of(shape_.context, kIndexPage);
      for (int i = 0; i < kMaxTopk; ++i) {
        ASSERT_EQ(tokens[size_t(row * kMaxTopk + i)], want[size_t(i)]) << "[" << row << "][" << i << "]";
        ASSERT_EQ(rows[size_t(row * kMaxTopk + i)], table[want[size_t(i)] / 64] * 64 + want[size_t(i)] % 64)
            << "[" << row << "][" << i << "]";
      }
      if (n > kMaxTopk) check_scores(row, table, keys);
    }
    const auto histograms = fetch(View<const uint32_t, 2>(parts.histograms, kMaxRows, cuda::kScoreBins));
    EXPECT_TRUE(std::all_of(histograms.begin(), histograms.end(), [](uint32_t count) { return count == 0; }));
  }

  int launches;

 private:
  /// Some keys of a row against FP64.
  void check_scores(int row, const int32_t* table, const std::vector<uint32_t>& keys) const {
    IndexerCase one({.format = shape_.format, .lengths = {}});
    one.options.lengths = {1};
    one.queries.assign(queries_.begin() + row * 32 * kIndexDim, queries_.begin() + (row + 1) * 32 * kIndexDim);
    one.weights.assign(weights_.begin() + row * 32, weights_.begin() + (row + 1) * 32);
    std::mt19937_64 random(3);
    for (int i = 0; i < 300; ++i) {
      const int64_t token = i < 100 ? int64_t(keys.size()) - 1 - i : int64_t(random() % keys.size());
      const int64_t at = int64_t(table[token / 64]) % (pages_ / kCopies) * kIndexPage * row_bytes(shape_.format);
      const std::byte* page = keys_.bytes.data() + at;
      const int64_t values = one.value_bytes(), scales = one.row_bytes() - values;
      std::vector<std::byte> key(page + token % 64 * values, page + (token % 64 + 1) * values);
      key.insert(key.end(), page + 64 * values + token % 64 * scales, page + 64 * values + (token % 64 + 1) * scales);
      one.keys = {key};
      const Score want = scores_of(one, 0)[0];
      ASSERT_LE(std::abs(score_of_key(keys[size_t(token)]) - want.value), 1e-3 * want.size)
          << "row " << row << ", token " << token;
    }
  }

  TimedShape shape_;
  LayerModel model_;
  ShapeKey key_;
  int64_t pages_ = 0;
  int rows_ = 0;
  const TimedPages& keys_;
  std::vector<int32_t> tables_, lengths_;
  std::vector<uint8_t> queries_;
  std::vector<float> weights_;
  std::unique_ptr<DeviceBuffer> table_, query_, weight_, length_, tokens_, physical_, valid_, scratch_;
};

void time_shape(const TimedShape& shape) {
  TimedCase timed(shape);
  const Kernel<IndexerArgs>& fused = cuda::indexer_kernels()[0];
  fused.prepare(timed.key());
  const Workspace workspace{timed.scratch(), nullptr, nullptr, {}};
  const auto in = [&](Queue queue) {
    Workspace there = workspace;
    there.queue = queue;
    return there;
  };
  const double whole = graph_us(timed.launches, [&](int i, Queue queue) { fused.run(timed.args(i), in(queue)); });
  timed.check(timed.launches - 1);
  const cuda::IndexerScratch parts(timed.scratch(), timed.args(0).index_query.extent(0));
  const double scores = graph_us(
      timed.launches, [&](int i, Queue queue) { cuda::enqueue_scores(timed.args(i), parts, true, in(queue)); });
  timed.clear_scratch();
  printf(
      "TIME %s requests %2d q %d context %7d: %8.2f us = scores %8.2f + select %6.2f; floor %7.2f, share %.2f (scores "
      "%.2f)\n",
      shape.format == IndexFormat::kFp8 ? "fp8  " : "mxfp4", shape.requests, shape.q, shape.context, whole, scores,
      whole - scores, timed.floor_us(), timed.floor_us() / whole, timed.floor_us() / scores);
  fflush(stdout);
}

class RealShapes : public testing::TestWithParam<IndexFormat> {};
INSTANTIATE_TEST_SUITE_P(Timing, RealShapes, testing::Values(IndexFormat::kFp8, IndexFormat::kMxfp4),
                         [](const auto& format) { return format.param == IndexFormat::kFp8 ? "fp8" : "mxfp4"; });

TEST_P(RealShapes, Time) {
  for (const int context : {2048, 4096, 8192, 16384, 32768, 65536, 131072}) {
    for (const int requests : {1, 8, 32, 64}) time_shape({GetParam(), requests, 1, context});
  }
  time_shape({GetParam(), 1, 1, 1 << 20});
  for (const int q : {2, 4, 8}) time_shape({GetParam(), 1, q, 8192});
  for (const int requests : {1, 16}) time_shape({GetParam(), requests, 4, 131072});
}

}  // namespace
}  // namespace dsacore::test
