// What ranks exchange arrives bit for bit: every format, special values, changing row counts, ranks that run ahead or
// behind, over hundreds of runs on one box; and every mailbox word is armed again at the end.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "layer/dcp.h"
#include "layer/ranks.h"

namespace dsacore {
namespace {

using namespace std::chrono_literals;

/// SplitMix64.
uint64_t mixed(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

/// Any bits that a tensor of the format may hold, the special ones often.
uint32_t word_of(uint64_t random, WordFormat format) {
  static constexpr uint32_t kE4m3[] = {0x7F7F7F7Fu, 0xFFFFFFFFu, 0xFFFFFF7Fu, 0x80808080u, 0u, 0x7E7EFE7Eu};
  static constexpr uint32_t kPairs[] = {0x80000000u, 0x00008000u, 0x80008000u, 0xFFFFFFFFu, 0x7FC07FC0u, 0xFF807F80u};
  static constexpr uint32_t kLse[] = {0xFF800000u, 0x7FC00000u, 0xFFFFFFFFu, 0x7F800001u, 0x80000000u, 0x7F800000u};
  static constexpr uint32_t kPlain[] = {0xFF800000u, 0u, 0x7FFFFFFFu, 0x80000000u, 1u, 0xFFFFFFFEu};
  const uint32_t any = uint32_t(random);
  if (random >> 61 > 2) return format == WordFormat::kPlain ? any & 0x7FFFFFFFu : any;
  const size_t which = (random >> 32) % 6;
  switch (format) {
    case WordFormat::kE4m3: return kE4m3[which];
    case WordFormat::kBf16Pair: return kPairs[which];
    case WordFormat::kLse: return kLse[which];
    case WordFormat::kPlain: break;
  }
  return kPlain[which];
}

/// What must arrive: the same value, as another code where the mailbox has no room for the one sent.
uint32_t expected(WordFormat format, uint32_t word) {
  if (format == WordFormat::kE4m3 && word == 0xFFFFFFFFu) return 0x7F7F7F7Fu;  // four NaN
  if (format == WordFormat::kBf16Pair && word == 0x80000000u) return 0;        // +0, -0
  if (format == WordFormat::kLse && (word << 1) > 0xFF000000u) return 0x7FC00000u;
  return word;
}

std::vector<uint32_t> tensor_of(uint32_t seed, int run, int rank, int what, int64_t words, WordFormat format) {
  const uint64_t stream = mixed((uint64_t(seed) << 32) + uint64_t(run * 64 + rank * 8 + what));
  std::vector<uint32_t> tensor(static_cast<size_t>(words));
  for (size_t i = 0; i < tensor.size(); ++i) tensor[i] = word_of(mixed(stream + i), format);
  return tensor;
}

struct Plan {
  const char* size;
  int ranks;
  KvFormat kv_format;
  PartialFormat partial;
  int cap, heads, topk, interleave, runs;
};

constexpr auto kSmall = [](int ranks, KvFormat kv_format, PartialFormat partial) {
  return Plan{"small", ranks, kv_format, partial, 5, ranks <= 2 ? 3 : 1, 19, 1 + ranks % 3, 300};
};
// Enough words that each rank spreads them over its threads.
constexpr auto kLarge = [](int ranks, KvFormat kv_format, PartialFormat partial) {
  return Plan{"large", ranks, kv_format, partial, 12, 16, 2048, 64, 24};
};

/// What one run is, the same on every rank.
struct Run {
  int q;
  int64_t rows;
  int width;
  std::vector<int32_t> lengths;
};

Run run_of(const Plan& plan, uint32_t seed, int run) {
  std::seed_seq sequence{seed, uint32_t(run)};
  std::mt19937 random(sequence);
  Run r;
  r.q = 1 + int(random() % 3);
  const int requests = int(random() % uint32_t(plan.cap / r.q + 1));
  r.rows = requests * r.q;
  r.width =
      plan.partial == PartialFormat::kProj || (plan.partial == PartialFormat::kAuto && random() % 2 == 0) ? 128 : 512;
  // Around topk, so that some rows send candidates and some do not; in some runs none does.
  const bool short_ones = random() % 4 == 0;
  for (int i = 0; i < requests; ++i)
    r.lengths.push_back(int32_t(random() % uint32_t(short_ones ? plan.topk : 3 * plan.topk)));
  return r;
}

/// Requires words `[at, at + n)` of what arrived to be what rank `from` sent.
void expect_words(const std::vector<uint32_t>& got, int64_t at, const std::vector<uint32_t>& sent, int64_t sent_at,
                  int64_t n, WordFormat format, const std::string& what) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t want = expected(format, sent[size_t(sent_at + i)]);
    ASSERT_EQ(got[size_t(at + i)], want) << what << " word " << i << " sent as " << std::hex
                                         << sent[size_t(sent_at + i)];
  }
}

void delay(std::mt19937& random) {
  if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 400));
}

