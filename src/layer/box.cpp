#include "layer/box.h"

#include <string>
#include <thread>

#include "dsacore/problem.h"

namespace dsacore {
namespace {

using namespace std::chrono_literals;
using Clock = Heartbeat::Clock;
using Fault = AbortRecord::Fault;

constexpr uint32_t kUnsetWord = armed_word(WordFormat::kPlain);
constexpr uint32_t kMailboxVersion = 1;  ///< ranks may be processes of different builds

// A wait first looks again at once, then lets others run between two looks, and after a while sleeps between them.
constexpr int kLooksAtOnce = 64;
constexpr auto kYieldFor = 1ms;
constexpr auto kSleep = 50us;

[[noreturn]] void refuse(std::string argument, std::string value, std::string allowed) {
  throw Exception({ErrorCode::kRefused, std::move(argument), std::move(value), std::move(allowed)});
}

void require_range(const char* name, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return;
  refuse(std::string("box ") + name, std::to_string(value),
         "allowed " + std::to_string(low) + ".." + std::to_string(high));
}

const BoxOptions& checked(const BoxOptions& options) {
  require_range("cap", options.cap, 1, kMaxRows);
  require_range("heads", options.heads, 1, kMaxHeads);
  require_range("topk", options.topk, 1, kMaxTopk);
  require_range("interleave", options.interleave, 1, kMaxContext);
  require_range("deadline", options.deadline.count(), 1, std::numeric_limits<int32_t>::max());
  return options;
}

MailboxSizes sizes_of(const BoxOptions& options, int ranks) {
  const int width = options.partial == PartialFormat::kProj ? kValue : kLatent;
  return {ranks, options.cap, options.heads, options.topk, options.kv_format, width};
}

/// A box's options as the words that ranks compare.
struct Hello {
  static constexpr std::array<const char*, MailboxLayout::kHelloWords> kNames = {
      "version", "cap", "heads", "topk", "kv_format", "partial", "interleave", "deadline"};

  explicit Hello(const BoxOptions& o)
      : words{kMailboxVersion,       uint32_t(o.cap),     uint32_t(o.heads),      uint32_t(o.topk),
              uint32_t(o.kv_format), uint32_t(o.partial), uint32_t(o.interleave), uint32_t(o.deadline.count())} {}

