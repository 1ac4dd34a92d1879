// Ranks that are threads of one process: windows are plain memory that all ends own together, so that a rank may go
// while its peers still store into its window.
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "dsacore/box.h"
#include "dsacore/problem.h"
#include "dsacore/status.h"
#include "memory/aligned_bytes.h"
#include "transport/transport.h"

namespace dsacore {
namespace {

/// What the ends share. `windows` is written under the mutex and constant once every rank has come.
struct Hub {
  explicit Hub(int size) : windows(size_t(size)) {}

  std::mutex mutex;
  std::condition_variable changed;
  std::vector<AlignedBytes> windows;
  int came = 0;
  std::string missing;  ///< once a rank gave up waiting: whom it missed
};

std::string missing_ranks(const Hub& hub) {
  std::string text = hub.came + 1 == int(hub.windows.size()) ? "rank" : "ranks";
  const char* separator = " ";
  for (size_t rank = 0; rank < hub.windows.size(); ++rank) {
    if (hub.windows[rank].data() != nullptr) continue;
    text += separator + std::to_string(rank);
    separator = ", ";
  }
  return text;
}

class ThreadTransport final : public Transport {
 public:
  ThreadTransport(std::shared_ptr<Hub> hub, int rank) : hub_(std::move(hub)), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return int(hub_->windows.size()); }

  void open(int64_t bytes, std::chrono::milliseconds deadline) override {
    if (bytes <= 0 || bytes % 64 != 0) refuse("window bytes", std::to_string(bytes), "a positive multiple of 64");
    AlignedBytes window(bytes, "DCP window");
    std::memset(window.data(), 0xFF, size_t(bytes));

    std::unique_lock lock(hub_->mutex);
    if (own().data() != nullptr) refuse("transport", "opened before", "make new ones for a new box");
    if (hub_->missing.empty()) {
      own() = std::move(window);
      ++hub_->came;
      hub_->changed.notify_all();
      const auto settled = [&] { return hub_->came == size() || !hub_->missing.empty(); };
      if (!hub_->changed.wait_for(lock, deadline, settled)) {
        hub_->missing = missing_ranks(*hub_);
        hub_->changed.notify_all();
      }
    }
    if (!hub_->missing.empty()) {
      throw Exception({ErrorCode::kPeerLost, "box", hub_->missing + " missing",
                       "every rank makes its end within " + std::to_string(deadline.count()) +
                           " ms; make a new box on every rank"});
    }
  }

  std::span<uint32_t> window() override { return {words_of(own()), size_t(own().size() / 4)}; }

  void put(int to, int64_t word_offset, std::span<const uint32_t> words) override {
    store_words(words_of(hub_->windows[size_t(to)]) + word_offset, words);
  }

  void yield() override { std::this_thread::yield(); }

 private:
  [[noreturn]] static void refuse(std::string argument, std::string value, std::string allowed) {
    throw Exception({ErrorCode::kRefused, std::move(argument), std::move(value), std::move(allowed)});
  }
  static uint32_t* words_of(const AlignedBytes& window) { return reinterpret_cast<uint32_t*>(window.data()); }
  AlignedBytes& own() { return hub_->windows[size_t(rank_)]; }

  std::shared_ptr<Hub> hub_;
  int rank_;
};

}  // namespace

std::vector<std::shared_ptr<Transport>> make_thread_transports(int size) {
  if (size < 1 || size > kMaxRanks) {
    throw Exception({ErrorCode::kRefused, "ranks", std::to_string(size), "allowed 1.." + std::to_string(kMaxRanks)});
  }
  const auto hub = std::make_shared<Hub>(size);
  std::vector<std::shared_ptr<Transport>> ends;
  ends.reserve(size_t(size));
  for (int rank = 0; rank < size; ++rank) ends.push_back(std::make_shared<ThreadTransport>(hub, rank));
  return ends;
}

}  // namespace dsacore
