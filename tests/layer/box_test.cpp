// Making and losing a box: ranks that disagree, do not come, stop at any point, work for long, run something else, or
// leave. All others end in time, with an error that names the right rank, and a new box can be made.
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <map>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "layer/dcp.h"
#include "layer/ranks.h"
#include "support/targets.h"

namespace dsacore {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

// Long enough that no rank is silent for it only because other work has the cores.
constexpr auto kDeadline = test::kSanitized ? 2000ms : 1000ms;
constexpr auto kSlack = 1s;

BoxOptions small_options() {
  BoxOptions options;
  options.cap = 4;
  options.heads = 3;
  options.topk = 8;
  options.deadline = kDeadline;
  return options;
}

/// A rank's tensors for runs of up to `cap` rows, and one run from end to end.
class Worker {
 public:
  Worker(Box& box, int64_t rows) : box_(box.impl()), options_(box.options()), rows_(rows) {
    const size_t b = size_t(rows), ranks = size_t(box.size()), h = size_t(options_.heads), topk = size_t(options_.topk);
    const size_t head = has_fp8_query(options_.kv_format) ? kQueryRow : 2 * kQueryRow;
    query_.resize(b * h * head);
    all_query_.resize(b * ranks * h * head);
    candidates_.resize(b * topk);
    all_candidates_.resize(ranks * b * topk);
    partials_.resize(b * ranks * h * kLatent);
    all_partials_.resize(ranks * b * h * kLatent);
    lse_.resize(b * ranks * h);
    all_lse_.resize(ranks * b * h);
    lengths_.assign(b, int32_t(options_.topk) + 1);
  }

  /// What one rank does otherwise.
  struct Deviation {
    int64_t rows = -1;
    int32_t length = -1;
    int width = kLatent;
    std::function<void(Exchange)> before = [](Exchange) {};   ///< publishing
    std::function<void(Exchange)> between = [](Exchange) {};  ///< publishing and collecting
  };

  Status run(const Deviation& deviation) {
    const int64_t rows = deviation.rows >= 0 ? deviation.rows : rows_;
    const int element = has_fp8_query(options_.kv_format) ? 1 : 2;
    const int64_t ranks = box_.size(), h = options_.heads, topk = options_.topk, width = deviation.width;
    if (deviation.length >= 0) lengths_[0] = deviation.length;
    BoxRun run(box_, threads_, {rows, 1, deviation.width, View<const int32_t, 1>(lengths_.data(), rows)});
    deviation.before(Exchange::kQuery);
    if (Status s = run.publish_query({query_.data(), options_.heads, element}); !s.ok()) return s;
    deviation.between(Exchange::kQuery);
    if (Status s = run.collect_query({all_query_.data(), int(ranks * h), element}); !s.ok()) return s;
    deviation.before(Exchange::kCandidates);
    if (Status s = run.publish_candidates(View<const Candidate, 2>(candidates_.data(), rows, topk)); !s.ok()) return s;
    if (Status s = run.collect_candidates(View<Candidate, 3>(all_candidates_.data(), ranks, rows, topk)); !s.ok())
      return s;
    deviation.before(Exchange::kPartials);
    const View<const BFloat16, 3> partials(partials_.data(), rows, ranks * h, width);
    if (Status s = run.publish_partials(partials, View<const float, 2>(lse_.data(), rows, ranks * h)); !s.ok())
      return s;
    return run.collect_partials(View<BFloat16, 4>(all_partials_.data(), ranks, rows, h, width),
                                View<float, 3>(all_lse_.data(), ranks, rows, h));
  }
  Status run() { return run(Deviation{}); }