/// One rank of one run; compares everything that arrives.
void exchange_once(Box::Impl& box, Threads& threads, const Plan& plan, const Run& r, uint32_t seed, int run,
                   std::mt19937& random) {
  const int rank = box.rank(), ranks = box.size(), heads = plan.heads;
  const int element = has_fp8_query(plan.kv_format) ? 1 : 2;
  const WordFormat query_format = element == 1 ? WordFormat::kE4m3 : WordFormat::kBf16Pair;
  const int64_t query_words = int64_t(heads) * 576 * element / 4, value_words = int64_t(heads) * r.width / 2;
  const int64_t rows = std::max<int64_t>(r.rows, 1), topk = plan.topk;
  const std::string where = "run " + std::to_string(run) + " rank " + std::to_string(rank);
  const uint32_t poison = 0xDEADBEEFu;
  const auto sent = [&](int from, int what, int64_t words, WordFormat format) {
    return tensor_of(seed, run, from, what, words, format);
  };

  BoxRun exchange(box, threads, {r.rows, r.q, r.width, View<const int32_t, 1>(r.lengths.data(), r.lengths.size())});
  std::vector<uint32_t> query = sent(rank, 0, rows * query_words, query_format);
  delay(random);
  exchange.publish_query({reinterpret_cast<std::byte*>(query.data()), heads, element}).or_throw();
  std::vector<uint32_t> candidates = sent(rank, 1, rows * topk * 2, WordFormat::kPlain);
  delay(random);
  exchange
      .publish_candidates(View<const Candidate, 2>(reinterpret_cast<const Candidate*>(candidates.data()), rows, topk))
      .or_throw();
  std::vector<uint32_t> all_query(size_t(rows * ranks * query_words), poison);
  std::vector<uint32_t> all_candidates(size_t(ranks * rows * topk * 2), poison);
  const QueryRows gathered{reinterpret_cast<std::byte*>(all_query.data()), ranks * heads, element};
  const View<Candidate, 3> gathered_candidates(reinterpret_cast<Candidate*>(all_candidates.data()), ranks, rows, topk);
  const bool query_first = run % 2 == 0;  // either order is allowed
  if (query_first) exchange.collect_query(gathered).or_throw();
  exchange.collect_candidates(gathered_candidates).or_throw();
  if (!query_first) exchange.collect_query(gathered).or_throw();

  for (int from = 0; from < ranks; ++from) {
    const auto query_of = sent(from, 0, rows * query_words, query_format);
    const auto candidates_of = sent(from, 1, rows * topk * 2, WordFormat::kPlain);
    for (int64_t b = 0; b < r.rows; ++b) {
      const std::string row = where + " from " + std::to_string(from) + " row " + std::to_string(b);
      expect_words(all_query, (b * ranks + from) * query_words, query_of, b * query_words, query_words, query_format,
                   row + " query");
      const int64_t n = r.lengths[size_t(b / r.q)] - (r.q - 1 - b % r.q);
      const int64_t at = (from * rows + b) * topk * 2;
      if (n > topk) {
        int64_t owned = 0;
        for (int64_t t = 0; t < n; ++t) owned += t / plan.interleave % ranks == from ? 1 : 0;
        const int64_t count = std::min(owned, topk);
        expect_words(all_candidates, at, candidates_of, b * topk * 2, count * 2, WordFormat::kPlain,
                     row + " candidates");
        for (int64_t i = count; i < topk; ++i) {
          ASSERT_EQ(all_candidates[size_t(at + 2 * i)], 0u) << row << " candidate " << i;
          ASSERT_EQ(all_candidates[size_t(at + 2 * i + 1)], 0x7FFFFFFFu) << row << " candidate " << i;
        }
      } else {
        ASSERT_EQ(all_candidates[size_t(at)], poison) << row << ": candidates of a short row travelled";
      }
    }
  }

  std::vector<uint32_t> partials = sent(rank, 2, rows * ranks * value_words, WordFormat::kBf16Pair);
  std::vector<uint32_t> lse = sent(rank, 3, rows * ranks * heads, WordFormat::kLse);
  delay(random);
  exchange
      .publish_partials(
          View<const BFloat16, 3>(reinterpret_cast<const BFloat16*>(partials.data()), rows, ranks * heads, r.width),
          View<const float, 2>(reinterpret_cast<const float*>(lse.data()), rows, ranks * heads))
      .or_throw();
  std::vector<uint32_t> all_partials(size_t(ranks * rows * value_words), poison);
  std::vector<uint32_t> all_lse(size_t(ranks * rows * heads), poison);
  exchange
      .collect_partials(
          View<BFloat16, 4>(reinterpret_cast<BFloat16*>(all_partials.data()), ranks, rows, heads, r.width),
          View<float, 3>(reinterpret_cast<float*>(all_lse.data()), ranks, rows, heads))
      .or_throw();
  for (int from = 0; from < ranks; ++from) {
    const auto partials_of = sent(from, 2, rows * ranks * value_words, WordFormat::kBf16Pair);
    const auto lse_of = sent(from, 3, rows * ranks * heads, WordFormat::kLse);
    for (int64_t b = 0; b < r.rows; ++b) {
      const std::string row = where + " from " + std::to_string(from) + " row " + std::to_string(b);
      expect_words(all_partials, (from * rows + b) * value_words, partials_of, (b * ranks + rank) * value_words,
                   value_words, WordFormat::kBf16Pair, row + " partial");
      expect_words(all_lse, (from * rows + b) * heads, lse_of, (b * ranks + rank) * heads, heads, WordFormat::kLse,
                   row + " lse");
    }
  }
}

