// The device's input check: every refusal of a step's contents as the other backends word it, the copies that the
// stages get, the record that keeps the first offender, and what it costs. Tests named Small are those that run under
// the sanitizers.
#include "backends/cuda/check_inputs.h"

#include <cstdio>
#include <random>

#include "cuda/device_stages.h"
#include "cuda/timing.h"
#include "support/layer.h"

namespace dsacore::test {
namespace {

InputRecord fetch_record(const InputRecord* record) { return fetch(View<const InputRecord, 1>(record, 1))[0]; }

/// A case, its layer on the host, and copies of the step's arrays that a test may spoil.
struct Bench {
  explicit Bench(bool index_table = false, int page = 64, int64_t cache_pages = 0) {
    CaseOptions options;
    options.heads = 1;
    options.batch = 12;
    options.q = 2;
    options.context = "70,200,64,1,129,300";
    options.q_lora = 128;
    options.index_heads = 8;
    options.topk = 16;
    options.index_table = index_table;
    options.page = page;
    source = make_case(options);
    caches = std::make_unique<CaseCaches>(source);
    prepare = options_for(source);
    if (cache_pages > 0) caches->index.pages = prepare.cache_pages = cache_pages;
    const auto own = [](auto view, auto& to) { to.assign(view.data(), view.data() + view.size()); };
    own(source.step.slots, slots);
    own(source.step.index_slots, index_slots);
    own(source.step.block_table, table);
    own(source.step.seq_lens, seq_lens);
    if (cache_pages > 0) {  // they may lie past the few pages
      index_slots.assign(index_slots.size(), -1);
      std::fill(table.begin(), table.end(), 1);
    }
    width = source.step.block_table.extent(1);
    if (index_table) {
      own(source.step.index_block_table, index_tables);
      index_width = source.step.index_block_table.extent(1);
    }
  }
  int requests() const { return int(seq_lens.size()); }
  int32_t& entry(int request, int i) { return table[size_t(request * source.step.block_table.extent(1) + i)]; }
  int32_t& index_entry(int request, int i) {
    return index_tables[size_t(request * source.step.index_block_table.extent(1) + i)];
  }

  /// What the host's layer says of the step.
  Status on_host() {
    Context context({.backend = BackendKind::kReference, .threads = 1});
    PreparedLayer layer(context, source.config, source.weights, prepare);
    layer.prepare_cache(caches->kv, caches->index);
    Step step = source.step;
    step.slots = View<const int64_t, 1>(slots.data(), int64_t(slots.size()));
    step.index_slots = View<const int64_t, 1>(index_slots.data(), int64_t(index_slots.size()));
    step.seq_lens = View<const int32_t, 1>(seq_lens.data(), requests());
    step.block_table =
        View<const int32_t, 2>(table.data(), requests(), width).with_pitch(source.step.block_table.extent(1));
    if (!index_tables.empty()) {
      step.index_block_table = View<const int32_t, 2>(index_tables.data(), requests(), index_width)
                                   .with_pitch(source.step.index_block_table.extent(1));
    }
    std::vector<uint16_t> out(size_t(step.batch) * kValue);
    step.out = View<BFloat16, 2>(reinterpret_cast<BFloat16*>(out.data()), step.batch, kValue);
    return layer.run(step);
  }

  Case source;
  std::unique_ptr<CaseCaches> caches;
  PrepareOptions prepare;
  std::vector<int64_t> slots, index_slots;
  std::vector<int32_t> table, index_tables, seq_lens;
  int64_t width = 0, index_width = 0;
};

/// Device memory of a check, filled from a Bench.
class Device {
 public:
  explicit Device(const Bench& b) {
    args.shard = {};
    args.kv = b.caches->kv;
    args.index = b.caches->index;
    args.max_context = b.prepare.max_context;
    args.local_context =
        b.prepare.cache_pages == 0 ? args.max_context : std::min(args.max_context, b.prepare.cache_pages * kIndexPage);
    args.kv.data = args.index.data = nullptr;  // nothing of a cache is touched
    args.slots = upload<int64_t>(b.slots);
    args.index_slots = upload<int64_t>(b.index_slots);
    args.seq_lens = upload<int32_t>(b.seq_lens);
    args.block_table = table(b.table, b.requests(), b.width, b.source.step.block_table.extent(1));
    if (!b.index_tables.empty()) {
      args.index_block_table =
          table(b.index_tables, b.requests(), b.index_width, b.source.step.index_block_table.extent(1));
    }
    args.checked = {make<int64_t>(args.slots.extent(0)), make<int64_t>(args.index_slots.extent(0)),
                    make<int32_t>(args.seq_lens.extent(0))};
    args.record = make<InputRecord>(1).data();
    clear();
  }
  void clear() { cuda::check(cudaMemset(args.record, 0, sizeof(InputRecord)), "cudaMemset"); }
  void run(Queue queue = {}) { cuda::enqueue_input_check(args, {{}, nullptr, nullptr, queue}); }
  InputRecord record() const { return fetch_record(args.record); }
  std::optional<Error> offence() const { return cuda::offence_of(record(), args); }

