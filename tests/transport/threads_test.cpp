// The thread transport: windows, puts, the rank that does not come, and the order that the mailboxes stand on.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "dsacore/box.h"
#include "dsacore/status.h"
#include "layer/ranks.h"
#include "transport/transport.h"

namespace dsacore {
namespace {

using namespace std::chrono_literals;

constexpr uint32_t kUnset = 0xFFFFFFFFu;

TEST(ThreadTransport, OpensWindowsOfUnsetWordsAndDeliversEachPut) {
  for (const int size : {1, 2, 5, 8}) {
    const auto ends = make_thread_transports(size);
    on_ranks(size, [&](int rank) {
      Transport& end = *ends[size_t(rank)];
      EXPECT_EQ(end.rank(), rank);
      EXPECT_EQ(end.size(), size);
      end.open(64 * size, 10s);
      EXPECT_EQ(end.window().size(), size_t(16 * size));
      EXPECT_EQ(reinterpret_cast<uintptr_t>(end.window().data()) % 64, 0u);
      // Words 1..3 of line `rank` of every window; words 0 and 4..15 stay as they were opened.
      for (int to = 0; to < size; ++to) {
        const uint32_t base = uint32_t(1000 * rank + 10 * to);
        end.put(to, 16 * rank + 1, std::vector<uint32_t>{base, base + 1, base + 2});
      }
      for (int from = 0; from < size; ++from) {
        for (int i = 0; i < 3; ++i) {
          const uint32_t& word = end.window()[size_t(16 * from + 1 + i)];
          while (load_word(word) == kUnset) end.yield();
          EXPECT_EQ(load_word(word), uint32_t(1000 * from + 10 * rank + i)) << "from rank " << from << " word " << i;
        }
      }
    });
    for (const auto& end : ends) {
      for (size_t i = 0; i < end->window().size(); ++i) {
        const bool written = i % 16 >= 1 && i % 16 <= 3;
        EXPECT_EQ(load_word(end->window()[i]) == kUnset, !written) << "rank " << end->rank() << " word " << i;
      }
    }
  }
}

TEST(ThreadTransport, NamesTheRanksThatDoNotComeOnEveryRank) {
  const auto ends = make_thread_transports(4);
  const auto start = std::chrono::steady_clock::now();
  on_ranks(4, [&](int rank) {
    if (rank == 1 || rank == 3) return;
    try {
      ends[size_t(rank)]->open(64, 100ms);
      ADD_FAILURE() << "rank " << rank << " opened without ranks 1 and 3";
    } catch (const Exception& e) {
      EXPECT_EQ(e.error().code, ErrorCode::kPeerLost);
      EXPECT_EQ(e.error().value, "ranks 1, 3 missing");
    }
  });
  EXPECT_LT(std::chrono::steady_clock::now() - start, 1100ms);
  // One that comes later is told so at once.
  try {
    ends[3]->open(64, 10s);
    ADD_FAILURE() << "a late rank opened";
  } catch (const Exception& e) {
    EXPECT_EQ(e.error().code, ErrorCode::kPeerLost);
    EXPECT_EQ(e.error().value, "ranks 1, 3 missing");
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, 5s);
}

TEST(ThreadTransport, WaitsForARankThatComesInTime) {
  const auto ends = make_thread_transports(3);
  on_ranks(3, [&](int rank) {
    std::this_thread::sleep_for(rank * 50ms);
    EXPECT_NO_THROW(ends[size_t(rank)]->open(64, 10s));
  });
}

TEST(ThreadTransport, RefusesWrongUse) {
  EXPECT_THROW(make_thread_transports(0), Exception);
  EXPECT_THROW(make_thread_transports(9), Exception);
  const auto ends = make_thread_transports(1);
  for (const int64_t bytes : {int64_t(0), int64_t(-64), int64_t(60)}) {
    EXPECT_THROW(ends[0]->open(bytes, 1s), Exception) << bytes;
  }
  ends[0]->open(64, 1s);
  try {
    ends[0]->open(64, 1s);
    ADD_FAILURE() << "opened twice";
  } catch (const Exception& e) {
    EXPECT_EQ(e.error().code, ErrorCode::kRefused);
    EXPECT_EQ(e.error().argument, "transport");
  }
}

TEST(ThreadTransport, AWindowOutlivesItsRank) {
  auto ends = make_thread_transports(2);
  on_ranks(2, [&](int rank) { ends[size_t(rank)]->open(128, 10s); });
  ends[1].reset();
  const std::vector<uint32_t> words(32, 7u);
  ends[0]->put(1, 0, words);  // the address sanitizer is the judge
}

TEST(TakeWords, StopsAtTheFirstArmedWordAndArmsWhatItTook) {
  const uint32_t armed = 0x80000000u;
  std::vector<uint32_t> window = {1, 2, armed, 4};
  std::vector<uint32_t> out(4, 99u);
  const auto bytes = reinterpret_cast<std::byte*>(out.data());
  EXPECT_EQ(take_words(window.data(), 4, armed, bytes), 2u);
  EXPECT_EQ(out, (std::vector<uint32_t>{1, 2, 99, 99}));
  EXPECT_EQ(window, (std::vector<uint32_t>{armed, armed, armed, 4}));
  EXPECT_EQ(take_words(&window[3], 1, armed, bytes), 1u);
  EXPECT_EQ(out[0], 4u);
  EXPECT_EQ(take_words(window.data(), 0, armed, bytes), 0u);
}

// The mailboxes' use in small: each round, each rank sends words to every rank, takes what it gets, and so arms it for
// the round after next. A word that is armed after it was stored is lost, and the round never ends.
TEST(ThreadTransport, TwoBuffersInTurnLoseNoWord) {
  constexpr int kSize = 4, kWords = 37, kRounds = 2000;
  const auto ends = make_thread_transports(kSize);
  on_ranks(kSize, [&](int rank) {
    Transport& end = *ends[size_t(rank)];
    end.open((2 * kSize * kWords * 4 + 63) / 64 * 64, 10s);
    const auto at = [&](int round, int source) { return ((round % 2) * kSize + source) * kWords; };
    std::vector<uint32_t> words(kWords), out(kWords);
    for (int round = 0; round < kRounds; ++round) {
      const auto value = [&](int from, int i) { return uint32_t(round * 100000 + from * 1000 + i); };
      for (int i = 0; i < kWords; ++i) words[size_t(i)] = value(rank, i);
      for (int to = 0; to < kSize; ++to) end.put((rank + to) % kSize, at(round, rank), words);
      for (int from = 0; from < kSize; ++from) {
        size_t taken = 0;
        while (taken < kWords) {
          taken += take_words(&end.window()[size_t(at(round, from)) + taken], kWords - taken, kUnset,
                              reinterpret_cast<std::byte*>(&out[taken]));
          if (taken < kWords) end.yield();
        }
        for (int i = 0; i < kWords; ++i) {
          ASSERT_EQ(out[size_t(i)], value(from, i))
              << "round " << round << " rank " << rank << " from " << from << " word " << i;
        }
      }
    }
  });
}

}  // namespace
}  // namespace dsacore
