// The sparse core of the cuda backend (spec 5, step 11), each kernel by its name, against the reference backend.
#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "backends/cuda/sparse_core_few.h"
#include "cuda/sparse_core_case.h"

namespace dsacore::test {
namespace {

struct Named {
  std::string_view kernel;
  int heads;
};

std::string name_of_shape(const testing::TestParamInfo<std::tuple<KvFormat, Named>>& param) {
  const auto& [format, named] = param.param;
  return std::string(name_of(format)) + "_" + std::string(named.kernel) + std::to_string(named.heads);
}

// ---- shapes ----

class CoreShapes : public testing::TestWithParam<std::tuple<KvFormat, Named>> {};

TEST_P(CoreShapes, EveryValidCount) {
  const auto& [format, named] = GetParam();
  CoreCase c({.format = format, .heads = named.heads, .valid = {0, 1, 63, 64, 65, 127, 1000, 2047, 2048}});
  const CoreResult want = run_reference(c);
  DeviceCore device(c, named.kernel);
  const CoreResult got = device.run();
  EXPECT_LT(expect_agreement(got, want), 1.7e-3);  // the latent's own rounding leaves 1.2e-3
  expect_same_bits(device.run(), got, c.rows());
  expect_no_keys(got, 0, named.heads);
}

// Up to eight rows are cut most finely.
TEST_P(CoreShapes, FewRows) {
  const auto& [format, named] = GetParam();
  for (const std::vector<int>& valid :
       {std::vector{2048}, {33}, {0}, {513, 2048}, {2047, 1025, 1}, {2048, 31, 1536, 64, 700}}) {
    SCOPED_TRACE(testing::PrintToString(valid));
    CoreCase c({.format = format, .heads = named.heads, .valid = valid});
    EXPECT_LT(expect_device_agrees(c, named.kernel), 1.7e-3);
  }
}

INSTANTIATE_TEST_SUITE_P(
    FormatsAndHeads, CoreShapes,
    testing::Combine(testing::ValuesIn(kFormats),
                     testing::Values(Named{"few_heads", 1}, Named{"few_heads", 5}, Named{"few_heads", 6},
                                     Named{"few_heads", 8}, Named{"few_heads", 12}, Named{"few_heads", 16},
                                     Named{"few_heads", 17}, Named{"few_heads", 24}, Named{"few_heads", 40},
                                     Named{"few_heads", 96}, Named{"few_heads", 128})),
    name_of_shape);

class FewHeads : public testing::TestWithParam<KvFormat> {
 protected:
  static constexpr std::string_view kKernel = "few_heads";
};
INSTANTIATE_TEST_SUITE_P(Formats, FewHeads, testing::ValuesIn(kFormats), name_of_format);

// Every way in which rows are cut, from 64 splits to 1. A row's bits are its own.
TEST_P(FewHeads, AnyNumberOfRows) {
  for (const int rows : {1, 2, 3, 4, 6, 9, 16, 20, 33, 40, 66, 67, 132, 133, 256}) {
    SCOPED_TRACE(rows);
    std::vector<int> valid;
    for (int row = 0; row < rows; ++row) valid.push_back(row % 8 == 0 ? 2048 : 37 * row % 300);
    CoreCase c({.format = GetParam(), .heads = 3, .valid = valid, .seed = uint64_t(rows)});
    expect_device_agrees(c, kKernel);
    DeviceCore device(c, kKernel);
    const CoreResult alone = device.run();
    for (int row = 1; row < rows; ++row) c.valid[size_t(row)] /= 2;
    device.upload();
    expect_same_bits(device.run(), alone, 1);
  }
}

// More than 16 heads: CTAs of 32.
TEST_P(FewHeads, AnyNumberOfRowsOfManyHeads) {
  for (const int rows : {2, 5, 9, 13, 17, 33, 40, 67, 133}) {
    SCOPED_TRACE(rows);
    std::vector<int> valid;
    for (int row = 0; row < rows; ++row) valid.push_back(row % 16 == 0 ? 2048 : 37 * row % 300);
    CoreCase c({.format = GetParam(), .heads = rows % 2 == 0 ? 20 : 33, .valid = valid, .seed = uint64_t(rows)});
    expect_device_agrees(c, kKernel);
  }
}

// For tools that take seconds a launch: 16 heads a CTA with tiles of 32 and of 64 keys, 32 heads; rings of few and of
// many tiles, which go round; rows cut and whole, some without keys; the merge of many splits and of one.
TEST_P(FewHeads, SmallForTools) {
  const auto run = [](const CoreOptions& options, int sixteens, int tile_keys, int tiles, int splits) {
    CoreCase c(options);
    const cuda::FewHeadsPlan plan = cuda::few_heads_plan(c.rows(), c.heads(), c.model.config.topk);
    EXPECT_EQ(std::tuple(plan.sixteens, plan.tile_keys, plan.tiles, plan.splits),
              std::tuple(sixteens, tile_keys, tiles, splits));
    expect_device_agrees(c, kKernel);
  };
  run({.format = GetParam(), .heads = 3, .topk = 544, .valid = {540}}, 1, 32, 1, 17);
  run({.format = GetParam(), .heads = 2, .topk = 1600, .valid = {0, 500, 0, 0, 0, 0, 0, 0, 1}}, 1, 64, 2, 13);
  run({.format = GetParam(), .heads = 33, .topk = 200, .valid = {200, 65}}, 1, 32, 1, 7);
  std::vector<int> valid(130, 0);
  valid[0] = 400, valid[129] = 33;
  run({.format = GetParam(), .heads = 2, .topk = 400, .valid = valid}, 1, 64, 7, 1);
  run({.format = GetParam(), .heads = 17, .topk = 400, .valid = valid}, 2, 64, 7, 1);
}

TEST_P(FewHeads, OtherTopk) {
  for (const int topk : {1, 16, 64, 65, 300, 512, 1024}) {
    SCOPED_TRACE(topk);
    CoreCase few({.format = GetParam(), .topk = topk, .valid = {topk, 1, 0, topk}});
    expect_device_agrees(few, kKernel);
    CoreCase one({.format = GetParam(), .topk = topk, .valid = {topk}});
    expect_device_agrees(one, kKernel);
    CoreCase many({.format = GetParam(), .heads = 2, .topk = topk, .valid = std::vector<int>(50, topk)});
    expect_device_agrees(many, kKernel);
    CoreCase groups({.format = GetParam(), .heads = 34, .topk = topk, .valid = {topk, 1, 0, topk}});
    expect_device_agrees(groups, kKernel);
  }
}

TEST_P(FewHeads, FewerLiveRowsThanPrepared) {
  CoreCase c({.format = GetParam(), .heads = 6, .valid = std::vector<int>(40, 1500)});
  expect_live_rows_agree(c, kKernel);
}

TEST_P(FewHeads, PagesBetweenOtherLayersPages) {
  for (const auto& [page, stride] : {std::pair{64, 64 + 17}, {2048, 2048}, {2048, 3 * 2048}}) {
    SCOPED_TRACE(page);
    CoreCase c({.format = GetParam(), .heads = 6, .valid = {1500, 2048}, .page = page, .stride_rows = stride});
    expect_device_agrees(c, kKernel);
  }
}

TEST_P(FewHeads, PhysicalRowsUpTo31Bits) {
  CoreCase c({.format = GetParam(), .heads = 20, .valid = {100, 2048}});
  const CoreResult want = run_reference(c);
  for (const int64_t first : {int64_t(1) << 24, int64_t(1) << 28, (int64_t(1) << 31) - 1 - 4096}) {
    SCOPED_TRACE(first);
    expect_device_agrees(c, kKernel, want, first);
  }
}

// ---- values ----

TEST_P(FewHeads, SaturatedValues) {
  for (const int heads : {12, 24}) {
    CoreCase c({.format = GetParam(), .heads = heads, .valid = {1, 300, 2048}, .query_magnitude = 1e-3});
    saturate_values(c);
    expect_device_agrees(c, kKernel);
  }
}

TEST_P(FewHeads, EveryCode) {
  for (const int heads : {12, 24}) {
    CoreCase c({.format = GetParam(), .heads = heads, .valid = {40, 2048}, .query_magnitude = 1e-2});
    write_every_code(c);
    expect_device_agrees(c, kKernel);
  }
}

TEST_P(FewHeads, LargeLogits) {
  for (const int heads : {12, 24}) {
    CoreCase c({.format = GetParam(), .heads = heads, .valid = {2, 300, 2048}});
    make_logits_large(c);
    const CoreResult want = run_reference(c);
    float largest = 0;
    for (const float lse : want.lse) largest = std::max(largest, std::abs(lse));
    EXPECT_GT(largest, 1e4f);
    expect_device_agrees(c, kKernel, want);
  }
}

TEST_P(FewHeads, OneKeyIsExact) {
  CoreCase c({.format = GetParam(), .valid = {1}});
  c.model.k_scale = 1;
  expect_one_key_exact(c, kKernel);
}

// BF16 queries that FP16 cannot hold: each head has a magnitude of its own, and outliers.
TEST(FewHeadsQuery, BeyondHalfPrecision) {
  for (const auto& [exponent, heads] : {std::pair{-120, 16}, {-60, 32}, {-20, 16}, {0, 32}}) {
    SCOPED_TRACE(exponent);
    CoreCase c({.heads = heads, .valid = {500, 2048}});
    for (int b = 0; b < c.rows(); ++b) {
      for (int head = 0; head < c.heads(); ++head) {
        const float magnitude = std::ldexp(0.01f, exponent + head % 4);
        for (int i = 0; i < kQueryRow; ++i) {
          c.set_query(b, head, i, magnitude * float(c.normal()) * (i % 100 == 7 ? 300.0f : 1.0f));
        }
      }
    }
    c.model.config.softmax_scale = std::ldexp(1 / std::sqrt(192.0), -exponent);
    expect_device_agrees(c, "few_heads");
  }
}

// ---- scales of fp8_ds_mla ----

class FewHeadsScales : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Heads, FewHeadsScales, testing::Values(6, 24));

TEST_P(FewHeadsScales, PowersOfTwo) { expect_powers_of_two_agree(GetParam(), "few_heads"); }

TEST_P(FewHeadsScales, OneKeyIsExactAtAnyScale) { expect_one_key_exact_at_any_scale(GetParam(), "few_heads"); }

TEST_P(FewHeadsScales, AnyFinitePositiveScale) { expect_any_scale_agrees(GetParam(), "few_heads"); }

TEST_P(FewHeadsScales, FarApart) { expect_scales_far_apart_agree(GetParam(), "few_heads"); }

TEST_P(FewHeadsScales, LargestScale) {
  CoreCase c({.heads = GetParam(), .valid = {1, 2}, .query_magnitude = 0});
  set_largest_scale(c);
  expect_device_agrees(c, "few_heads");
}

// ---- independence ----

TEST_P(FewHeads, NanAndInfinityStayInTheirRow) {
  for (const int heads : {12, 28}) {
    CoreCase c({.format = GetParam(), .heads = heads, .valid = {300, 300, 40, 2048}});
    expect_broken_values_stay(c, kKernel);
  }
}

// ---- parts that the value kernel merges ----

const Kernel<ValueArgs>& value_kernel(std::string_view name) { return kernel_named(cuda::value_kernels(), name); }

/// Weights, gate and lengths of a step 12 behind a core case.
struct ValueInputs {
  explicit ValueInputs(CoreCase& c)
      : heads(c.heads()),
        rows(c.rows()),
        w_uv(int64_t(heads) * kValue * kLatent * 2),
        gate(int64_t(rows) * pitch() * 2),
        seq_lens(rows * 4),
        out(int64_t(rows) * width() * 2) {
    const auto fill = [&](const DeviceBuffer& to, double scale) {
      std::vector<BFloat16> values(size_t(to.bytes() / 2));
      for (BFloat16& value : values) value = to_bf16(float(c.normal() * scale));
      cuda::check(cudaMemcpy(to.data(), values.data(), size_t(to.bytes()), cudaMemcpyHostToDevice), "cudaMemcpy");
    };
    fill(w_uv, 0.05);
    fill(gate, 2);
    std::vector<int32_t> lengths(size_t(rows), 5);
    if (rows > 2) lengths[1] = 0;
    cuda::check(cudaMemcpy(seq_lens.data(), lengths.data(), lengths.size() * 4, cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  int64_t width() const { return int64_t(heads) * kValue; }
  int64_t pitch() const { return width() + 7; }
  ValueArgs args(int live, View<const BFloat16, 3> latent, bool gated) const {
    const View<const BFloat16, 2> all_gates(reinterpret_cast<const BFloat16*>(gate.data()), live, width());
    return {.model = nullptr,
            .latent = latent,
            .w_uv = View<const BFloat16, 3>(reinterpret_cast<const BFloat16*>(w_uv.data()), heads, kValue, kLatent),
            .gate = gated ? all_gates.with_pitch(pitch()) : View<const BFloat16, 2>{},
            .out = View<BFloat16, 2>(reinterpret_cast<BFloat16*>(out.data()), live, width()),
            .seq_lens = View<const int32_t, 1>(reinterpret_cast<const int32_t*>(seq_lens.data()), live),
            .q = 1};
  }

  int heads, rows;
  DeviceBuffer w_uv, gate, seq_lens, out;
};

/// The core's own merge and the value kernel `fused`, and the value kernel that merges: the same bits in everything.
void expect_same_bits_from_parts(CoreCase& c, int live, bool gated) {
  DeviceCore device(c, "few_heads");
  ValueInputs inputs(c);
  const CoreResult want = device.run(live);
  const ValueArgs from_latent = inputs.args(live, device.args(live).latent, gated);
  value_kernel("fused").run(from_latent, {{}, nullptr, nullptr, {}});
  const std::vector<BFloat16> wanted = fetch(from_latent.out);
  inputs.out.poison();
  expect_same_bits(device.run(value_kernel("merge"), inputs.args(live, {}, gated)), want, live);
  const std::vector<BFloat16> got = fetch(from_latent.out);
  int64_t changed = 0;
  for (size_t i = 0; i < got.size(); ++i) changed += got[i].bits != wanted[i].bits;
  EXPECT_EQ(changed, 0);
}

TEST_P(FewHeads, ValueKernelMergesToTheSameBits) {
  for (const int rows : {1, 2, 3, 7, 9, 17, 40, 67, 133}) {
    for (const int heads : {1, 6, 12, 16, 33}) {
      if (heads > 16 && rows != 3) continue;
      SCOPED_TRACE(testing::Message() << rows << " rows, " << heads << " heads");
      std::vector<int> valid;
      for (int row = 0; row < rows; ++row) valid.push_back(row % 5 == 0 ? 2048 : 37 * (row - 1) % 300);
      CoreCase c({.format = GetParam(), .heads = heads, .valid = valid, .seed = uint64_t(rows)});
      expect_same_bits_from_parts(c, rows, true);
      if (rows == 3) expect_same_bits_from_parts(c, 2, false);
    }
  }
}

// ---- time ----

// With the merge by a kernel of its own, which a step does not have.
TEST(CoreTime, FewHeads) {
  CoreTimer timer;
  for (const KvFormat format : kFormats) {
    for (const int heads : {12, 6}) {
      for (const int rows : {1, 8, 64}) timer.report("few_heads", format, heads, rows);
    }
  }
  for (const int rows : {2, 4, 16, 32, 48, 96, 128}) timer.report("few_heads", KvFormat::kFp8DsMla, 12, rows);
  for (const int heads : {24, 48, 96}) {
    for (const int rows : {1, 8, 16}) timer.report("few_heads", KvFormat::kFp8DsMla, heads, rows);
  }
}

// Both cores with step 12 behind them: what the tables choose by.
TEST(CoreTime, CoreAndValue) {
  CoreTimer timer;
  const auto report = [&](std::string_view core, std::string_view value, int heads, int rows) {
    fmt::print("time {} + value {} H={:<3} B={:<3} {:7.2f} us\n", core, value, heads, rows,
               timer.microseconds(core, KvFormat::kFp8DsMla, heads, rows, kMaxTopk, value));
  };
  for (const int rows : {1, 8, 64}) {
    report("few_heads", "merge", 12, rows);
    report("few_heads", "fused", 12, rows);
  }
  for (const int heads : {24, 48, 96}) {
    for (const int rows : {1, 8, 16, 32}) {
      report("few_heads", "fused", heads, rows);
      report("many_heads", "fused", heads, rows);
    }
  }
}

}  // namespace
}  // namespace dsacore::test