  /// The stages' copies are the step's arrays, or empty where something was wrong.
  ::testing::AssertionResult copies_are(const Bench& b, bool right) const {
    const auto same = [&](const auto& view, const auto& given, int64_t neutral) {
      const auto got = fetch(view);
      for (size_t i = 0; i < got.size(); ++i) {
        if (int64_t(got[i]) != (right ? int64_t(given[i]) : neutral)) return false;
      }
      return true;
    };
    if (!same(args.checked.slots, b.slots, -1)) return ::testing::AssertionFailure() << "slots";
    if (!same(args.checked.index_slots, b.index_slots, -1)) return ::testing::AssertionFailure() << "index_slots";
    if (!same(args.checked.seq_lens, b.seq_lens, 0)) return ::testing::AssertionFailure() << "seq_lens";
    return ::testing::AssertionSuccess();
  }

  InputCheckArgs args{};

 private:
  template <class T>
  View<T, 1> make(int64_t n) {
    buffers_.push_back(std::make_unique<DeviceBuffer>(n * int64_t(sizeof(T))));
    return View<T, 1>(reinterpret_cast<T*>(buffers_.back()->data()), n);
  }
  template <class T>
  View<const T, 1> upload(const std::vector<T>& host) {
    const View<T, 1> device = make<T>(int64_t(host.size()));
    cuda::check(cudaMemcpy(device.data(), host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
    return device;
  }
  View<const int32_t, 2> table(const std::vector<int32_t>& host, int64_t requests, int64_t width, int64_t pitch) {
    return View<const int32_t, 2>(upload<int32_t>(host).data(), requests, width).with_pitch(pitch);
  }

  std::vector<std::unique_ptr<DeviceBuffer>> buffers_;
};

/// The device finds what the host finds, and says the same.
void expect_as_on_host(Bench& b) {
  const Status host = b.on_host();
  Device device(b);
  device.run();
  const std::optional<Error> error = device.offence();
  EXPECT_TRUE(device.copies_are(b, host.ok()));
  ASSERT_EQ(error.has_value(), !host.ok()) << (host.ok() ? error->message() : host.error().message());
  if (host.ok()) return;
  EXPECT_EQ(error->code, ErrorCode::kRefused);
  EXPECT_EQ(error->argument, host.error().argument);
  EXPECT_EQ(error->value, host.error().value);
  EXPECT_EQ(error->allowed, host.error().allowed);
  EXPECT_EQ(device.record().first, 0u);
  EXPECT_EQ(device.record().arrived, 0u);
}
/// The same, and it is this argument.
void expect_refused(Bench& b, const std::string& argument) {
  SCOPED_TRACE(argument);
  const Status host = b.on_host();
  ASSERT_FALSE(host.ok());
  EXPECT_EQ(host.error().argument, argument);
  expect_as_on_host(b);
}

TEST(CheckInputs, SmallTakesTheStepAsItIs) {
  for (const bool index_table : {false, true}) {
    for (const int page : {64, 128, 2048}) {
      Bench b(index_table, page);
      expect_as_on_host(b);
    }
  }
}

TEST(CheckInputs, SmallSlots) {
  const auto spoilt = [](auto spoil, const char* argument) {
    Bench b;
    spoil(b);
    expect_refused(b, argument);
  };
  spoilt([](Bench& b) { b.slots[1] = b.caches->kv.pages * b.caches->kv.page; }, "slots[1]");
  spoilt([](Bench& b) { b.slots[7] = INT64_MAX; }, "slots[7]");
  spoilt([](Bench& b) { b.slots[3] = b.slots[0]; }, "slots[3]");
  spoilt([](Bench& b) { b.slots[3] = b.slots[9] = b.slots[5]; }, "slots[9]");
  spoilt([](Bench& b) { b.index_slots[2] = int64_t(1) << 40; }, "index_slots[2]");
  spoilt([](Bench& b) { b.index_slots[2] = b.index_slots[1]; }, "index_slots[2]");
  spoilt([](Bench& b) { b.index_slots[2] = b.index_slots[1], b.slots[11] = 1 << 20; }, "slots[11]");
}

TEST(CheckInputs, SmallSeveralNegativeSlotsAreFine) {
  Bench b;
  b.slots.assign(12, -1);
  b.index_slots.assign(12, INT64_MIN);
  expect_as_on_host(b);
}

TEST(CheckInputs, SmallLengths) {
  for (const int32_t length : {-1, INT32_MIN, 301, INT32_MAX}) {
    Bench b;
    b.seq_lens[4] = length;
    b.seq_lens[5] = -3;
    expect_refused(b, "seq_lens[4]");
  }
  Bench b(false, 64, 3);  // caches of 192 tokens were prepared
  expect_refused(b, "seq_lens[1]");
}

TEST(CheckInputs, SmallPagesOutsideTheCache) {
  for (const int32_t page : {-1, INT32_MIN, INT32_MAX, 1000}) {
    Bench b;
    b.entry(1, 2) = page;
    b.entry(4, 0) = page;
    expect_refused(b, "block_table[1][2]");
    Bench indexed(true);
    indexed.index_entry(1, 3) = page;
    expect_refused(indexed, "index_block_table[1][3]");
  }
}

TEST(CheckInputs, SmallPagesPastTheLengthAreNotRead) {
  Bench b(true);
  for (int64_t i = 2; i < b.width; ++i) b.entry(0, int(i)) = b.index_entry(0, int(i)) = -7;  // request 0 has 70 tokens
  expect_as_on_host(b);
}

TEST(CheckInputs, SmallTablesTooNarrow) {
  Bench b;
  b.width = 3;
  expect_refused(b, "block_table width");
  Bench indexed(true);
  indexed.index_width = 2;
  expect_refused(indexed, "index_block_table width");
}

TEST(CheckInputs, SmallDerivedIndexPages) {
  int full = 0, last = 0;
  for (int pages = 2; pages < 24; ++pages) {
    Bench b(false, 128);
    if (pages % 2 == 0) b.seq_lens[0] = 300;  // two whole pages and a part of one, of which one has tokens
    b.caches->index.pages = pages;
    std::fill(b.slots.begin(), b.slots.end(), -1);
    std::fill(b.index_slots.begin(), b.index_slots.end(), -1);
    expect_as_on_host(b);
    Device device(b);
    device.run();
    full += device.record().check == InputCheck::kDerivedIndexPage;
    last += device.record().check == InputCheck::kDerivedLastIndexPage;
  }
  EXPECT_GT(full, 0);
  EXPECT_GT(last, 0);
}

TEST(CheckInputs, SmallKeepsTheFirstRecordAndJudgesEachRun) {
  Bench right, wrong;
  wrong.slots[6] = 1 << 30;
  Device device(wrong);
  device.run();
  const auto slots_of = [&](const Bench& b) {
    cuda::check(cudaMemcpy(const_cast<int64_t*>(device.args.slots.data()), b.slots.data(), b.slots.size() * 8,
                           cudaMemcpyHostToDevice),
                "cudaMemcpy");
  };
  EXPECT_TRUE(device.copies_are(wrong, false));
  slots_of(right);
  device.run();
  EXPECT_TRUE(device.copies_are(right, true));
  EXPECT_EQ(device.offence()->argument, "slots[6]");
  Bench other;
  other.slots[2] = 1 << 29;
  slots_of(other);
  device.run();
  EXPECT_TRUE(device.copies_are(other, false));
  EXPECT_EQ(device.offence()->argument, "slots[6]");
  device.clear();
  device.run();
  EXPECT_EQ(device.offence()->argument, "slots[2]");
}

TEST(CheckInputs, SmallRanksSeeTheirOwnPart) {
  // 300 tokens over 3 ranks, 2 at a time: rank 1 holds 100 of them, two pages.
  Bench b;
  b.width = 2;
  Device device(b);
  device.args.shard = {3, 1, 2};
  device.run();
  EXPECT_FALSE(device.offence().has_value());
  device.args.shard = {};
  device.run();
  EXPECT_EQ(device.offence()->message(), "block_table width = 2: seq_lens[1] = 200 needs 4");
}

TEST(CheckInputs, RandomSpoilingIsFoundAsOnTheHost) {
  std::mt19937 random(3);
  const auto below = [&](size_t n) { return size_t(random() % n); };
  int refused = 0;
  for (int round = 0; round < 200; ++round) {
    Bench b(round % 2 == 0, round % 4 < 2 ? 64 : 128, round % 5 == 0 ? 4 : 0);
    const int32_t bad[] = {-1, INT32_MIN, INT32_MAX, int32_t(b.caches->kv.pages), int32_t(b.caches->index.pages), 0};
    for (size_t i = below(4); i > 0; --i) {
      switch (below(6)) {
        case 0: b.slots[below(12)] = below(2) == 0 ? b.slots[below(12)] : int64_t(below(400)); break;
        case 1: b.index_slots[below(12)] = below(2) == 0 ? b.index_slots[below(12)] : int64_t(below(4000)); break;
        case 2: b.seq_lens[below(6)] = int32_t(below(310)) - 5; break;
        case 3: b.table[below(b.table.size())] = bad[below(6)]; break;
        case 4:
          if (!b.index_tables.empty()) b.index_tables[below(b.index_tables.size())] = bad[below(6)];
          break;
        case 5: b.width = 1 + int64_t(below(size_t(b.width))); break;
      }
    }
    SCOPED_TRACE(round);
    expect_as_on_host(b);
    refused += !b.on_host().ok();
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GT(refused, 60);
}

/// Tables long enough for several units of work: the offender lies in the last one.
TEST(CheckInputs, LongTablesAndGraphs) {
  Bench small;
  constexpr int kRequests = 64, kWidth = 16384;
  Device device(small);
  DeviceBuffer table(int64_t(kRequests) * kWidth * 4), lens(kRequests * 4), lens_out(kRequests * 4);
  cuda::check(cudaMemset(table.data(), 0, size_t(table.bytes())), "cudaMemset");
  std::vector<int32_t> host_lens(kRequests, int32_t(kMaxContext));
  cuda::check(cudaMemcpy(lens.data(), host_lens.data(), kRequests * 4, cudaMemcpyHostToDevice), "cudaMemcpy");
  InputCheckArgs& args = device.args;
  args.block_table = View<const int32_t, 2>(reinterpret_cast<int32_t*>(table.data()), kRequests, kWidth);
  args.seq_lens = View<const int32_t, 1>(reinterpret_cast<int32_t*>(lens.data()), kRequests);
  args.checked.seq_lens = View<int32_t, 1>(reinterpret_cast<int32_t*>(lens_out.data()), kRequests);
  args.max_context = args.local_context = kMaxContext;
  std::printf("input check, 12 slots, 64 requests of     tokens:\n");
  for (const int32_t length : {8192, 131072, int32_t(kMaxContext)}) {
    host_lens.assign(kRequests, length);
    cuda::check(cudaMemcpy(lens.data(), host_lens.data(), kRequests * 4, cudaMemcpyHostToDevice), "cudaMemcpy");
    const double us = graph_us(50, [&](int, Queue queue) { device.run(queue); });
    const double behind = graph_us(50, [&](int, Queue queue) {
      enqueue_spin(5, queue);
      device.run(queue);
    });
    const double alone = graph_us(50, [&](int, Queue queue) { enqueue_spin(5, queue); });
    std::printf("%38d: %5.2f us, %+5.2f us behind a kernel of 5 us\n", length, us, behind - alone);
  }
  EXPECT_FALSE(device.offence().has_value());
  const int32_t bad = -4;
  cuda::check(cudaMemcpy(table.data() + (int64_t(61) * kWidth + 16383) * 4, &bad, 4, cudaMemcpyHostToDevice),
              "cudaMemcpy");
  cuda::check(cudaMemcpy(table.data() + (int64_t(62) * kWidth) * 4, &bad, 4, cudaMemcpyHostToDevice), "cudaMemcpy");
  device.run();
  ASSERT_TRUE(device.offence().has_value());
  EXPECT_EQ(device.offence()->argument, "block_table[61][16383]");
  EXPECT_EQ(device.offence()->value, "-4");
  for (const int32_t length : fetch(args.checked.seq_lens)) ASSERT_EQ(length, 0);
}

}  // namespace
}  // namespace dsacore::test