  std::array<uint32_t, MailboxLayout::kHelloWords> words;
};

/// An option as its user knows it.
std::string text_of(size_t option, uint32_t word) {
  const std::string_view name = Hello::kNames[option];
  if (name == "kv_format" && word <= uint32_t(KvFormat::kNvfp4DsMla)) return std::string(name_of(KvFormat(word)));
  if (name == "partial" && word <= uint32_t(PartialFormat::kProj)) return std::string(name_of(PartialFormat(word)));
  return std::to_string(word) + (name == "deadline" ? " ms" : "");
}

const char* name_of_exchange(Exchange exchange) {
  switch (exchange) {
    case Exchange::kOpen: return "options";
    case Exchange::kWeights: return "W_UV";
    case Exchange::kQuery: return "query";
    case Exchange::kCandidates: return "candidates";
    case Exchange::kPartials: return "partials";
  }
  return "unknown";
}

std::string fault_text(const AbortRecord& record, std::chrono::milliseconds deadline) {
  const std::string what = name_of_exchange(record.exchange);
  switch (record.fault) {
    case Fault::kSilent: return "silent for " + std::to_string(deadline.count()) + " ms in the exchange of " + what;
    case Fault::kLeft: return "left before the exchange of " + what;
    case Fault::kOtherRun: return "is in another layer run than rank 0";
    case Fault::kOtherRows: return "runs other rows than rank 0";
    case Fault::kOtherShape: return "runs another q or partial format than rank 0";
    case Fault::kOtherLengths: return "runs other seq_lens than rank 0";
    case Fault::kGaveUp: return "gave up after the exchange of " + what;
  }
  return "lost";
}

// Bits of an abort record; the highest stays clear, so that no record looks unset.
constexpr int kRunBits = 17, kRankBits = 4, kKindBits = 3;

}  // namespace

uint32_t AbortRecord::word() const {
  uint32_t bits = uint32_t(uint64_t(run) % (1u << kRunBits));
  bits = bits << kRankBits | uint32_t(lost);
  bits = bits << kRankBits | uint32_t(detector);
  bits = bits << kKindBits | uint32_t(exchange);
  return bits << kKindBits | uint32_t(fault);
}

AbortRecord AbortRecord::of(uint32_t word, int64_t near_run) {
  const auto next = [&word](int bits) {
    const uint32_t value = word % (1u << bits);
    word >>= bits;
    return value;
  };
  AbortRecord record{};
  record.fault = Fault(next(kKindBits));
  record.exchange = Exchange(next(kKindBits));
  record.detector = int(next(kRankBits));
  record.lost = int(next(kRankBits));
  constexpr int64_t kPeriod = int64_t(1) << kRunBits;
  record.run = near_run - near_run % kPeriod + int64_t(word);
  if (record.run > near_run + kPeriod / 2) record.run -= kPeriod;
  if (record.run < near_run - kPeriod / 2) record.run += kPeriod;
  return record;
}

Box::Impl::Impl(std::shared_ptr<Transport> transport, const BoxOptions& options)
    : transport_(std::move(transport)),
      options_(checked(options)),
      rank_(transport_->rank()),
      ranks_(transport_->size()),
      layout_(sizes_of(options, ranks_)),
      heartbeat_(*transport_),
      taken_(size_t(2 * ranks_) * size_t(options.cap)) {
  require_range("ranks", ranks_, 1, kMaxRanks);
  transport_->open(layout_.bytes(), options_.deadline);
  window_ = transport_->window();
  for (const MailboxRegion& region : layout_.regions()) {
    const uint32_t armed = armed_word(region.format);
    if (armed == kUnsetWord) continue;  // a window is opened with such words
    for (int64_t i = 0; i < region.words; ++i) store_word(window_[size_t(region.first + i)], armed);
  }
  greet();
  check_hellos();
}

Box::Impl::~Impl() { heartbeat_.leave(); }

/// Sends every rank this one's options. Peers send nothing to a mailbox before they have them, so it is armed by then.
void Box::Impl::greet() {
  const Hello hello(options_);
  heartbeat_.work();
  for (int to = 0; to < ranks_; ++to) transport_->put(to, MailboxLayout::hello(rank_), hello.words);
}

void Box::Impl::check_hellos() {
  std::array<uint32_t, MailboxLayout::kHelloWords> first{};
  int odd_rank = -1;
  size_t odd = 0;
  uint32_t odd_word = 0;
  for (int from = 0; from < ranks_; ++from) {
    for (size_t i = 0; i < first.size(); ++i) {
      const uint32_t& word = window_[size_t(MailboxLayout::hello(from)) + i];
      wait(word, kUnsetWord, from).or_throw();
      const uint32_t value = load_word(word);
      if (from == 0) first[i] = value;
      if (value != first[i] && odd_rank < 0) odd_rank = from, odd = i, odd_word = value;
    }
  }
  if (odd_rank < 0) return;
  refuse(std::string("box ") + Hello::kNames[odd], text_of(odd, odd_word) + " on rank " + std::to_string(odd_rank),
         "must be rank 0's " + text_of(odd, first[odd]));
}

Status Box::Impl::begin(const RunAgreement& agreement) {
  if (Status s = alive(); !s.ok()) return s;
  ++run_;
  // Below 2^31 each: none looks empty.
  constexpr uint32_t kMask = 0x7FFFFFFFu;
  step_words_ = {uint32_t(uint64_t(run_)) & kMask, uint32_t(agreement.rows),
                 uint32_t(agreement.q) << 16 | uint32_t(agreement.value_width), agreement.lengths_digest & kMask};
  step_words_due_ = true;
  return {};
}

/// Once a run: takes every rank's step words and compares them with rank 0's, as every rank does, so that all name the
/// same one.
Status Box::Impl::agree() {
  if (agreed_run_ == run_) return {};
  exchange_ = first_exchange_;
  std::array<std::array<uint32_t, MailboxLayout::kStepWords>, kMaxRanks> words{};
  for (int from = 0; from < ranks_; ++from) {
    auto& theirs = words[size_t(from)];
    const IncomingMail mail{WordFormat::kPlain, layout_.step(buffer(), from),
                            reinterpret_cast<std::byte*>(theirs.data()), int64_t(theirs.size())};
    if (Status s = take(from, mail, 0); !s.ok()) return s;
  }
  constexpr std::array kFaults = {Fault::kOtherRun, Fault::kOtherRows, Fault::kOtherShape, Fault::kOtherLengths};
  for (int from = 1; from < ranks_; ++from) {
    for (size_t i = 0; i < kFaults.size(); ++i) {
      if (words[size_t(from)][i] != words[0][i]) return abort(kFaults[i], from);
    }
  }
  agreed_run_ = run_;
  return {};
}

/// Waits until `word`, which rank `from` stores, is no longer `armed`.
Status Box::Impl::wait(const uint32_t& word, uint32_t armed, int from) {
  for (int i = 0; i < kLooksAtOnce; ++i) {
    if (load_word(word) != armed) return {};
  }
  const Clock::time_point start = Clock::now();
  SilenceWatch watch(window_, rank_, ranks_, from, options_.deadline);
  bool told = false;
  for (;;) {
    const bool left = has_left(window_, from);  // seen before the word, so that a last one is not missed
    if (load_word(word) != armed) break;
    if (Status s = alive(); !s.ok()) return s;
    if (left) return abort(Fault::kLeft, from);
    const Clock::time_point now = Clock::now();
    if (const std::optional<int> lost = watch.lost(now)) return abort(Fault::kSilent, *lost);
    if (now - start > kYieldFor) {
      if (!told) heartbeat_.wait_for(from);
      told = true;
      std::this_thread::sleep_for(kSleep);
    }
    transport_->yield();
  }
  if (told) heartbeat_.work();
  return {};
}

Status Box::Impl::alive() {
  if (!dead_.ok()) return dead_;
  const uint32_t word = load_word(window_[size_t(MailboxLayout::abort_record())]);
  return word == kUnsetWord ? Status() : die(AbortRecord::of(word, run_));
}

/// Ends the box on every rank, the lost one included, should it come back.
Status Box::Impl::abort(Fault fault, int lost) {
  if (Status s = alive(); !s.ok()) return s;  // a peer was first
  const AbortRecord record{fault, exchange_, lost, rank_, run_};
  const uint32_t word = record.word();
  for (int to = 0; to < ranks_; ++to) transport_->put(to, MailboxLayout::abort_record(), {&word, 1});
  return die(record);
}

void Box::Impl::give_up() noexcept {
  try {
    static_cast<void>(abort(Fault::kGaveUp, rank_));
  } catch (...) {  // no memory for the text: the record is in every window, this rank's too
  }
}

Status Box::Impl::die(const AbortRecord& record) {
  const std::string where = record.exchange == Exchange::kOpen ? "" : " of layer run " + std::to_string(record.run);
  dead_ = Status({ErrorCode::kPeerLost, "peer", "rank " + std::to_string(record.lost),
                  fault_text(record, options_.deadline) + where + ", as rank " + std::to_string(record.detector) +
                      " noticed; make a new box on every rank"});
  return dead_;
}

Status Box::Impl::stop() {
  heartbeat_.fall_silent();
  dead_ = Status({ErrorCode::kPeerLost, "peer", "rank " + std::to_string(rank_), "stopped by a test"});
  return dead_;
}

Box::Box(std::shared_ptr<Transport> transport, const BoxOptions& options)
    : impl_(std::make_unique<Impl>(std::move(transport), options)) {}
Box::~Box() = default;
int Box::rank() const { return impl_->rank(); }
int Box::size() const { return impl_->size(); }
const BoxOptions& Box::options() const { return impl_->options(); }
int64_t Box::bytes() const { return impl_->layout().bytes(); }

}  // namespace dsacore
