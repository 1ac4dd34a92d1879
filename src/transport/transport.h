// Transport: moves bytes of a DCP box between ranks; knows nothing of attention. Threads of one process today; shared
// memory, MPI processes and CUDA peers implement the same.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>

namespace dsacore {

/// One rank's end. Every word of a window is 4 bytes, written and read whole; words of one `put` become visible in any
/// order.
class Transport {
 public:
  virtual ~Transport() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  /// Collective, once: gives every rank a window of `bytes` (a multiple of 64), each byte 0xFF, and returns when all
  /// ranks have one. Throws `kPeerLost` where a rank does not come within `deadline`: then on all ranks. Windows may
  /// differ in size, so that ranks which disagree can say so in words that all windows have; nothing else may be put
  /// then.
  virtual void open(int64_t bytes, std::chrono::milliseconds deadline) = 0;

  /// This rank's window. Read it with `load_word` and `take_words`, which arms it again.
  virtual std::span<uint32_t> window() = 0;

  /// Stores `words` at `word_offset` of rank `to`'s window (which may be this rank's). A peer that has loaded them all
  /// sees its own window as this rank left it before. May be called by several threads of the rank at once.
  virtual void put(int to, int64_t word_offset, std::span<const uint32_t> words) = 0;

  /// Called in a poll loop: lets others run, makes progress where the transport needs it.
  virtual void yield() = 0;
};

/// Loads a window word that a peer may be writing (acquire).
inline uint32_t load_word(const uint32_t& word) {
  return std::atomic_ref<uint32_t>(const_cast<uint32_t&>(word)).load(std::memory_order_acquire);
}

/// Stores to a window word (release).
inline void store_word(uint32_t& word, uint32_t value) {
  std::atomic_ref<uint32_t>(word).store(value, std::memory_order_release);
}

/// Stores `words` from `to` on, the last one with release: who has loaded them all sees what this thread did before.
void store_words(uint32_t* to, std::span<const uint32_t> words);

/// Moves up to `words` words of one's own window, from `from` on, to `out` (of 4 bytes each, at any address), stops at
/// the first that still is `armed`, and arms each again that it took; returns how many. Peers see the arming with the
/// next `put`.
size_t take_words(uint32_t* from, size_t words, uint32_t armed, std::byte* out);

}  // namespace dsacore
