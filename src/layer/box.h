// Box::Impl: one rank's end of the DCP mailboxes. It sends and takes words, counts the layer runs, bounds every wait,
// and passes an abort on to all ranks. What the words mean is known to src/format/mailbox.h and src/layer/dcp.cpp.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "dsacore/box.h"
#include "dsacore/status.h"
#include "format/mailbox.h"
#include "layer/heartbeat.h"
#include "threads/threads.h"
#include "transport/transport.h"

namespace dsacore {

/// What travels: the options as a box is made, W_UV at prepare, then the three mailboxes of a layer run.
enum class Exchange : uint8_t { kOpen, kWeights, kQuery, kCandidates, kPartials };

/// What all ranks must agree on in a layer run. They send it to each other, so that a rank that runs something else is
/// found before its words are taken for what they are not.
struct RunAgreement {
  int64_t rows = 0;
  int q = 0;
  int value_width = 0;          ///< of the partials
  uint32_t lengths_digest = 0;  ///< of seq_lens
};

/// Why a box is dead, as one word that travels to every rank.
struct AbortRecord {
  enum class Fault : uint8_t { kSilent, kLeft, kOtherRun, kOtherRows, kOtherShape, kOtherLengths, kGaveUp };

  Fault fault;
  Exchange exchange;
  int lost;      ///< the rank that is to blame
  int detector;  ///< the rank that noticed
  int64_t run;   ///< of the detector

  uint32_t word() const;
  /// `near_run` tells what the word has no room for.
  static AbortRecord of(uint32_t word, int64_t near_run);
};

/// Words of a tensor on their way to, or from, one place in a mailbox.
template <class Byte>
struct Mail {
  WordFormat format;
  int64_t at;  ///< word offset in the window of the rank that takes them
  Byte* data;
  int64_t words;  ///< may be 0
};
using OutgoingMail = Mail<const std::byte>;
using IncomingMail = Mail<std::byte>;

class Box::Impl {
 public:
  static constexpr int64_t kGoOn = std::numeric_limits<int64_t>::max();

  Impl(std::shared_ptr<Transport> transport, const BoxOptions& options);
  ~Impl();
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  int rank() const { return rank_; }
  int size() const { return ranks_; }
  const BoxOptions& options() const { return options_; }
  const MailboxLayout& layout() const { return layout_; }
  /// Layer runs begun so far. The buffer in use is `run() % 2`.
  int64_t run() const { return run_; }
  int buffer() const { return int(run_ % MailboxLayout::kBuffers); }

  /// This rank works. Any of its threads may say so, at any rate.
  void progress() noexcept { heartbeat_.beat(); }

  /// Begins the next layer run. Its first publication sends `agreement`, its first `collect` compares it.
  Status begin(const RunAgreement& agreement);

  /// Sends `mail(to, i)` for `i` in 0..count-1 to every rank, spread over `threads`.
  Status publish(Exchange exchange, int64_t count, Threads& threads, FunctionRef<OutgoingMail(int to, int64_t i)> mail);
  /// Waits for the words that every rank published, moves them to `mail(from, i)` and arms the mailboxes again.
  Status collect(Exchange exchange, int64_t count, Threads& threads,
                 FunctionRef<IncomingMail(int from, int64_t i)> mail);

  /// Ends the box on every rank: this one cannot finish the run that it began.
  void give_up() noexcept;

  /// For tests: asked as a publication of `words` words begins (over all ranks); after so many this rank stops for
  /// good, as if its process had ended.
  std::function<int64_t(Exchange exchange, int64_t run, int64_t words)> stop_after;

 private:
  void greet();
  void check_hellos();
  Status agree();
  Status send_steps(int to);
  Status send(int to, const OutgoingMail& mail);
  int64_t take_ready(const IncomingMail& mail, int64_t taken);
  Status take(int from, const IncomingMail& mail, int64_t taken);
  Status wait_for_last(int from, int64_t count, FunctionRef<IncomingMail(int from, int64_t i)> mail);
  Status wait(const uint32_t& word, uint32_t armed, int from);
  Status alive();
  Status abort(AbortRecord::Fault fault, int lost);
  Status die(const AbortRecord& record);
  Status stop();

  std::shared_ptr<Transport> transport_;
  BoxOptions options_;
  int rank_;
  int ranks_;
  MailboxLayout layout_;
  std::span<uint32_t> window_;
  Heartbeat heartbeat_;
  int64_t run_ = 0;
  int64_t agreed_run_ = 0;  ///< the last run whose agreement was compared
  std::array<uint32_t, MailboxLayout::kStepWords> step_words_{};
  bool step_words_due_ = false;
  Exchange first_exchange_ = Exchange::kOpen;  ///< of the run: the one that carries the step words
  Exchange exchange_ = Exchange::kOpen;        ///< in progress
  int64_t words_left_ = kGoOn;                 ///< of the publication, before this rank stops; a test's
  std::vector<int64_t> taken_;                 ///< of a collection: words of each mail that were there at once
  Status dead_;
};

}  // namespace dsacore
