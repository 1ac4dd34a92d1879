// Whose silence is it: chains of waiting ranks, counters that move, polls that come late; on a window filled by hand.
#include "layer/heartbeat.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <thread>
#include <vector>

#include "dsacore/box.h"
#include "format/mailbox.h"

namespace dsacore {
namespace {

using namespace std::chrono_literals;
using Clock = Heartbeat::Clock;

constexpr int kRanks = 5;
constexpr int kSelf = 0;

/// A window whose heartbeats the test sets; time that it moves.
class SilenceWatchTest : public ::testing::Test {
 protected:
  void working(int rank, uint32_t counter) { set(rank, counter << 8); }
  void waiting(int rank, uint32_t counter, int on) { set(rank, counter << 8 | (uint32_t(on) + 1)); }
  void set(int rank, uint32_t word) { window_[size_t(MailboxLayout::heartbeat(rank))] = word; }

  SilenceWatch watch(int from) { return SilenceWatch(window_, kSelf, kRanks, from, 800ms); }

  /// Polls every 10 ms; the rank that is found lost, and after how many milliseconds; -1: none within `limit`.
  std::pair<int, int> poll(SilenceWatch& w, int limit_ms) {
    for (int t = 10; t <= limit_ms; t += 10) {
      now_ += 10ms;
      if (const auto lost = w.lost(now_)) return {*lost, t};
    }
    return {-1, limit_ms};
  }

  std::vector<uint32_t> window_ = std::vector<uint32_t>(size_t(1 + kRanks) * 16, 0xFFFFFFFFu);
  Clock::time_point now_ = Clock::now();
};

TEST_F(SilenceWatchTest, ASilentRankIsLostAfterTheDeadline) {
  working(1, 7);
  SilenceWatch w = watch(1);
  const auto [lost, after] = poll(w, 2000);
  EXPECT_EQ(lost, 1);
  EXPECT_GE(after, 800);
  EXPECT_LE(after, 830);
}

TEST_F(SilenceWatchTest, ARankWhoseCounterMovesIsNeverLost) {
  working(1, 7);
  SilenceWatch w = watch(1);
  for (uint32_t beat = 8; beat < 40; ++beat) {
    ASSERT_EQ(poll(w, 700).first, -1);
    working(1, beat);
  }
  EXPECT_EQ(poll(w, 2000).first, 1);
}

TEST_F(SilenceWatchTest, TheRankAtTheEndOfTheChainIsJudged) {
  waiting(1, 3, 2);
  waiting(2, 9, 4);
  working(4, 5);
  SilenceWatch w = watch(1);
  ASSERT_EQ(poll(w, 700).first, -1);
  working(4, 6);  // works on: everyone behind it may wait on
  ASSERT_EQ(poll(w, 700).first, -1);
  EXPECT_EQ(poll(w, 2000).first, 4);
}

TEST_F(SilenceWatchTest, TheClockStartsAgainWhenTheChainEndsElsewhere) {
  working(1, 3);
  working(2, 3);
  SilenceWatch w = watch(1);
  ASSERT_EQ(poll(w, 700).first, -1);
  waiting(1, 3, 2);
  ASSERT_EQ(poll(w, 700).first, -1);
  EXPECT_EQ(poll(w, 2000).first, 2);
}

TEST_F(SilenceWatchTest, LinksThatLeadBackAreNotFollowed) {
  waiting(1, 3, kSelf);  // out of date, or a deadlock: the rank waited for is blamed
  SilenceWatch to_self = watch(1);
  EXPECT_EQ(poll(to_self, 2000).first, 1);

  waiting(1, 3, 2);
  waiting(2, 3, 3);
  waiting(3, 3, 2);
  SilenceWatch cycle = watch(1);
  EXPECT_EQ(poll(cycle, 2000).first, 1);
}

TEST_F(SilenceWatchTest, ARankThatWasNeverHeardOfIsJudgedItself) {
  SilenceWatch w = watch(3);
  EXPECT_EQ(poll(w, 2000).first, 3);
}

TEST_F(SilenceWatchTest, APollThatComesLateDoesNotCountAllTheTimeSinceTheLast) {
  working(1, 7);
  SilenceWatch w = watch(1);
  ASSERT_EQ(poll(w, 100).first, -1);
  now_ += 1h;  // the process was stopped: so was the peer
  ASSERT_FALSE(w.lost(now_).has_value());
  ASSERT_EQ(poll(w, 500).first, -1);
  EXPECT_EQ(poll(w, 2000).first, 1);
}

TEST(Heartbeat, StatesReachEveryWindowAndBeatsAreThrottled) {
  const auto ends = make_thread_transports(2);
  std::thread other([&] { ends[1]->open(1024, 10s); });
  ends[0]->open(1024, 10s);
  other.join();
  const auto word_at = [&](int window) {
    return load_word(ends[size_t(window)]->window()[size_t(MailboxLayout::heartbeat(0))]);
  };

  Heartbeat heartbeat(*ends[0]);
  heartbeat.work();
  const uint32_t counter = word_at(0) >> 8;
  EXPECT_EQ(word_at(0) & 0xFF, 0u);
  EXPECT_EQ(word_at(1), word_at(0));

  heartbeat.wait_for(1);
  EXPECT_EQ(word_at(1), counter << 8 | 2) << "a rank that waits does not move its counter";
  heartbeat.work();
  EXPECT_EQ(word_at(1), (counter + 1) << 8);

  std::this_thread::sleep_for(2ms);
  const Clock::time_point start = Clock::now();
  for (int i = 0; i < 20000; ++i) heartbeat.beat();
  const auto spent = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start).count();
  const uint32_t beats = (word_at(1) >> 8) - (counter + 1);
  EXPECT_GE(beats, 1u);
  EXPECT_LE(beats, uint32_t(spent) + 2);

  EXPECT_FALSE(has_left(ends[1]->window(), 0));
  heartbeat.leave();
  EXPECT_TRUE(has_left(ends[1]->window(), 0));
  heartbeat.fall_silent();
  heartbeat.work();
  EXPECT_TRUE(has_left(ends[1]->window(), 0)) << "a silent rank sends nothing";
}

}  // namespace
}  // namespace dsacore