/// After all ranks ended, no mailbox holds a word that nobody took.
void expect_armed(Transport& end, const MailboxLayout& layout) {
  for (const MailboxRegion& region : layout.regions()) {
    if (std::string_view(region.name) == "abort record" || std::string_view(region.name) == "heartbeats and hello")
      continue;
    for (int64_t i = 0; i < region.words; ++i) {
      ASSERT_EQ(load_word(end.window()[size_t(region.first + i)]), armed_word(region.format))
          << "rank " << end.rank() << " " << region.name << " word " << i;
    }
  }
}

class DcpExchange : public ::testing::TestWithParam<Plan> {};

TEST_P(DcpExchange, EveryWordOfEveryRunArrives) {
  const Plan plan = GetParam();
  const uint32_t seed = uint32_t(plan.ranks * 100 + int(plan.kv_format) * 10 + int(plan.partial));
  const auto ends = make_thread_transports(plan.ranks);
  BoxOptions options;
  options.cap = plan.cap;
  options.heads = plan.heads;
  options.topk = plan.topk;
  options.kv_format = plan.kv_format;
  options.partial = plan.partial;
  options.interleave = plan.interleave;
  options.deadline = 60s;
  std::vector<std::unique_ptr<Box>> boxes(static_cast<size_t>(plan.ranks));
  on_ranks(plan.ranks, [&](int rank) {
    boxes[size_t(rank)] = std::make_unique<Box>(ends[size_t(rank)], options);
    Threads threads(1 + (rank + 1) % 3);
    std::mt19937 random(seed * 8 + uint32_t(rank));
    for (int run = 0; run < plan.runs; ++run) {
      exchange_once(boxes[size_t(rank)]->impl(), threads, plan, run_of(plan, seed, run), seed, run, random);
      if (::testing::Test::HasFatalFailure()) return;
    }
  });
  if (HasFailure()) return;
  for (int rank = 0; rank < plan.ranks; ++rank) {
    EXPECT_EQ(boxes[size_t(rank)]->impl().run(), plan.runs);
    expect_armed(*ends[size_t(rank)], boxes[size_t(rank)]->impl().layout());
  }
}