 private:
  Box::Impl& box_;
  Threads threads_{2};
  BoxOptions options_;
  int64_t rows_;
  std::vector<std::byte> query_, all_query_;
  std::vector<Candidate> candidates_, all_candidates_;
  std::vector<BFloat16> partials_, all_partials_;
  std::vector<float> lse_, all_lse_;
  std::vector<int32_t> lengths_;
};

void expect_lost(const Status& status, int rank, int lost, std::string_view part = "") {
  ASSERT_FALSE(status.ok()) << "rank " << rank << " ran on";
  EXPECT_EQ(status.error().code, ErrorCode::kPeerLost) << "rank " << rank;
  EXPECT_EQ(status.error().argument, "peer") << "rank " << rank;
  EXPECT_EQ(status.error().value, "rank " + std::to_string(lost))
      << "rank " << rank << ": " << status.error().message();
  EXPECT_NE(status.error().allowed.find(part), std::string::npos)
      << "rank " << rank << ": " << status.error().message();
}

void expect_works(int ranks) {
  const auto ends = make_thread_transports(ranks);
  BoxOptions options = small_options();
  options.deadline = 20s;
  on_ranks(ranks, [&](int rank) {
    Box box(ends[size_t(rank)], options);
    Worker worker(box, 3);
    for (int run = 0; run < 5; ++run) worker.run().or_throw();
  });
}

// ---- making one ----

TEST(Box, HasTheTransportsRankAndItsOptions) {
  const auto ends = make_thread_transports(2);
  on_ranks(2, [&](int rank) {
    const Box box(ends[size_t(rank)], small_options());
    EXPECT_EQ(box.rank(), rank);
    EXPECT_EQ(box.size(), 2);
    EXPECT_EQ(box.options().cap, 4);
    EXPECT_EQ(box.bytes(), int64_t(ends[size_t(rank)]->window().size_bytes()));
  });
}

TEST(Box, RefusesOptionsOutsideTheirRange) {
  const std::map<std::string, std::function<void(BoxOptions&)>> wrong = {
      {"box cap", [](BoxOptions& o) { o.cap = 0; }},
      {"box heads", [](BoxOptions& o) { o.heads = 129; }},
      {"box topk", [](BoxOptions& o) { o.topk = 2049; }},
      {"box interleave", [](BoxOptions& o) { o.interleave = 0; }},
      {"box deadline", [](BoxOptions& o) { o.deadline = 0ms; }}};
  for (const auto& [argument, change] : wrong) {
    BoxOptions options = small_options();
    change(options);
    try {
      const Box box(make_thread_transports(1)[0], options);
      ADD_FAILURE() << argument << " was accepted";
    } catch (const Exception& e) {
      EXPECT_EQ(e.error().code, ErrorCode::kRefused);
      EXPECT_EQ(e.error().argument, argument);
    }
  }
}

TEST(Box, NamesTheOptionAndTheRankThatDisagree) {
  struct Case {
    std::string argument, value, allowed;
    std::function<void(BoxOptions&)> change;
  };
  const std::vector<Case> cases = {
      {"box cap", "64 on rank 2", "must be rank 0's 4", [](BoxOptions& o) { o.cap = 64; }},
      {"box heads", "6 on rank 2", "must be rank 0's 3", [](BoxOptions& o) { o.heads = 6; }},
      {"box topk", "9 on rank 2", "must be rank 0's 8", [](BoxOptions& o) { o.topk = 9; }},
      {"box kv_format", "nvfp4_ds_mla on rank 2", "must be rank 0's fp8_ds_mla",
       [](BoxOptions& o) { o.kv_format = KvFormat::kNvfp4DsMla; }},
      {"box partial", "proj on rank 2", "must be rank 0's auto",
       [](BoxOptions& o) { o.partial = PartialFormat::kProj; }},
      {"box interleave", "64 on rank 2", "must be rank 0's 1", [](BoxOptions& o) { o.interleave = 64; }},
      {"box deadline", "20000 ms on rank 2", "must be rank 0's 10000 ms", [](BoxOptions& o) { o.deadline = 20s; }}};
  for (const Case& c : cases) {
    const auto ends = make_thread_transports(4);
    on_ranks(4, [&](int rank) {
      BoxOptions options = small_options();
      options.deadline = 10s;
      if (rank == 2) c.change(options);
      try {
        const Box box(ends[size_t(rank)], options);
        ADD_FAILURE() << c.argument << ": rank " << rank << " has a box";
      } catch (const Exception& e) {
        EXPECT_EQ(e.error().code, ErrorCode::kRefused);
        EXPECT_EQ(e.error().argument, c.argument);
        EXPECT_EQ(e.error().value, c.value);
        EXPECT_EQ(e.error().allowed, c.allowed);
      }
    });
  }
}

TEST(Box, ARankThatDoesNotComeIsNamedInTime) {
  const auto ends = make_thread_transports(3);
  const Clock::time_point start = Clock::now();
  on_ranks(3, [&](int rank) {
    if (rank == 1) return;
    try {
      const Box box(ends[size_t(rank)], small_options());
      ADD_FAILURE() << "rank " << rank << " has a box";
    } catch (const Exception& e) {
      EXPECT_EQ(e.error().code, ErrorCode::kPeerLost);
      EXPECT_EQ(e.error().value, "rank 1 missing");
    }
  });
  EXPECT_LT(Clock::now() - start, kDeadline + kSlack);
  expect_works(3);
}

TEST(Box, ARankThatOpensItsWindowButSendsNoOptionsIsNamed) {
  const auto ends = make_thread_transports(3);
  const Clock::time_point start = Clock::now();
  on_ranks(3, [&](int rank) {
    if (rank == 1) return ends[1]->open(1 << 20, kDeadline);
    try {
      const Box box(ends[size_t(rank)], small_options());
      ADD_FAILURE() << "rank " << rank << " has a box";
    } catch (const Exception& e) {
      EXPECT_EQ(e.error().code, ErrorCode::kPeerLost);
      EXPECT_EQ(e.error().value, "rank 1");
      EXPECT_NE(e.error().allowed.find("exchange of options"), std::string::npos) << e.what();
    }
  });
  EXPECT_LT(Clock::now() - start, kDeadline + kSlack);
}

// ---- losing a rank ----

struct StopPoint {
  Exchange exchange;
  const char* exchange_name;
  bool large;  ///< enough words that each rank spreads them over its threads
  int part;  ///< of 8: how much of the publication leaves; with 4 ranks 1 is half of the first rank's words, 4 half of
             ///< the ranks
};

class LostRank : public ::testing::TestWithParam<StopPoint> {};

TEST_P(LostRank, EveryOtherRankEndsInTimeAndNamesIt) {
  const StopPoint point = GetParam();
  constexpr int kRanks = 4, kLost = 2, kLastRun = 3;
  const auto ends = make_thread_transports(kRanks);
  std::vector<Status> errors(kRanks);
  std::vector<Clock::time_point> ended(kRanks);
  Clock::time_point stopped;
  on_ranks(kRanks, [&](int rank) {
    BoxOptions options = small_options();
    if (point.large) options.cap = 8, options.heads = 24;
    Box box(ends[size_t(rank)], options);
    if (rank == kLost) {
      box.impl().stop_after = [&](Exchange exchange, int64_t run, int64_t words) {
        if (exchange != point.exchange || run != kLastRun) return Box::Impl::kGoOn;
        stopped = Clock::now();
        return words * point.part / 8;
      };
    }
    Worker worker(box, point.large ? 8 : 3);
    Status& error = errors[size_t(rank)];
    for (int run = 0; run < 10 && error.ok(); ++run) error = worker.run();
    ended[size_t(rank)] = Clock::now();
    // A dead box stays dead, and says so at once.
    const Clock::time_point again = Clock::now();
    const Status second = worker.run();
    EXPECT_FALSE(second.ok());
    if (!second.ok() && !error.ok()) {
      EXPECT_EQ(second.error().message(), error.error().message());
    }
    EXPECT_LT(Clock::now() - again, kDeadline);
    EXPECT_LE(box.impl().run(), kLastRun + 1);
  });
  // Ranks that have all partials run on: the first to notice may be in the next run, and has to be where only the lost
  // rank itself, which sends to itself last, misses something.
  const bool some_run_on = point.exchange == Exchange::kPartials && point.part > 1;
  const bool all_run_on = point.exchange == Exchange::kPartials && point.part > 6;
  for (int rank = 0; rank < kRanks; ++rank) {
    if (rank == kLost) continue;
    if (errors[size_t(rank)].ok()) FAIL() << "rank " << rank << " ran on";
    // Two ranks may notice in the same moment: each tells where it was, all name the same lost rank.
    const std::string next = "layer run " + std::to_string(kLastRun + 1);
    const bool in_next = errors[size_t(rank)].error().allowed.find(next) != std::string::npos;
    if (all_run_on || !some_run_on) {
      EXPECT_EQ(in_next, all_run_on) << errors[size_t(rank)].error().message();
    }
    expect_lost(errors[size_t(rank)], rank, kLost, in_next ? next : "layer run " + std::to_string(kLastRun));
    EXPECT_LT(ended[size_t(rank)] - stopped, kDeadline + kSlack) << "rank " << rank;
  }
  expect_works(kRanks);
}

std::vector<StopPoint> stop_points() {
  std::vector<StopPoint> points;
  for (const bool large : {false, true}) {
    for (const int part : {0, 1, 4, 7, 8}) {
      points.push_back({Exchange::kQuery, "query", large, part});
      if (!large) points.push_back({Exchange::kCandidates, "candidates", large, part});
      points.push_back({Exchange::kPartials, "partials", large, part});
    }
  }
  return points;
}

std::string name_of_point(const ::testing::TestParamInfo<StopPoint>& info) {
  return std::string(info.param.large ? "large_" : "") + info.param.exchange_name + "_after_" +
         std::to_string(info.param.part) + "_of_8";
}

INSTANTIATE_TEST_SUITE_P(StopPoints, LostRank, ::testing::ValuesIn(stop_points()), name_of_point);

TEST(Box, NamesTheMailboxThatStayedEmpty) {
  for (const auto& [exchange, name] : {std::pair{Exchange::kQuery, "exchange of query"},
                                       {Exchange::kCandidates, "exchange of candidates"},
                                       {Exchange::kPartials, "exchange of partials"}}) {
    const auto ends = make_thread_transports(2);
    on_ranks(2, [&, e = exchange, n = name](int rank) {
      Box box(ends[size_t(rank)], small_options());
      if (rank == 1) {
        box.impl().stop_after = [&](Exchange at, int64_t, int64_t) { return at == e ? int64_t(0) : Box::Impl::kGoOn; };
      }
      const Status status = Worker(box, 2).run();
      if (rank == 0) expect_lost(status, 0, 1, n);
    });
  }
}

// Rank 2 stops when half of the ranks have its query: ranks 3 and 0 do, and wait for the candidates of rank 1, which
// waits for rank 2, but begins to so late that the others would lose patience with rank 1 first, did they not follow
// its link.
TEST(Box, AChainOfWaitsNamesItsEndNotTheRankThatWaits) {
  constexpr int kRanks = 4;
  for (int repeat = 0; repeat < 3; ++repeat) {
    const auto ends = make_thread_transports(kRanks);
    on_ranks(kRanks, [&](int rank) {
      Box box(ends[size_t(rank)], small_options());
      if (rank == 2) {
        box.impl().stop_after = [](Exchange, int64_t run, int64_t words) {
          return run == 2 ? words / 2 : Box::Impl::kGoOn;
        };
      }
      Worker worker(box, 2);
      worker.run().or_throw();
      Worker::Deviation late;
      if (rank == 1) late.between = [](Exchange) { std::this_thread::sleep_for(kDeadline / 2); };
      const Status status = worker.run(late);
      if (rank != 2) expect_lost(status, rank, 2, "layer run 2");
    });
  }
}

TEST(Box, ARankThatIsSilentForLongAndComesBackFindsTheBoxDead) {
  const auto ends = make_thread_transports(3);
  on_ranks(3, [&](int rank) {
    Box box(ends[size_t(rank)], small_options());
    Worker worker(box, 3);
    Worker::Deviation sleepy;
    if (rank == 1) {
      sleepy.before = [](Exchange exchange) {
        if (exchange == Exchange::kCandidates) std::this_thread::sleep_for(3 * kDeadline);
      };
    }
    const Clock::time_point start = Clock::now();
    expect_lost(worker.run(sleepy), rank, 1, "exchange of candidates");
    EXPECT_LT(Clock::now() - start, 3 * kDeadline + kSlack);
  });
}

TEST(Box, ARankThatWorksForThreeDeadlinesIsWaitedFor) {
  for (const Exchange slow : {Exchange::kQuery, Exchange::kCandidates, Exchange::kPartials}) {
    const auto ends = make_thread_transports(4);
    on_ranks(4, [&](int rank) {
      Box box(ends[size_t(rank)], small_options());
      Threads threads(2);
      Worker worker(box, 3);
      const WorkHeartbeat working(box.impl(), threads);
      Worker::Deviation busy;
      if (rank == 3) {
        busy.before = [&](Exchange exchange) {
          if (exchange != slow) return;
          const Clock::time_point until = Clock::now() + 3 * kDeadline;
          while (Clock::now() < until) {
            threads.for_each(4, [](int64_t, int) { std::this_thread::sleep_for(1ms); });
          }
        };
      }
      const Status status = worker.run(busy);
      EXPECT_TRUE(status.ok()) << "rank " << rank << ": " << status.error().message();
    });
  }
}

TEST(Box, AHeartbeatEndsWithItsScope) {
  const auto ends = make_thread_transports(1);
  Box box(ends[0], small_options());
  Threads threads(1);
  { const WorkHeartbeat working(box.impl(), threads); }
  const uint32_t& word = ends[0]->window()[size_t(MailboxLayout::heartbeat(0))];
  const uint32_t before = load_word(word);
  std::this_thread::sleep_for(3ms);
  threads.for_each(3, [](int64_t, int) {});
  EXPECT_EQ(load_word(word), before);
}

TEST(Box, ARankThatLeavesIsMissedAtOnceButWhatItSentCounts) {
  const auto ends = make_thread_transports(3);
  const Clock::time_point start = Clock::now();
  on_ranks(3, [&](int rank) {
    BoxOptions options = small_options();
    options.deadline = 60s;
    Box box(ends[size_t(rank)], options);
    Worker worker(box, 3);
    for (int run = 0; run < 20; ++run) worker.run().or_throw();
    if (rank == 1) return;
    expect_lost(worker.run(), rank, 1, "left");
  });
  EXPECT_LT(Clock::now() - start, 30s);
}

TEST(Box, ARunThatIsNotFinishedEndsTheBoxOnEveryRankAtOnce) {
  const auto ends = make_thread_transports(3);
  const Clock::time_point start = Clock::now();
  on_ranks(3, [&](int rank) {
    BoxOptions options = small_options();
    options.deadline = 60s;
    Box box(ends[size_t(rank)], options);
    Worker worker(box, 3);
    worker.run().or_throw();
    if (rank != 1) return expect_lost(worker.run(), rank, 1, "gave up after the exchange of query of layer run 2");
    Worker::Deviation failing;
    failing.between = [](Exchange) { throw std::bad_alloc(); };
    EXPECT_THROW(static_cast<void>(worker.run(failing)), std::bad_alloc);
    // Words of run 2 lie in its mailboxes: it must not run on either.
    expect_lost(worker.run(), rank, 1, "gave up");
  });
  EXPECT_LT(Clock::now() - start, 30s);
}

// ---- ranks that run something else ----

TEST(Box, RanksThatRunSomethingElseAreNamed) {
  struct Case {
    const char* text;
    Worker::Deviation deviation;
    bool runs_ahead = false;
  };
  std::vector<Case> cases;
  cases.push_back({"other rows", {.rows = 2}});
  cases.push_back({"other rows", {.rows = 0}});
  cases.push_back({"other seq_lens", {.length = 5}});
  cases.push_back({"another q or partial format", {.width = kValue}});
  for (const Case& c : cases) {
    const auto ends = make_thread_transports(4);
    on_ranks(4, [&](int rank) {
      BoxOptions options = small_options();
      options.deadline = 20s;
      Box box(ends[size_t(rank)], options);
      Worker worker(box, 3);
      worker.run().or_throw();
      const Clock::time_point start = Clock::now();
      const Status status = rank == 3 ? worker.run(c.deviation) : worker.run();
      expect_lost(status, rank, 3, c.text);
      EXPECT_LT(Clock::now() - start, 10s);
    });
  }
}

TEST(Box, RefusesMoreRowsThanTheMailboxesHold) {
  Box box(make_thread_transports(1)[0], small_options());
  Worker worker(box, 5);
  const Status status = worker.run();
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code, ErrorCode::kInternal);
}

