// How a box moves words between tensors and mailboxes. Large mail is spread over the rank's threads; waiting is always
// done by the rank's own thread, so that its heartbeat tells one thing.
#include <algorithm>
#include <cstring>

#include "layer/box.h"

namespace dsacore {
namespace {

constexpr int64_t kTaskWords = 8192;              ///< of one task: 32 KB
constexpr int64_t kSpreadWords = 4 * kTaskWords;  ///< below, threads would cost more than they save
constexpr size_t kStageWords = 1024;              ///< words that are made sendable at a time

template <class Byte>
using MailOf = FunctionRef<Mail<Byte>(int peer, int64_t i)>;

template <class Byte>
int64_t words_of(int peer, int64_t count, MailOf<Byte> mail) {
  int64_t words = 0;
  for (int64_t i = 0; i < count; ++i) words += mail(peer, i).words;
  return words;
}

/// The mails of all peers as tasks of about `kTaskWords`: calls `move(peer, i)` for each, peers in turn from `first`
/// on.
template <class Move>
void spread(int ranks, int first, int64_t count, int64_t words_of_peer, Threads& threads, Move&& move) {
  const int64_t parts = std::clamp<int64_t>(words_of_peer / kTaskWords, 1, count);
  threads.for_each(ranks * parts, [&](int64_t task, int) {
    const int peer = int((first + task / parts) % ranks);
    const int64_t part = task % parts;
    for (int64_t i = count * part / parts; i < count * (part + 1) / parts; ++i) move(peer, i);
  });
}

}  // namespace

// ---- out ----

Status Box::Impl::publish(Exchange exchange, int64_t count, Threads& threads, MailOf<const std::byte> mail) {
  if (Status s = alive(); !s.ok()) return s;
  exchange_ = exchange;
  const bool steps_due = step_words_due_;
  if (steps_due) first_exchange_ = exchange;
  step_words_due_ = false;
  // Each rank begins with another and ends with itself, so that no window is filled by all at once.
  const int first = (rank_ + 1) % ranks_;
  const int64_t words = words_of(first, count, mail);
  if (!stop_after && threads.count() > 1 && words * ranks_ >= kSpreadWords) {
    for (int to = 0; to < ranks_ && steps_due; ++to) static_cast<void>(send_steps(to));
    spread(ranks_, first, count, words, threads, [&](int to, int64_t i) { static_cast<void>(send(to, mail(to, i))); });
    return {};
  }

  if (stop_after)
    words_left_ = stop_after(exchange, run_, ranks_ * (words + (steps_due ? MailboxLayout::kStepWords : 0)));
  for (int k = 0; k < ranks_; ++k) {
    const int to = (first + k) % ranks_;
    if (steps_due) {
      if (Status s = send_steps(to); !s.ok()) return s;
    }
    for (int64_t i = 0; i < count; ++i) {
      if (Status s = send(to, mail(to, i)); !s.ok()) return s;
    }
  }
  return words_left_ == 0 ? stop() : Status();
}

Status Box::Impl::send_steps(int to) {
  return send(to, {WordFormat::kPlain, layout_.step(buffer(), rank_),
                   reinterpret_cast<const std::byte*>(step_words_.data()), MailboxLayout::kStepWords});
}

/// Fails only where a test stops the rank.
Status Box::Impl::send(int to, const OutgoingMail& mail) {
  std::array<uint32_t, kStageWords> words;
  for (int64_t done = 0; done < mail.words;) {
    const int64_t n = std::min({mail.words - done, int64_t(kStageWords), words_left_});
    if (n == 0) return stop();
    const std::span<uint32_t> stage(words.data(), size_t(n));
    std::memcpy(stage.data(), mail.data + done * int64_t(sizeof(uint32_t)), stage.size_bytes());
    make_sendable(mail.format, stage);
    transport_->put(to, mail.at + done, stage);
    done += n;
    if (words_left_ != kGoOn) words_left_ -= n;
  }
  heartbeat_.beat();
  return {};
}

// ---- in ----

Status Box::Impl::collect(Exchange exchange, int64_t count, Threads& threads, MailOf<std::byte> mail) {
  if (Status s = alive(); !s.ok()) return s;
  if (Status s = agree(); !s.ok()) return s;
  exchange_ = exchange;
  const auto taken_at = [&](int from, int64_t i) -> int64_t& { return taken_[size_t(from * count + i)]; };
  std::fill_n(taken_.begin(), ranks_ * count, 0);

  const int64_t words = words_of(rank_, count, mail);
  if (threads.count() > 1 && words * ranks_ >= kSpreadWords) {
    for (int k = 0; k < ranks_; ++k) {
      const int from = (rank_ + k) % ranks_;
      if (Status s = wait_for_last(from, count, mail); !s.ok()) return s;
    }
    spread(ranks_, rank_, count, words, threads,
           [&](int from, int64_t i) { taken_at(from, i) = take_ready(mail(from, i), 0); });
  }
  for (int k = 0; k < ranks_; ++k) {  // all of it, or what was late
    const int from = (rank_ + k) % ranks_;
    for (int64_t i = 0; i < count; ++i) {
      if (Status s = take(from, mail(from, i), taken_at(from, i)); !s.ok()) return s;
    }
  }
  return {};
}

/// Waits for the last word of a rank's mail; the others are then there, but for few that the transport brings later.
Status Box::Impl::wait_for_last(int from, int64_t count, MailOf<std::byte> mail) {
  for (int64_t i = count - 1; i >= 0; --i) {
    const IncomingMail last = mail(from, i);
    if (last.words > 0) return wait(window_[size_t(last.at + last.words - 1)], armed_word(last.format), from);
  }
  return {};
}

/// Takes words from word `taken` on, up to the first that is not there; how many are taken by then.
int64_t Box::Impl::take_ready(const IncomingMail& mail, int64_t taken) {
  std::byte* to = mail.data + taken * int64_t(sizeof(uint32_t));
  return taken + int64_t(take_words(&window_[size_t(mail.at + taken)], size_t(mail.words - taken),
                                    armed_word(mail.format), to));
}

/// Takes the words from word `taken` on, waiting where it must.
Status Box::Impl::take(int from, const IncomingMail& mail, int64_t taken) {
  while (taken < mail.words) {
    taken = take_ready(mail, taken);
    if (taken == mail.words) break;
    if (Status s = wait(window_[size_t(mail.at + taken)], armed_word(mail.format), from); !s.ok()) return s;
  }
  heartbeat_.beat();
  return {};
}

}  // namespace dsacore
