// What run refuses (spec 10): the argument is named and nothing is written.
#include "support/layer.h"

namespace dsacore {
namespace {

/// A case, its layer, and copies of the step's arrays that a test may spoil.
struct Bench {
  explicit Bench(bool index_table = false, int page = 64) {
    CaseOptions options;
    options.heads = 2;
    options.batch = 4;
    options.q = 2;
    options.context = "70,200";
    options.q_lora = 128;
    options.index_heads = 8;
    options.topk = 16;
    options.index_table = index_table;
    options.page = page;
    source = make_case(options);
    caches = std::make_unique<test::CaseCaches>(source);
    PrepareOptions prepare = test::options_for(source);
    prepare.queries = {1, 2};
    layer = std::make_unique<PreparedLayer>(context, source.config, source.weights, prepare);
    step = source.step;
    const auto own = [](auto view, auto& to) { to.assign(view.data(), view.data() + view.size()); };
    own(step.slots, slots);
    own(step.index_slots, index_slots);
    own(step.block_table, table);
    own(step.seq_lens, seq_lens);
    step.slots = View<const int64_t, 1>(slots.data(), slots.size());
    step.index_slots = View<const int64_t, 1>(index_slots.data(), index_slots.size());
    step.block_table = View<const int32_t, 2>(table.data(), 2, table.size() / 2);
    step.seq_lens = View<const int32_t, 1>(seq_lens.data(), seq_lens.size());
    if (index_table) {
      own(step.index_block_table, index_tables);
      step.index_block_table = View<const int32_t, 2>(index_tables.data(), 2, index_tables.size() / 2);
    }
    out.assign(size_t(4) * 2 * kValue, 0xABCD);
    step.out = View<BFloat16, 2>(reinterpret_cast<BFloat16*>(out.data()), 4, 2 * kValue);
  }

  /// Runs, expects a refusal that names `argument`, and that nothing was written.
  void expect_refused(const std::string& argument) {
    layer->prepare_cache(caches->kv, caches->index);
    const Status status = layer->run(step);
    ASSERT_FALSE(status.ok()) << argument << " was taken";
    EXPECT_EQ(status.error().code, ErrorCode::kRefused);
    EXPECT_EQ(status.error().argument, argument) << status.error().message();
    const test::CaseCaches untouched(source);
    EXPECT_TRUE(test::same_bits(caches->kv_bytes, untouched.kv_bytes, "kv_cache"));
    EXPECT_TRUE(test::same_bits(caches->index_bytes, untouched.index_bytes, "index_cache"));
    EXPECT_EQ(std::count(out.begin(), out.end(), 0xABCD), std::ptrdiff_t(out.size())) << "out was written";
  }

