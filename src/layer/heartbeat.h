// Heartbeats: how the ranks of a box tell a peer that works from one that is lost (layer.md 5). Each rank stores one
// word in every peer's window: a counter that moves while it works, and whom it waits for. A rank that waits does not
// move its counter: whoever waits for it follows the links to the rank at their end, and judges that one.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>

#include "transport/transport.h"

namespace dsacore {

/// This rank's word.
class Heartbeat {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Heartbeat(Transport& transport) : transport_(transport) {}

  /// Work goes on: moves the counter, at most once a millisecond. Any thread may call it, as often as it likes.
  void beat() noexcept;
  /// Moves the counter and takes back a `wait_for`.
  void work();
  void wait_for(int rank);
  /// This rank makes no further run.
  void leave();
  /// No further word leaves this rank.
  void fall_silent();

 private:
  void send(uint32_t state);

  Transport& transport_;
  std::atomic<int64_t> last_beat_ns_{0};
  std::mutex mutex_;  ///< of what follows, and of the order of the words sent
  uint32_t counter_ = 0;
  bool silent_ = false;
};

/// Whether a peer has left, as its word in this rank's window says.
bool has_left(std::span<const uint32_t> window, int rank);

/// Bounds a poll loop that waits for a word of rank `from`: whose silence is it, and for how long has it lasted?
class SilenceWatch {
 public:
  using Clock = Heartbeat::Clock;

  SilenceWatch(std::span<const uint32_t> window, int self, int ranks, int from, Clock::duration deadline);

  /// To be called on every poll. The rank at the end of the chain, once its counter has stood still for the deadline.
  std::optional<int> lost(Clock::time_point now);

 private:
  int end_of_chain() const;

  std::span<const uint32_t> window_;
  int self_, ranks_, from_;
  Clock::duration deadline_;
  int end_ = -1;
  uint32_t counter_ = 0;
  Clock::duration silence_{0};
  Clock::time_point last_poll_;
};

}  // namespace dsacore
