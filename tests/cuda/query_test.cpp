// The cuda backend's query stage (steps 1 to 5) against the reference backend within spec 9; its bits over repeated
// runs, behind a norm, over live rows and broken neighbours; what it leaves alone in the cache; and its times against
// the floor.
#include <algorithm>
#include <cstdio>
#include <thread>
#include <vector>

#include "cpu/agreement.h"
#include "cuda/device_stages.h"
#include "cuda/timing.h"

namespace dsacore::test {
namespace {

struct Shape {
  int heads, q_lora, rows, q;
  KvFormat format;
};

CaseOptions options_of(const Shape& s) {
  CaseOptions o;
  o.seed = uint64_t(s.heads * 1000 + s.rows);
  o.heads = s.heads;
  o.q_lora = s.q_lora;
  o.batch = s.rows;
  o.q = s.q;
  o.kv_format = s.format;
  o.context = "1-300";
  o.index_heads = 8;
  o.slots = SlotsKind::kMixed;
  return o;
}

int host_threads() { return std::clamp(int(std::thread::hardware_concurrency()), 1, 16); }

/// What the device left, on the host: a runner of the reference backend whose tensors are copied from the device.
class Fetched : public StageRunner {
 public:
  Fetched(const Case& c, DeviceRunner& device) : StageRunner(c, reference_backend(), 1, device.rows) {
    const auto q_c_values = fetch(device.q_c);
    std::copy(q_c_values.begin(), q_c_values.end(), q_c.data());
    const int64_t bytes = rows * query.heads * kQueryRow * query.element;
    std::memcpy(query.data, fetch_bytes(device.query.data, bytes).data(), size_t(bytes));
    kv_bytes = fetch_bytes(device.kv.data, device.kv_bytes);
    kv.data = kv_bytes.data();
  }
};

int64_t query_bytes(const StageRunner& r) { return r.rows * r.query.heads * kQueryRow * r.query.element; }

/// The first `rows` rows of two runs, bit for bit.
void expect_same_rows(const StageRunner& got, const StageRunner& want, int64_t rows) {
  EXPECT_TRUE(same_bytes(got.q_c.data(), want.q_c.data(), rows * want.q_c.stride(0) * 2, "q_c"));
  EXPECT_TRUE(same_bytes(got.query.data, want.query.data, query_bytes(want) / want.rows * rows, "query"));
}

Fetched run_on_device(const Case& c, std::string_view kernel = {}, int64_t live_rows = -1) {
  DeviceRunner device(c, live_rows);
  device.run(cuda::query_kernels(), device.query_args(), kernel);
  return Fetched(c, device);
}

class QueryAgreement : public ::testing::TestWithParam<Shape> {
 protected:
  static void compare(const CaseOptions& options) {
    const Case c = make_case(options);
    StageRunner want(c, reference_backend(), host_threads());
    want.run(want.backend().query, want.query_args());
    const std::vector<int64_t> rows = judged_rows(c, c.step.batch);
    const ShapeKey shape = DeviceRunner(c).key();
    for (const auto& kernel : cuda::query_kernels()) {
      if (!kernel.accepts(shape).ok) continue;
      SCOPED_TRACE(kernel.name);
      DeviceRunner runner(c);
      runner.run(cuda::query_kernels(), runner.query_args(), kernel.name);
      const Fetched got(c, runner);
      EXPECT_TRUE(nearly_equal(got.q_c, want.q_c, rows, "q_c"));
      EXPECT_TRUE(query_agrees(got, want, rows));
      EXPECT_TRUE(kv_cache_agrees(got, want, rows));
      // Twice, into poisoned outputs: the same bits. And q_c has the same bits from every kernel.
      cuda::check(cudaMemset(runner.query.data, 0x55, size_t(query_bytes(got))), "cudaMemset");
      cuda::check(cudaMemset(runner.q_c.data(), 0x55, size_t(runner.q_c.size()) * 2), "cudaMemset");
      runner.run(cuda::query_kernels(), runner.query_args(), kernel.name);
      const Fetched again(c, runner);
      expect_same_rows(again, got, got.rows);
      EXPECT_TRUE(same_bytes(again.kv_bytes.data(), got.kv_bytes.data(), int64_t(got.kv_bytes.size()), "kv_cache"));
      cuda::check(cudaMemset(runner.q_c.data(), 0x55, size_t(runner.q_c.size()) * 2), "cudaMemset");
      cuda::enqueue_query_norm(runner.query_args(), {});
      const Fetched normalised(c, runner);
      EXPECT_TRUE(same_bytes(normalised.q_c.data(), got.q_c.data(), got.q_c.size() * 2, "q_c of the norm alone"));
      EXPECT_TRUE(
          same_bytes(normalised.kv_bytes.data(), got.kv_bytes.data(), int64_t(got.kv_bytes.size()), "kv_cache"));
      // With the norm done before, as in the late modes.
      DeviceRunner late(c);
      cuda::enqueue_query_norm(late.query_args(), {});
      QueryArgs args = late.query_args();
      args.q_c_ready = true;
      late.run(cuda::query_kernels(), args, kernel.name);
      const Fetched behind(c, late);
      expect_same_rows(behind, got, got.rows);
      EXPECT_TRUE(same_bytes(behind.kv_bytes.data(), got.kv_bytes.data(), int64_t(got.kv_bytes.size()), "kv_cache"));
    }
  }
};

TEST_P(QueryAgreement, Plain) { compare(options_of(GetParam())); }

/// Each at addresses that are no multiple of 16 bytes. Not of the largest shapes: nothing there depends on the size.
class QueryAtOddAddresses : public QueryAgreement {};

TEST_P(QueryAtOddAddresses, Adversarial) {
  CaseOptions options = options_of(GetParam());
  options.adversarial = {"all"};
  options.pitch_pad = 5;
  if (GetParam().rows / GetParam().q > 4) options.pad_requests = 1;
  compare(options);
}

constexpr KvFormat kDs = KvFormat::kFp8DsMla, kF8 = KvFormat::kFp8, kNv = KvFormat::kNvfp4DsMla;

const std::vector<Shape> kFewHeads = {{1, 128, 1, 1, kDs},     {2, 1536, 3, 1, kF8},   {5, 1536, 3, 1, kNv},
                                      {6, 1536, 8, 1, kDs},    {12, 1536, 1, 1, kDs},  {12, 1536, 8, 1, kNv},
                                      {12, 1536, 16, 2, kF8},  {12, 2048, 8, 1, kNv},  {12, 128, 16, 1, kDs},
                                      {14, 640, 9, 1, kF8},    {24, 1536, 3, 1, kF8},  {24, 1536, 16, 1, kDs},
                                      {12, 1536, 17, 1, kDs},  {12, 1536, 64, 4, kF8}, {6, 1536, 100, 1, kNv},
                                      {12, 2048, 256, 1, kDs}, {24, 1536, 64, 1, kF8}, {1, 128, 64, 1, kNv}};
const std::vector<Shape> kManyHeads = {{48, 1536, 1, 1, kDs},  {48, 128, 16, 1, kF8},    {24, 2048, 8, 1, kDs},
                                       {96, 1536, 1, 1, kDs},  {96, 1536, 8, 2, kF8},    {96, 1536, 17, 1, kNv},
                                       {96, 1536, 64, 1, kDs}, {128, 1536, 100, 1, kF8}, {48, 2048, 256, 1, kDs},
                                       {96, 128, 64, 1, kF8},  {96, 640, 33, 1, kDs}};

std::vector<Shape> smaller_of(std::vector<Shape> shapes) {
  std::erase_if(shapes, [](const Shape& s) { return s.heads * s.rows > 1600; });
  return shapes;
}

INSTANTIATE_TEST_SUITE_P(FewHeads, QueryAgreement, ::testing::ValuesIn(kFewHeads));
INSTANTIATE_TEST_SUITE_P(ManyHeads, QueryAgreement, ::testing::ValuesIn(kManyHeads));
INSTANTIATE_TEST_SUITE_P(FewHeads, QueryAtOddAddresses, ::testing::ValuesIn(smaller_of(kFewHeads)));
INSTANTIATE_TEST_SUITE_P(ManyHeads, QueryAtOddAddresses, ::testing::ValuesIn(smaller_of(kManyHeads)));

TEST(Query, StridedCacheIsWrittenInItsPagesOnly) {
  CaseOptions options = options_of({6, 128, 8, 1, KvFormat::kFp8DsMla});
  options.page = 128;
  options.stride_rows = 192;
  options.slots = SlotsKind::kOwned;
  const Case c = make_case(options);
  StageRunner want(c, reference_backend());
  want.run(want.backend().query, want.query_args());
  EXPECT_TRUE(kv_cache_agrees(run_on_device(c), want, judged_rows(c, 8)));
}

TEST(Query, NegativeSlotsWriteNothing) {
  for (const int heads : {1, 48}) {
    CaseOptions options = options_of({heads, 128, 15, 1, KvFormat::kFp8});
    options.slots = SlotsKind::kNegative;
    const Case c = make_case(options);
    const Fetched got = run_on_device(c);
    EXPECT_TRUE(same_bytes(got.kv_bytes.data(), c.kv.data, int64_t(got.kv_bytes.size()), "kv_cache"));
  }
}

TEST(Query, SameBitsWithAnyLiveRows) {
  for (const Shape& shape : {Shape{6, 1536, 12, 1, kDs}, Shape{5, 256, 70, 1, kF8}, Shape{48, 1536, 70, 1, kDs}}) {
    const Case c = make_case(options_of(shape));
    const Fetched all = run_on_device(c);
    for (const int live : {1, 2, 7, 9, shape.rows - 1}) {
      SCOPED_TRACE(live);
      expect_same_rows(run_on_device(c, {}, live), all, live);
    }
  }
}

TEST(Query, BrokenRowHarmsItself) {
  for (const Shape& shape :
       {Shape{6, 256, 9, 1, kDs}, Shape{5, 256, 70, 1, kF8}, Shape{48, 256, 9, 1, kNv}, Shape{65, 128, 9, 1, kF8}}) {
    for (const uint16_t bits : {0x7FC0, 0xFF80, 0x7F7F}) {  // NaN, -infinity, the largest number
      CaseOptions options = options_of(shape);
      options.slots = SlotsKind::kOwned;
      Case c = make_case(options);
      const int64_t broken = shape.rows / 2;
      const Fetched clean = run_on_device(c);
      for (int64_t i = 0; i < c.sizes.width(); i += 3) projected_at(c, broken, i) = {bits};
      Fetched got = run_on_device(c);
      // With the broken row's own outputs put back, nothing may differ.
      std::copy_n(clean.q_c.row(broken), c.sizes.q_lora, got.q_c.row(broken));
      std::memcpy(got.query.at(broken, 0), clean.query.at(broken, 0), size_t(query_bytes(clean) / clean.rows));
      const PhysicalRow row = physical_row(place_of(Slot(c.step.slots(broken)), c.kv.page), c.kv.stride_rows);
      std::memcpy(row_at(got.kv, row), row_at(clean.kv, row), size_t(c.kv.row_bytes));
      expect_same_rows(got, clean, clean.rows);
      EXPECT_TRUE(same_bytes(got.kv_bytes.data(), clean.kv_bytes.data(), int64_t(clean.kv_bytes.size()), "kv_cache"));
    }
  }
}

/// Microseconds of one run inside a graph of many, each with weights of its own so that L2 holds none of them.
double time_of(const Case& c, std::string_view kernel) {
  constexpr int kRuns = 24;
  DeviceRunner device(c);
  const LayerModel& m = device.model();
  const int64_t w_qb_bytes = m.w_qb.size() * 2, kv_b_bytes = m.kv_b.size() * 2;
  const int copies = int(std::clamp<int64_t>((int64_t(160) << 20) / (w_qb_bytes + kv_b_bytes), 3, kRuns));
  std::vector<LayerModel> models(size_t(copies), m);
  for (LayerModel& model : models) {
    const auto copy_of = [&](const void* from, int64_t bytes) {
      const auto to = device.make<std::byte>(bytes);
      cuda::check(cudaMemcpy(to.data(), from, size_t(bytes), cudaMemcpyDeviceToDevice), "cudaMemcpy");
      return reinterpret_cast<const BFloat16*>(to.data());
    };
    model.w_qb = View<const BFloat16, 2>(copy_of(m.w_qb.data(), w_qb_bytes), m.w_qb.extent(0), m.w_qb.extent(1));
    model.kv_b = View<const BFloat16, 3>(copy_of(m.kv_b.data(), kv_b_bytes), m.kv_b.extent(0), m.kv_b.extent(1),
                                         m.kv_b.extent(2));
  }
  device.run(cuda::query_kernels(), device.query_args(), kernel);  // prepares it
  return graph_us(kRuns, [&](int i, Queue queue) {
    QueryArgs args = device.query_args();
    args.model = &models[size_t(i % copies)];
    device.run(cuda::query_kernels(), args, kernel, queue);
  });
}

TEST(QueryTimes, AgainstTheBytesOfTheWeights) {
  for (const Shape& shape :
       {Shape{6, 1536, 1, 1, kDs}, Shape{12, 1536, 1, 1, kDs}, Shape{12, 1536, 8, 1, kDs}, Shape{12, 1536, 16, 1, kDs},
        Shape{12, 1536, 32, 1, kDs}, Shape{12, 1536, 64, 1, kDs}, Shape{12, 1536, 256, 1, kDs},
        Shape{24, 1536, 1, 1, kDs}, Shape{24, 1536, 8, 1, kDs}, Shape{24, 1536, 64, 1, kDs}, Shape{48, 1536, 1, 1, kDs},
        Shape{48, 1536, 64, 1, kDs}, Shape{64, 1536, 8, 1, kDs}, Shape{96, 1536, 1, 1, kDs}, Shape{96, 1536, 8, 1, kDs},
        Shape{96, 1536, 64, 1, kDs}, Shape{96, 1536, 256, 1, kDs}, Shape{128, 1536, 8, 1, kF8}}) {
    const Case c = make_case(options_of(shape));
    const double floor = double(shape.heads) * (kHeadQuery * shape.q_lora + kNope * kLatent) * 2 / 4.5e6;
    const ShapeKey key = StageRunner(c, reference_backend(), 1).key();
    for (const auto& kernel : cuda::query_kernels()) {
      if (!kernel.accepts(key).ok) continue;
      const double us = time_of(c, kernel.name);
      std::printf("query %-5s H=%-3d B=%-3d %7.2f us, floor %6.2f, share %3.0f %%\n", std::string(kernel.name).c_str(),
                  shape.heads, shape.rows, us, floor, 100 * floor / us);
    }
  }
}

}  // namespace
}  // namespace dsacore::test