// ---- the abort record ----

TEST(AbortRecord, SurvivesItsWord) {
  using Fault = AbortRecord::Fault;
  for (const Fault fault : {Fault::kSilent, Fault::kLeft, Fault::kOtherRun, Fault::kOtherRows, Fault::kOtherShape,
                            Fault::kOtherLengths, Fault::kGaveUp}) {
    for (const Exchange exchange :
         {Exchange::kOpen, Exchange::kWeights, Exchange::kQuery, Exchange::kCandidates, Exchange::kPartials}) {
      for (const int64_t run :
           {int64_t(0), int64_t(1), int64_t(131071), int64_t(131072), int64_t(131073), int64_t(1) << 40}) {
        for (const int64_t reader : {run, run + 1, run > 0 ? run - 1 : 0}) {
          const AbortRecord record{fault, exchange, 7, 3, run};
          EXPECT_LT(record.word(), 0x80000000u);
          const AbortRecord back = AbortRecord::of(record.word(), reader);
          EXPECT_EQ(back.fault, fault);
          EXPECT_EQ(back.exchange, exchange);
          EXPECT_EQ(back.lost, 7);
          EXPECT_EQ(back.detector, 3);
          EXPECT_EQ(back.run, run) << "read in run " << reader;
        }
      }
    }
  }
}

}  // namespace
}  // namespace dsacore
