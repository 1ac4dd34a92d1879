// MailboxLayout: a rank's DCP window word by word (spec 7): a header, then the mailboxes that its peers write and it
// reads. The one place that knows where a word lies, what an empty one holds and what a sender may not send.
//
// A word is its own flag: it is armed with a value that no sender sends, so a reader that finds another one has the
// payload. No flags, no barrier and no order between words are needed. The reader arms a word again as it takes it.
//
// Two buffers, used in turn by a counter that the box advances once a layer run, are enough. In every run each rank
// sends every peer its step words, with the query, also when there are no rows. A peer stores into buffer b for run i+2
// only after it ended run i+1, so after it took my step words of run i+1; these I sent after I ended run i, so after I
// had taken, and armed again, every word of buffer b that the peer had sent for run i (ranks that agree on the step
// words send and take the same words). Each "after" is either one thread's program order or a release store that an
// acquire load took its value from, so my arming comes before the peer's store in the order of that word. How many rows
// a run has plays no part: a run arms what it took.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "dsacore/formats.h"
#include "dsacore/host_device.h"
#include "dsacore/problem.h"

namespace dsacore {

/// What the words of a mailbox hold, by which they are armed and made sendable.
enum class WordFormat : uint8_t {
  kPlain,     ///< integers below 0xFFFFFFFF: the header, candidates
  kE4m3,      ///< four e4m3 codes
  kBf16Pair,  ///< two BF16, the first in the low half
  kLse,       ///< FP32
};

/// The value of an empty word: four e4m3 codes 0xFF, which to_e4m3 never gives; the pair (+0, -0); a NaN that is not
/// the canonical one; no key and no token id.
DSACORE_HD constexpr uint32_t armed_word(WordFormat format) {
  return format == WordFormat::kBf16Pair ? 0x80000000u : 0xFFFFFFFFu;
}

/// The word to send for `word`: itself, or its equal where it would look empty. NaN must travel too.
DSACORE_HD constexpr uint32_t sendable(WordFormat format, uint32_t word) {
  switch (format) {
    case WordFormat::kPlain: break;
    case WordFormat::kE4m3: return word == armed_word(format) ? 0x7F7F7F7Fu : word;
    case WordFormat::kBf16Pair: return word == armed_word(format) ? 0u : word;
    case WordFormat::kLse: return (word & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC00000u : word;
  }
  return word;
}

inline void make_sendable(WordFormat format, std::span<uint32_t> words) {
  if (format == WordFormat::kPlain) return;
  for (uint32_t& word : words) word = sendable(format, word);
}

/// What decides the layout; equal on all ranks of a box.
struct MailboxSizes {
  int ranks = 0;  ///< D
  int cap = 0;    ///< rows of a mailbox
  int heads = 0;  ///< H of one rank
  int topk = 0;
  KvFormat kv_format = KvFormat::kFp8DsMla;
  int value_width = 0;  ///< widest partial row of a head: 512, or 128 where only `proj` partials travel
};

/// A run of words of one format.
struct MailboxRegion {
  const char* name;
  int64_t first;
  int64_t words;
  WordFormat format;
};

/// Offsets count 4-byte words. Every region, and every source's part of one, begins at a multiple of 64 bytes.
class MailboxLayout {
 public:
  static constexpr int64_t kLineWords = 16;      ///< 64 bytes
  static constexpr int64_t kHelloWords = 8;      ///< a rank's options, exchanged once
  static constexpr int64_t kStepWords = 4;       ///< what ranks must agree on in a run
  static constexpr int64_t kCandidateWords = 2;  ///< key, token id
  static constexpr int kBuffers = 2;
  static constexpr int kRegions = 7;

  DSACORE_HD constexpr explicit MailboxLayout(const MailboxSizes& sizes)
      : sizes_(sizes),
        query_words_(int64_t(sizes.heads) * kQueryRow * (has_fp8_query(sizes.kv_format) ? 1 : 2) / 4),
        candidate_words_(line_up(kCandidateWords * sizes.topk)),
        value_block_(line_up(int64_t(sizes.cap) * sizes.heads * sizes.value_width / 2)),
        lse_block_(line_up(int64_t(sizes.cap) * sizes.heads)) {
    const int64_t sources = int64_t(kBuffers) * sizes.ranks;
    steps_at_ = (1 + sizes.ranks) * kLineWords;
    query_at_ = steps_at_ + sources * kLineWords;
    candidates_at_ = query_at_ + sources * sizes.cap * query_words_;
    value_at_ = candidates_at_ + sources * sizes.cap * candidate_words_;
    lse_at_ = value_at_ + sources * value_block_;
    end_ = lse_at_ + sources * lse_block_;
  }

  DSACORE_HD constexpr const MailboxSizes& sizes() const { return sizes_; }
  DSACORE_HD constexpr int64_t bytes() const { return end_ * 4; }
  DSACORE_HD constexpr WordFormat query_format() const {
    return has_fp8_query(sizes_.kv_format) ? WordFormat::kE4m3 : WordFormat::kBf16Pair;
  }

  // ---- header: line 0 the abort record, then a line a rank. It does not depend on the sizes but for `ranks`. ----

  DSACORE_HD static constexpr int64_t abort_record() { return 0; }
  DSACORE_HD static constexpr int64_t heartbeat(int rank) { return (1 + rank) * kLineWords; }
  DSACORE_HD static constexpr int64_t hello(int rank) { return heartbeat(rank) + 1; }
  DSACORE_HD constexpr int64_t step(int buffer, int source) const {
    return steps_at_ + (int64_t(buffer) * sizes_.ranks + source) * kLineWords;
  }

  // ---- mailboxes ----

  /// [2, cap, D*H, 576]: the query rows of one rank's heads, `query_words()` words.
  DSACORE_HD constexpr int64_t query(int buffer, int64_t row, int source) const {
    return query_at_ + ((int64_t(buffer) * sizes_.cap + row) * sizes_.ranks + source) * query_words_;
  }
  DSACORE_HD constexpr int64_t query_words() const { return query_words_; }

  /// [2, D, cap, topk] of {key, token id}, `kCandidateWords` each.
  DSACORE_HD constexpr int64_t candidates(int buffer, int source, int64_t row) const {
    return candidates_at_ + ((int64_t(buffer) * sizes_.ranks + source) * sizes_.cap + row) * candidate_words_;
  }

  /// [2, D, cap, H, width] BF16, `value_words(width)` words; `width` is that of the run, at most the reserved one.
  DSACORE_HD constexpr int64_t value(int buffer, int source, int64_t row, int width) const {
    return value_at_ + (int64_t(buffer) * sizes_.ranks + source) * value_block_ + row * value_words(width);
  }
  DSACORE_HD constexpr int64_t value_words(int width) const { return int64_t(sizes_.heads) * width / 2; }

  /// [2, D, cap, H] FP32: H words.
  DSACORE_HD constexpr int64_t lse(int buffer, int source, int64_t row) const {
    return lse_at_ + (int64_t(buffer) * sizes_.ranks + source) * lse_block_ + row * sizes_.heads;
  }
  DSACORE_HD constexpr int64_t lse_words() const { return sizes_.heads; }

  /// All words of the window, in order.
  constexpr std::array<MailboxRegion, kRegions> regions() const {
    return {{{"abort record", 0, kLineWords, WordFormat::kPlain},
             {"heartbeats and hello", kLineWords, steps_at_ - kLineWords, WordFormat::kPlain},
             {"steps", steps_at_, query_at_ - steps_at_, WordFormat::kPlain},
             {"query", query_at_, candidates_at_ - query_at_, query_format()},
             {"candidates", candidates_at_, value_at_ - candidates_at_, WordFormat::kPlain},
             {"value", value_at_, lse_at_ - value_at_, WordFormat::kBf16Pair},
             {"lse", lse_at_, end_ - lse_at_, WordFormat::kLse}}};
  }

 private:
  DSACORE_HD static constexpr int64_t line_up(int64_t words) {
    return (words + kLineWords - 1) / kLineWords * kLineWords;
  }

  MailboxSizes sizes_;
  int64_t query_words_;      // of one row and rank
  int64_t candidate_words_;  // of one row, lined up
  int64_t value_block_;      // of one source and buffer
  int64_t lse_block_;
  int64_t steps_at_ = 0, query_at_ = 0, candidates_at_ = 0, value_at_ = 0, lse_at_ = 0, end_ = 0;
};

}  // namespace dsacore
