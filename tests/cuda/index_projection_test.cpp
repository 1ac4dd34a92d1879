// The cuda backend's index projection (steps 6 to 8) against the reference backend within spec 9, and against plain
// formulas where the weights make every sum exact; its bits over kernels, runs, live rows and broken neighbours. Prints
// times.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <memory>
#include <random>

#include "cpu/agreement.h"
#include "cuda/device_stages.h"
#include "cuda/timing.h"

namespace dsacore::test {
namespace {

struct Shape {
  int index_heads, q_lora, rows;
  IndexFormat format;
};

CaseOptions options_of(const Shape& s) {
  CaseOptions o;
  o.seed = uint64_t(s.index_heads * 1000 + s.q_lora);
  o.heads = 1;
  o.index_heads = s.index_heads;
  o.q_lora = s.q_lora;
  o.batch = s.rows;
  o.index_format = s.format;
  o.context = "1-300";
  o.pitch_pad =
      s.format == IndexFormat::kFp8 ? 0 : 3;  // rows at multiples of 16 bytes (but for odd head counts), or not
  o.slots = SlotsKind::kMixed;
  o.k_norm_bf16 = s.q_lora % 3 == 0;
  o.no_k_bias = s.index_heads % 3 == 0;
  return o;
}

/// Bits that a run wrote: what is compared between runs.
struct Written {
  std::vector<uint8_t> index_query;
  std::vector<float> head_weights;
  std::vector<std::byte> index_bytes;
  std::vector<BFloat16> q_c;  ///< of `front`
};

/// The stage on the device over a case, for the first rows of it.
class Stage {
 public:
  explicit Stage(const Case& source)
      : device(source), source_(source), q_c_out_(device.make<BFloat16>(device.q_c.size())) {}

  Written run(std::string_view kernel, int64_t rows) {
    IndexProjectionArgs args = device.index_projection_args();
    poison(device.index_query);
    poison(device.head_weights);
    poison(q_c_out_);
    cuda::check(cudaMemcpy(device.index.data, source_.index.data, size_t(device.index_bytes), cudaMemcpyHostToDevice),
                "cudaMemcpy");
    args.projected = args.projected.first(rows);
    args.q_c = args.q_c.first(rows);
    args.index_slots = args.index_slots.first(rows);
    args.index_query = args.index_query.first(rows);
    args.head_weights = args.head_weights.first(rows);
    if (kernel == "front") {
      args.q_c = {};
      args.q_c_out = View<BFloat16, 2>(q_c_out_.data(), rows, device.q_c.extent(1));
    }
    enqueue(kernel, args);
    return {fetch(device.index_query), fetch(device.head_weights), fetch_bytes(device.index.data, device.index_bytes),
            fetch(q_c_out_)};
  }

  DeviceRunner device;

 private:
  /// Whatever the number of rows: the fronts refuse shapes only where they are slower.
  void enqueue(std::string_view name, const IndexProjectionArgs& args) {
    const ShapeKey shape = device.key();
    for (const Kernel<IndexProjectionArgs>& kernel : cuda::index_projection_kernels()) {
      if (kernel.name != name) continue;
      if (scratch_ == nullptr || scratch_->bytes() < kernel.scratch_bytes(shape, 1)) {
        scratch_ = std::make_unique<DeviceBuffer>(kernel.scratch_bytes(shape, 1));
      }
      kernel.prepare(shape);
      kernel.run(args, {{scratch_->data(), size_t(scratch_->bytes())}, nullptr, nullptr, {}});
    }
  }
  template <class T, int Rank>
  static void poison(const View<T, Rank>& view) {
    cuda::check(cudaMemset(view.data(), kPoison, size_t(view.size()) * sizeof(T)), "cudaMemset");
  }