  Case source;
  Context context{{.threads = 1}};
  std::unique_ptr<test::CaseCaches> caches;
  std::unique_ptr<PreparedLayer> layer;
  Step step;
  std::vector<int64_t> slots, index_slots;
  std::vector<int32_t> table, index_tables, seq_lens;
  std::vector<uint16_t> out;
};

TEST(CheckStep, TakesTheStepAsItIs) {
  Bench b;
  b.layer->prepare_cache(b.caches->kv, b.caches->index);
  EXPECT_TRUE(b.layer->run(b.step).ok());
}

TEST(CheckStep, NeedsItsCaches) {
  Bench b;
  const Status status = b.layer->run(b.step);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().argument, "caches");
}

TEST(CheckStep, BatchNoMultipleOfQ) {
  Bench b;
  b.step.q = 3;
  b.expect_refused("batch");
}

TEST(CheckStep, BatchNotPrepared) {
  Bench b;
  b.step.batch = 8;
  b.expect_refused("batch, q");
}

TEST(CheckStep, QNotPrepared) {
  Bench b;
  b.step.q = 4;
  b.expect_refused("batch, q");
}

TEST(CheckStep, MoreRequestsThanPrepared) {
  Bench b;
  b.seq_lens.assign(3, 1);
  b.step.seq_lens = View<const int32_t, 1>(b.seq_lens.data(), 3);
  b.expect_refused("seq_lens extent");
}

TEST(CheckStep, ExtentsThatDisagree) {
  {
    Bench b;
    b.step.projected = b.step.projected.first(3);
    b.expect_refused("projected extent");
  }
  {
    Bench b;
    b.step.slots = b.step.slots.first(3);
    b.expect_refused("slots extent");
  }
  {
    Bench b;
    b.step.index_slots = b.step.index_slots.first(3);
    b.expect_refused("index_slots extent");
  }
  {
    Bench b;
    b.step.block_table = b.step.block_table.first(1);
    b.expect_refused("block_table extent");
  }
  {
    Bench b(true);
    b.step.index_block_table = b.step.index_block_table.first(1);
    b.expect_refused("index_block_table extent");
  }
  {
    Bench b;
    b.step.out = b.step.out.first(2);
    b.expect_refused("out");
  }
}

TEST(CheckStep, PitchAndWidth) {
  {
    Bench b;
    b.step.projected = b.step.projected.with_pitch(b.step.projected.stride(0) + 8);
    b.expect_refused("projected pitch");
  }
  {
    Bench b;
    b.step.projected = View<const BFloat16, 2>(b.step.projected.data(), 4, b.source.sizes.width() - 1)
                           .with_pitch(b.step.projected.stride(0));
    b.expect_refused("projected width");
  }
  for (int64_t pitch : {int64_t(2 * kValue - 1), kMaxPitch + 1}) {
    Bench b;
    b.step.out = b.step.out.with_pitch(pitch);
    b.expect_refused("out pitch");
  }
}

/// The same view, a byte further.
template <class T, int Rank>
void shift(View<T, Rank>& view) {
  std::byte* data = const_cast<std::byte*>(reinterpret_cast<const std::byte*>(view.data()));
  if constexpr (Rank == 1) {
    view = View<T, Rank>(reinterpret_cast<T*>(data + 1), view.extent(0));
  } else {
    view = View<T, Rank>(reinterpret_cast<T*>(data + 1), view.extent(0), view.extent(1)).with_pitch(view.stride(0));
  }
}

TEST(CheckStep, ElementsThatStraddleTheirPlaces) {
  const auto refused = [](const char* argument, auto member) {
    Bench b(true);
    shift(b.step.*member);
    b.expect_refused(argument);
  };
  refused("projected", &Step::projected);
  refused("slots", &Step::slots);
  refused("index_slots", &Step::index_slots);
  refused("block_table", &Step::block_table);
  refused("index_block_table", &Step::index_block_table);
  refused("seq_lens", &Step::seq_lens);
  refused("out", &Step::out);
}

TEST(CheckStep, APageThatIsNotTheBoundOne) {
  Bench b;
  b.step.page = 128;
  b.expect_refused("page");
  b.step.page = 64;
  EXPECT_TRUE(b.layer->run(b.step).ok());
}

TEST(CheckStep, Slots) {
  {
    Bench b;
    b.slots[1] = b.caches->kv.pages * b.caches->kv.page;
    b.expect_refused("slots[1]");
  }
  {
    Bench b;
    b.slots[3] = b.slots[0];
    b.expect_refused("slots[3]");
  }
  {
    Bench b;
    b.index_slots[2] = int64_t(1) << 40;
    b.expect_refused("index_slots[2]");
  }
  {
    Bench b;
    b.index_slots[2] = b.index_slots[1];
    b.expect_refused("index_slots[2]");
  }
}

TEST(CheckStep, SeveralNegativeSlotsAreFine) {
  Bench b;
  b.slots.assign(4, -1);
  b.index_slots = {-1, -5, INT64_MIN, -1};
  b.step.slots = View<const int64_t, 1>(b.slots.data(), 4);
  b.step.index_slots = View<const int64_t, 1>(b.index_slots.data(), 4);
  b.layer->prepare_cache(b.caches->kv, b.caches->index);
  const Status status = b.layer->run(b.step);
  EXPECT_TRUE(status.ok());
  EXPECT_TRUE(test::same_bits(b.caches->kv_bytes, test::CaseCaches(b.source).kv_bytes, "kv_cache"));
}

TEST(CheckStep, Lengths) {
  for (int32_t length : {-1, 201, INT32_MAX}) {
    Bench b;
    b.seq_lens[1] = length;
    b.expect_refused("seq_lens[1]");
  }
}

TEST(CheckStep, PagesOutsideTheCache) {
  for (int32_t page : {-1, INT32_MIN, INT32_MAX, 1000}) {
    Bench b;
    b.table[b.table.size() / 2 + 2] = page;
    b.expect_refused("block_table[1][2]");
  }
}

TEST(CheckStep, PagesPastTheLengthAreNotRead) {
  Bench b;
  for (size_t i = 2; i < b.table.size() / 2; ++i) b.table[i] = -7;  // request 0 has 70 tokens: two pages
  b.layer->prepare_cache(b.caches->kv, b.caches->index);
  EXPECT_TRUE(b.layer->run(b.step).ok());
}

TEST(CheckStep, TableTooNarrow) {
  Bench b;
  b.step.block_table = View<const int32_t, 2>(b.table.data(), 2, 3).with_pitch(b.step.block_table.stride(0));
  b.expect_refused("block_table width");
}

TEST(CheckStep, IndexPages) {
  {
    Bench b(true);
    b.index_tables[b.index_tables.size() / 2 + 3] = int32_t(b.caches->index.pages);
    b.expect_refused("index_block_table[1][3]");
  }
  {
    Bench b(true);
    b.step.index_block_table =
        View<const int32_t, 2>(b.index_tables.data(), 2, 2).with_pitch(b.step.index_block_table.stride(0));
    b.expect_refused("index_block_table width");
  }
  {
    Bench b(false, 128);  // without a table of its own: the index pages of an MLA page must exist
    int32_t highest = 0;
    for (int i = 0; i < 2; ++i) highest = std::max(highest, b.table[b.table.size() / 2 + size_t(i)]);
    b.caches->index.pages = highest * 2 + 1;
    b.layer->prepare_cache(b.caches->kv, b.caches->index);
    EXPECT_FALSE(b.layer->run(b.step).ok());
  }
  {
    Bench b(false, 128);  // an index cache of less than an MLA page serves lengths that it holds, and no longer ones
    std::fill(b.slots.begin(), b.slots.end(), -1);
    std::fill(b.index_slots.begin(), b.index_slots.end(), -1);
    b.table[0] = b.table[b.table.size() / 2] = 0;
    b.seq_lens = {64, 0};
    b.step.seq_lens = View<const int32_t, 1>(b.seq_lens.data(), b.seq_lens.size());
    b.caches->index.pages = 1;
    b.layer->prepare_cache(b.caches->kv, b.caches->index);
    const Status status = b.layer->run(b.step);
    EXPECT_TRUE(status.ok()) << status.error().message();
    b.seq_lens[1] = 65;
    EXPECT_FALSE(b.layer->run(b.step).ok());
  }
}

}  // namespace
}  // namespace dsacore
