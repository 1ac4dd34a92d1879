#include "layer/heartbeat.h"

#include <algorithm>

#include "format/mailbox.h"

namespace dsacore {
namespace {

using namespace std::chrono_literals;

// The low byte of a heartbeat word: working, 1 + the rank waited for, or left. 0xFF stands in a window that was just
// opened.
constexpr uint32_t kWorking = 0;
constexpr uint32_t kLeft = 0xFE;
constexpr uint32_t kStateBits = 8;
constexpr uint32_t kStateMask = 0xFF;

constexpr auto kBeatInterval = 1ms;
/// Of the deadline: the most that one gap between two polls counts for. So a process that was stopped, or a machine too
/// busy to let this rank poll, is not taken for a silent peer.
constexpr int kGapsPerDeadline = 8;

int64_t nanoseconds(Heartbeat::Clock::time_point now) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now.time_since_epoch()).count();
}

uint32_t word_of(std::span<const uint32_t> window, int rank) {
  return load_word(window[size_t(MailboxLayout::heartbeat(rank))]);
}

}  // namespace

void Heartbeat::beat() noexcept {
  const int64_t now = nanoseconds(Clock::now());
  constexpr int64_t kInterval = std::chrono::nanoseconds(kBeatInterval).count();
  if (now - last_beat_ns_.load(std::memory_order_relaxed) < kInterval) return;
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return;  // another thread is sending one
  last_beat_ns_.store(now, std::memory_order_relaxed);
  ++counter_;
  send(kWorking);
}

void Heartbeat::work() {
  const std::lock_guard lock(mutex_);
  ++counter_;
  send(kWorking);
}

void Heartbeat::wait_for(int rank) {
  const std::lock_guard lock(mutex_);
  send(uint32_t(rank) + 1);
}

void Heartbeat::leave() {
  const std::lock_guard lock(mutex_);
  send(kLeft);
}

void Heartbeat::fall_silent() {
  const std::lock_guard lock(mutex_);
  silent_ = true;
}

void Heartbeat::send(uint32_t state) {
  if (silent_) return;
  const uint32_t word = counter_ << kStateBits | state;
  for (int to = 0; to < transport_.size(); ++to) {
    transport_.put(to, MailboxLayout::heartbeat(transport_.rank()), {&word, 1});
  }
}

bool has_left(std::span<const uint32_t> window, int rank) { return (word_of(window, rank) & kStateMask) == kLeft; }

SilenceWatch::SilenceWatch(std::span<const uint32_t> window, int self, int ranks, int from, Clock::duration deadline)
    : window_(window), self_(self), ranks_(ranks), from_(from), deadline_(deadline), last_poll_(Clock::now()) {}

std::optional<int> SilenceWatch::lost(Clock::time_point now) {
  const int end = end_of_chain();
  const uint32_t counter = word_of(window_, end) >> kStateBits;
  silence_ += std::min(now - last_poll_, deadline_ / kGapsPerDeadline);
  last_poll_ = now;
  if (end != end_ || counter != counter_) {
    end_ = end;
    counter_ = counter;
    silence_ = Clock::duration(0);
  }
  if (silence_ < deadline_) return std::nullopt;
  return end_;
}

/// Where the links end: at a rank that does not wait. Links that lead back say nothing (one of them is out of date);
/// then the rank waited for is judged itself.
int SilenceWatch::end_of_chain() const {
  int end = from_;
  for (int links = 0; links < ranks_; ++links) {
    const uint32_t state = word_of(window_, end) & kStateMask;
    if (state == kWorking || state > uint32_t(ranks_)) return end;
    const int next = int(state) - 1;
    if (next == self_) return end;
    end = next;
  }
  return from_;
}

}  // namespace dsacore