  const Case& source_;
  View<BFloat16, 1> q_c_out_;
  std::unique_ptr<DeviceBuffer> scratch_;
};

/// The reference's tensors for the first `rows` rows: of a run over all, the cache as if the others had not been
/// inserted.
void keep_rows(const Case& c, const StageRunner& all, int64_t rows, StageRunner& kept) {
  kept.rows = rows;
  copy(all.index_query, kept.index_query);
  copy(all.head_weights, kept.head_weights);
  std::memcpy(kept.index_bytes.data(), c.index.data, kept.index_bytes.size());
  with_layout(kept.index.format, [&](auto layout) {
    using L = decltype(layout);
    for (int64_t row = 0; row < rows; ++row) {
      const Slot slot(c.step.index_slots(row));
      if (slot.value() < 0) continue;
      const Place place = place_of(slot, kIndexPage);
      const int64_t page = int64_t(place.page.value()) * L::kPageBytes;
      for (const auto& [at, bytes] : {std::pair(L::value_at(place.offset), L::kValueBytes),
                                      std::pair(L::scale_at(place.offset), L::kScaleBytes)}) {
        std::memcpy(kept.index_bytes.data() + page + at, all.index_bytes.data() + page + at, size_t(bytes));
      }
    }
    return 0;
  });
}

/// Puts what the device wrote where the comparisons of spec 9 look for it.
void put_back(const Written& written, int64_t rows, StageRunner& runner) {
  runner.rows = rows;
  std::copy(written.index_query.begin(), written.index_query.end(), runner.index_query.data());
  std::copy(written.head_weights.begin(), written.head_weights.end(), runner.head_weights.data());
  runner.index_bytes = written.index_bytes;
}

::testing::AssertionResult same_rows(const Written& got, const Written& want, int64_t rows, int64_t heads) {
  const auto query =
      same_bytes(got.index_query.data(), want.index_query.data(), rows * heads * kIndexDim, "index_query");
  if (!query) return query;
  return same_bytes(got.head_weights.data(), want.head_weights.data(), rows * heads * 4, "head_weights");
}
::testing::AssertionResult same_bits(const Written& got, const Written& want) {
  const auto query =
      same_bytes(got.index_query.data(), want.index_query.data(), int64_t(want.index_query.size()), "index_query");
  if (!query) return query;
  const auto weights = same_bytes(got.head_weights.data(), want.head_weights.data(),
                                  int64_t(want.head_weights.size()) * 4, "head_weights");
  if (!weights) return weights;
  return same_bytes(got.index_bytes.data(), want.index_bytes.data(), int64_t(want.index_bytes.size()), "index_cache");
}
/// Elements past the live rows are as they were.
::testing::AssertionResult nothing_beyond(const Written& got, int64_t rows, int64_t heads) {
  for (size_t i = size_t(rows * heads * kIndexDim); i < got.index_query.size(); ++i) {
    if (got.index_query[i] != kPoison) return ::testing::AssertionFailure() << "index_query written at " << i;
  }
  for (size_t i = size_t(rows * heads); i < got.head_weights.size(); ++i) {
    if (bits_of(got.head_weights[i]) != 0xFFFFFFFF)
      return ::testing::AssertionFailure() << "head_weights written at " << i;
  }
  return ::testing::AssertionSuccess();
}

/// `q_c` of the first `rows` rows was left to the query, with the bits of the norm, and nothing beyond.
::testing::AssertionResult left_q_c(const Written& got, const View<BFloat16, 2>& want, int64_t rows) {
  const auto same = same_bytes(got.q_c.data(), want.data(), rows * want.extent(1) * 2, "q_c");
  if (!same) return same;
  for (size_t i = size_t(rows * want.extent(1)); i < got.q_c.size(); ++i) {
    if (got.q_c[i].bits != uint16_t(kPoison * 0x101)) return ::testing::AssertionFailure() << "q_c written at " << i;
  }
  return ::testing::AssertionSuccess();
}

class IndexProjectionAgreement : public ::testing::TestWithParam<Shape> {};

/// All kernels, for many numbers of live rows of one case: within spec 9 of the reference, and the same bits
/// throughout.
void check_all(const CaseOptions& options, const std::vector<int64_t>& live_rows) {
  const Case c = make_case(options);
  const int64_t heads = c.sizes.index_heads;
  StageRunner want(c, reference_backend(), 16);
  want.run(want.backend().query, want.query_args());
  Stage stage(c);

  // `front` does step 1 itself, to the bits of the norm alone (norm.cuh); the stage is judged from these.
  cuda::enqueue_query_norm(stage.device.query_args(), {});
  std::vector<BFloat16> q_c = fetch(stage.device.q_c);
  const View<BFloat16, 2> normalised(q_c.data(), want.rows, c.sizes.q_lora);
  EXPECT_TRUE(nearly_equal(normalised, want.q_c, judged_rows(c, want.rows), "q_c"));
  copy(normalised, want.q_c);
  want.run(want.backend().index_projection, want.index_projection_args());

  StageRunner kept(c, reference_backend(), 1), got(c, reference_backend(), 1);
  const Written first = stage.run("plain", want.rows);
  for (const int64_t rows : live_rows) {
    SCOPED_TRACE("rows " + std::to_string(rows));
    keep_rows(c, want, rows, kept);
    const std::vector<int64_t> judged = judged_rows(c, rows);
    for (const char* kernel : {"plain", "front_from_q_c", "front"}) {
      SCOPED_TRACE(kernel);
      const Written written = stage.run(kernel, rows);
      put_back(written, rows, got);
      EXPECT_TRUE(index_query_agrees(got, kept, judged));
      EXPECT_TRUE(index_cache_agrees(got, kept, judged));
      EXPECT_TRUE(nothing_beyond(written, rows, heads));
      EXPECT_TRUE(same_rows(written, first, rows, heads)) << "against plain with all rows";
      EXPECT_TRUE(left_q_c(written, normalised, kernel == std::string_view("front") ? rows : 0));
      EXPECT_TRUE(same_bits(stage.run(kernel, rows), written)) << "second run";
      if (::testing::Test::HasFailure()) return;
    }
  }
}

const std::vector<int64_t> kLiveRows = {1, 2, 3, 8, 9, 16, 17, 32, 33, 64, 100, 256};

TEST_P(IndexProjectionAgreement, Plain) { check_all(options_of(GetParam()), kLiveRows); }

TEST_P(IndexProjectionAgreement, Adversarial) {
  CaseOptions options = options_of(GetParam());
  options.adversarial = {"all"};
  options.pad_requests = 1;
  check_all(options, {8, 17, 256});
}

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  for (const int heads : {8, 9, 16, 32, 64}) {
    for (const int q_lora : {128, 640, 1536, 2048}) {
      all.push_back({heads, q_lora, 256, (heads + q_lora / 128) % 2 == 0 ? IndexFormat::kFp8 : IndexFormat::kMxfp4});
    }
  }
  all.push_back({32, 1536, 256, IndexFormat::kMxfp4});
  all.push_back({64, 1536, 256, IndexFormat::kMxfp4});
  all.push_back({62, 256, 256, IndexFormat::kFp8});
  return all;
}
INSTANTIATE_TEST_SUITE_P(Shapes, IndexProjectionAgreement, ::testing::ValuesIn(shapes()), [](const auto& shape) {
  return "heads" + std::to_string(shape.param.index_heads) + "_q_lora" + std::to_string(shape.param.q_lora) +
         (shape.param.format == IndexFormat::kFp8 ? "_fp8" : "_mxfp4");
});

TEST(IndexProjection, SmallForTools) {
  for (const Shape& shape : {Shape{8, 256, 17, IndexFormat::kFp8}, Shape{62, 128, 70, IndexFormat::kMxfp4}}) {
    check_all(options_of(shape), {1, 5, 9, 17, shape.rows});
  }
}

TEST(IndexProjection, NegativeSlotsWriteNothing) {
  CaseOptions options = options_of({8, 128, 17, IndexFormat::kMxfp4});
  options.slots = SlotsKind::kNegative;
  const Case c = make_case(options);
  Stage stage(c);
  cuda::check(cudaMemset(stage.device.q_c.data(), 0, size_t(stage.device.q_c.size()) * 2), "cudaMemset");
  for (const char* kernel : {"front_from_q_c", "front", "plain"}) {
    const Written got = stage.run(kernel, 17);
    EXPECT_TRUE(same_bytes(got.index_bytes.data(), c.index.data, int64_t(got.index_bytes.size()), "index_cache"))
        << kernel;
  }
}

TEST(IndexProjection, BrokenRowHarmsItself) {
  for (const Shape& shape : {Shape{8, 256, 7, IndexFormat::kFp8}, Shape{9, 256, 14, IndexFormat::kMxfp4},
                             Shape{8, 1536, 40, IndexFormat::kFp8}, Shape{9, 256, 30, IndexFormat::kMxfp4}}) {
    CaseOptions options = options_of(shape);
    options.slots = SlotsKind::kOwned;
    const int64_t broken = shape.rows / 2;
    const Case clean = make_case(options);
    StageRunner reference(clean, reference_backend(), 8);
    reference.run(reference.backend().query, reference.query_args());
    for (const uint16_t bits : {0x7FC0, 0xFF80, 0x7F7F}) {  // NaN, -infinity, the largest number
      Case spoilt = make_case(options);
      for (int64_t i = 0; i < clean.sizes.width(); i += 3) projected_at(spoilt, broken, i) = {bits};
      for (const char* kernel : {"front_from_q_c", "front", "plain"}) {
        SCOPED_TRACE(kernel);
        Stage good(clean), bad(spoilt);
        put(reference.q_c, good.device.q_c);
        const Written want = good.run(kernel, shape.rows);
        StageRunner q_c(spoilt, reference_backend(), 1);
        copy(reference.q_c, q_c.q_c);
        for (int64_t i = 0; i < clean.sizes.q_lora; i += 3) q_c.q_c(broken, i) = {bits};
        put(q_c.q_c, bad.device.q_c);
        Written got = bad.run(kernel, shape.rows);
        // With the broken row's own outputs put back, nothing may differ.
        const int64_t codes = int64_t(shape.index_heads) * kIndexDim;
        std::copy_n(want.index_query.begin() + broken * codes, codes, got.index_query.begin() + broken * codes);
        std::copy_n(want.head_weights.begin() + broken * shape.index_heads, shape.index_heads,
                    got.head_weights.begin() + broken * shape.index_heads);
        EXPECT_TRUE(same_rows(got, want, shape.rows, shape.index_heads));
        std::vector<int64_t> others;
        for (int64_t row = 0; row < shape.rows; ++row) {
          if (row != broken) others.push_back(row);
        }
        StageRunner a(clean, reference_backend(), 1), b(clean, reference_backend(), 1);
        put_back(got, shape.rows, a);
        put_back(want, shape.rows, b);
        EXPECT_TRUE(index_cache_agrees(a, b, others));
      }
    }
  }
}

/// Step 7 by the words of the specification, for iq values of one head.
struct PlainHead {
  PlainHead(const std::vector<float>& iq, float wv, const LayerConfig& config) : codes(iq.size()) {
    float amax = 1e-10f;
    for (const float x : iq) amax = std::fmax(amax, std::fabs(x));
    const double wanted = double(amax / 448.0f);
    const float s = float(std::exp2(std::ceil(std::log2(wanted))));
    for (size_t i = 0; i < iq.size(); ++i) codes[i] = to_e4m3(iq[i] / s);
    weight = wv * s * float(config.index_softmax_scale) * float(config.index_head_scale);
  }
  std::vector<uint8_t> codes;
  float weight;
};

/// iq of head h = q_c * 2^(3 h): every magnitude from 2^-100 to 2^57, a row each, and a row of zeros.
TEST(IndexProjection, ScalesAndCodesOfEveryMagnitude) {
  constexpr int kLow = -100, kHigh = 57, kRows = kHigh - kLow + 2, kHeads = 8;
  CaseOptions options = options_of({kHeads, 128, kRows, IndexFormat::kFp8});
  Case c = make_case(options);
  auto* weights = static_cast<BFloat16*>(const_cast<void*>(c.weights.wq_b.data));
  for (int h = 0; h < kHeads; ++h) {
    for (int i = 0; i < kIndexDim; ++i) {
      for (int k = 0; k < 128; ++k) weights[(h * kIndexDim + i) * 128 + k] = to_bf16(i == k ? float(1 << 3 * h) : 0.0f);
    }
  }
  std::mt19937 random(5);
  std::vector<BFloat16> q_c(size_t(kRows) * 128);
  for (int row = 0; row + 1 < kRows; ++row) {
    const int top = kLow + row;
    BFloat16* x = q_c.data() + row * 128;
    for (int i = 0; i < 128; ++i) {
      const float mantissa = 1.0f + float(random() % 128) / 128;
      x[i] = to_bf16(std::ldexp(random() % 2 ? mantissa : -mantissa, std::max(-126, top - int(random() % 24))));
    }
    x[random() % 128] = to_bf16(std::ldexp(top % 3 == 0 ? 1.75f : 1.0f + float(random() % 128) / 128, top));
  }
  Stage stage(c);
  put(View<BFloat16, 2>(q_c.data(), kRows, 128), stage.device.q_c);
  for (const char* kernel : {"front_from_q_c", "plain"}) {
    const Written got = stage.run(kernel, kRows);
    for (int at = 0; at < kRows * kHeads; ++at) {
      const int row = at / kHeads, head = at % kHeads;
      std::vector<float> iq;
      for (int i = 0; i < 128; ++i) iq.push_back(to_float(q_c[size_t(row * 128 + i)]) * float(1 << 3 * head));
      const PlainHead want(iq, to_float(c.step.projected(row, c.sizes.wv_at() + head)), c.config);
      ASSERT_EQ(got.head_weights[size_t(at)], want.weight) << kernel << ", row " << row << ", head " << head;
      for (int i = 0; i < kIndexDim; ++i) {
        ASSERT_EQ(int(got.index_query[size_t(at * kIndexDim + i)]), int(want.codes[size_t(i)]))
            << kernel << ", row " << row << ", head " << head << "[" << i << "], value " << iq[size_t(i)];
      }
    }
  }
}

TEST(IndexProjection, RefusesWithTheRange) {
  ShapeKey shape{};
  shape.sizes = {1536, 12, 32};
  shape.rows = 8;
  for (const auto& kernel : cuda::index_projection_kernels()) {
    EXPECT_TRUE(kernel.accepts(shape).ok);
    ShapeKey narrow = shape;
    narrow.sizes.q_lora = 1500;
    EXPECT_EQ(kernel.accepts(narrow).reason, "q_lora 1500: takes multiples of 128 up to 2048");
    ShapeKey many = shape;
    many.rows = 65;
    EXPECT_EQ(kernel.accepts(many).reason, kernel.name == "plain" ? "" : "rows 65: above 64 plain is faster");
  }
}

/// Microseconds a launch with the weights of other layers each time, so that they come from DRAM; and behind a kernel
/// of 5 us, which hides the weights' way.
void print_times(int index_heads) {
  constexpr int kQLora = 1536, kHeads = 12;
  const int64_t layer = int64_t(index_heads) * kIndexDim * kQLora;
  const int layers = int(std::max<int64_t>(4, 250'000'000 / (layer * 2)));
  CaseOptions options = options_of({index_heads, kQLora, 256, IndexFormat::kFp8});
  options.heads = kHeads;
  options.slots = SlotsKind::kOwned;
  const Case c = make_case(options);
  Stage stage(c);
  DeviceBuffer weights(layer * layers * 2);
  for (int i = 0; i < layers; ++i) {
    cuda::check(cudaMemcpy(weights.data() + i * layer * 2, stage.device.model().w_iq.data(), size_t(layer * 2),
                           cudaMemcpyDeviceToDevice),
                "cudaMemcpy");
  }
  cuda::check(cudaMemset(stage.device.q_c.data(), 0, size_t(stage.device.q_c.size()) * 2), "cudaMemset");
  std::vector<LayerModel> models(size_t(layers), stage.device.model());
  for (int i = 0; i < layers; ++i) {
    models[size_t(i)].w_iq = View<const BFloat16, 2>(reinterpret_cast<BFloat16*>(weights.data()) + i * layer,
                                                     int64_t(index_heads) * kIndexDim, kQLora);
  }
  const double floor = double(layer) * 2 / 4.0e6;
  const double alone = graph_us(layers, [&](int, Queue queue) { enqueue_spin(5, queue); });
  for (const int64_t rows : {1, 8, 16, 32, 64, 128, 256}) {
    for (const Kernel<IndexProjectionArgs>& kernel : cuda::index_projection_kernels()) {
      const ShapeKey shape = stage.device.key();
      kernel.prepare(shape);
      DeviceBuffer scratch(kernel.scratch_bytes(shape, 1));
      const auto enqueue = [&](int i, Queue queue) {
        IndexProjectionArgs args = stage.device.index_projection_args();
        args.model = &models[size_t(i)];
        args.projected = args.projected.first(rows);
        args.q_c = args.q_c.first(rows);
        args.index_slots = args.index_slots.first(rows);
        kernel.run(args, {{scratch.data(), size_t(scratch.bytes())}, nullptr, nullptr, queue});
      };
      const double us = graph_us(layers, enqueue);
      const double behind = graph_us(layers, [&](int i, Queue queue) {
        enqueue_spin(5, queue);
        enqueue(i, queue);
      });
      std::printf("heads %2d, B %3d, %-15s %6.2f us (floor %.2f), behind 5 us +%.2f\n", index_heads, int(rows),
                  kernel.name.data(), us, floor, behind - alone);
    }
  }
}

TEST(IndexProjectionTimes, Heads32) { print_times(32); }
TEST(IndexProjectionTimes, Heads64) { print_times(64); }

}  // namespace
}  // namespace dsacore::test