std::vector<Plan> plans() {
  std::vector<Plan> all;
  for (const KvFormat format : {KvFormat::kFp8DsMla, KvFormat::kFp8}) {
    for (const PartialFormat partial : {PartialFormat::kBf16, PartialFormat::kProj, PartialFormat::kAuto}) {
      for (const int ranks : {1, 2, 4, 8}) all.push_back(kSmall(ranks, format, partial));
    }
    all.push_back(kLarge(3, format, PartialFormat::kAuto));
  }
  all.push_back(kSmall(2, KvFormat::kNvfp4DsMla, PartialFormat::kBf16));  // its query is FP8 too
  return all;
}

std::string name_of_plan(const ::testing::TestParamInfo<Plan>& info) {
  return std::string(info.param.size) + "_D" + std::to_string(info.param.ranks) + "_" +
         std::string(name_of(info.param.kv_format)) + "_" + std::string(name_of(info.param.partial));
}

INSTANTIATE_TEST_SUITE_P(Plans, DcpExchange, ::testing::ValuesIn(plans()), name_of_plan);

TEST(AllGather, BringsAnyBitsOfEveryRankInOrder) {
  for (const int ranks : {1, 2, 8}) {
    for (const KvFormat format : {KvFormat::kFp8DsMla, KvFormat::kFp8}) {
      const auto ends = make_thread_transports(ranks);
      BoxOptions options;
      options.cap = 3;
      options.heads = 1;
      options.topk = 4;
      options.kv_format = format;
      options.deadline = 60s;
      on_ranks(ranks, [&](int rank) {
        Box box(ends[size_t(rank)], options);
        Threads threads(1 + rank % 2);
        // A row of the mailbox holds 144 or 288; three rows a buffer. 70000 holds every 16-bit pattern.
        for (const size_t size :
             {size_t(1), size_t(143), size_t(144), size_t(288), size_t(289), size_t(864), size_t(865), size_t(70000)}) {
          const auto value = [&](int from, size_t i) { return uint16_t(i * 40503u + uint32_t(from) * 257u); };
          std::vector<BFloat16> mine(size), all(size * size_t(ranks), BFloat16{0xDEAD});
          for (size_t i = 0; i < size; ++i) mine[i].bits = value(rank, i);
          all_gather(box.impl(), threads, mine, all).or_throw();
          for (int from = 0; from < ranks; ++from) {
            for (size_t i = 0; i < size; ++i) {
              ASSERT_EQ(all[size_t(from) * size + i].bits, value(from, i))
                  << "size " << size << " from " << from << " at " << i;
            }
          }
        }
      });
    }
  }
}

TEST(AllGather, RanksWithOtherSizesAreNamed) {
  const auto ends = make_thread_transports(3);
  BoxOptions options;
  options.heads = 1;
  options.topk = 4;
  on_ranks(3, [&](int rank) {
    Box box(ends[size_t(rank)], options);
    std::vector<BFloat16> mine(rank == 2 ? 1000 : 900), all(3000);
    Threads threads(1);
    const Status status = all_gather(box.impl(), threads, mine, all);
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.error().code, ErrorCode::kPeerLost);
    EXPECT_EQ(status.error().value, "rank 2");
  });
}

}  // namespace
}  // namespace dsacore
