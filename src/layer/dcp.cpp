#include "layer/dcp.h"

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

namespace dsacore {
namespace {

/// FNV-1a of the lengths: ranks compare it.
uint32_t digest_of(View<const int32_t, 1> lengths) {
  uint32_t digest = 2166136261u;
  for (int64_t r = 0; r < lengths.extent(0); ++r) digest = (digest ^ uint32_t(lengths(r))) * 16777619u;
  return digest;
}

const std::byte* bytes_at(const void* data) { return static_cast<const std::byte*>(data); }
std::byte* bytes_at(void* data) { return static_cast<std::byte*>(data); }

}  // namespace

WorkHeartbeat::WorkHeartbeat(Box::Impl& box, Threads& threads) : threads_(threads) {
  threads_.set_progress([](void* impl) { static_cast<Box::Impl*>(impl)->progress(); }, &box);
}
WorkHeartbeat::~WorkHeartbeat() { threads_.set_progress(nullptr, nullptr); }

BoxRun::BoxRun(Box::Impl& box, Threads& threads, const DcpShape& shape)
    : box_(box), threads_(threads), heartbeat_(box, threads), shape_(shape) {}

BoxRun::~BoxRun() {
  if (to_collect_ > 0) box_.give_up();
}

// ---- query ----

Status BoxRun::publish_query(const QueryRows& mine) {
  const MailboxLayout& layout = box_.layout();
  if (shape_.rows > layout.sizes().cap || shape_.partial_width > layout.sizes().value_width) {
    return Status({ErrorCode::kInternal, "DCP run",
                   std::to_string(shape_.rows) + " rows, partials of " + std::to_string(shape_.partial_width),
                   "at most what the mailboxes hold"});
  }
  if (Status s = box_.begin({shape_.rows, shape_.q, shape_.partial_width, digest_of(shape_.seq_lens)}); !s.ok())
    return s;
  to_collect_ = 3;
  return box_.publish(Exchange::kQuery, shape_.rows, threads_, [&](int, int64_t row) -> OutgoingMail {
    return {layout.query_format(), layout.query(box_.buffer(), row, box_.rank()), mine.at(row, 0),
            layout.query_words()};
  });
}

Status BoxRun::collect_query(const QueryRows& all) {
  const MailboxLayout& layout = box_.layout();
  --to_collect_;
  return box_.collect(Exchange::kQuery, shape_.rows, threads_, [&](int from, int64_t row) -> IncomingMail {
    return {layout.query_format(), layout.query(box_.buffer(), row, from), all.at(row, from * layout.sizes().heads),
            layout.query_words()};
  });
}

// ---- candidates ----

/// How many a rank has of a row: its local best (spec 7, step 2), or none where n <= topk: every token is selected
/// then, and no score is needed (spec 5, step 10).
int64_t BoxRun::candidates_of(int rank, int64_t row) const {
  const int64_t topk = box_.layout().sizes().topk;
  const int64_t n = keys_seen(shape_.seq_lens(row / shape_.q), shape_.q, int(row % shape_.q));
  if (n <= topk) return 0;
  return std::min(topk, local_count({box_.size(), rank, box_.options().interleave}, n));
}

/// Some rank has some: rank 0 has where any has.
bool BoxRun::candidates_travel() const {
  for (int64_t row = 0; row < shape_.rows; ++row) {
    if (candidates_of(0, row) > 0) return true;
  }
  return false;
}

Status BoxRun::publish_candidates(View<const Candidate, 2> mine) {
  if (!candidates_travel()) return {};
  const MailboxLayout& layout = box_.layout();
  return box_.publish(Exchange::kCandidates, shape_.rows, threads_, [&](int, int64_t row) -> OutgoingMail {
    return {WordFormat::kPlain, layout.candidates(box_.buffer(), box_.rank(), row), bytes_at(mine.row(row)),
            MailboxLayout::kCandidateWords * candidates_of(box_.rank(), row)};
  });
}

Status BoxRun::collect_candidates(View<Candidate, 3> all) {
  --to_collect_;
  if (!candidates_travel()) return {};
  const MailboxLayout& layout = box_.layout();
  Status status =
      box_.collect(Exchange::kCandidates, shape_.rows, threads_, [&](int from, int64_t row) -> IncomingMail {
        return {WordFormat::kPlain, layout.candidates(box_.buffer(), from, row), bytes_at(all.row(from, row)),
                MailboxLayout::kCandidateWords * candidates_of(from, row)};
      });
  if (!status.ok()) return status;
  for (int64_t row = 0; row < shape_.rows; ++row) {
    if (candidates_of(0, row) == 0) continue;
    for (int from = 0; from < box_.size(); ++from) {
      Candidate* list = all.row(from, row);
      std::fill(list + candidates_of(from, row), list + all.extent(2),
                Candidate{0, std::numeric_limits<int32_t>::max()});
    }
  }
  return {};
}

// ---- partials ----

// Two mails a row: the partials of the owner's heads, then their LSE.

Status BoxRun::publish_partials(View<const BFloat16, 3> mine, View<const float, 2> lse) {
  if (shape_.rows == 0) return {};
  const MailboxLayout& layout = box_.layout();
  const int width = shape_.partial_width;
  return box_.publish(Exchange::kPartials, 2 * shape_.rows, threads_, [&](int to, int64_t i) -> OutgoingMail {
    const int64_t row = i / 2, head = int64_t(to) * layout.sizes().heads;
    if (i % 2 == 0) {
      return {WordFormat::kBf16Pair, layout.value(box_.buffer(), box_.rank(), row, width),
              bytes_at(mine.row(row, head)), layout.value_words(width)};
    }
    return {WordFormat::kLse, layout.lse(box_.buffer(), box_.rank(), row), bytes_at(&lse(row, head)),
            layout.lse_words()};
  });
}

Status BoxRun::collect_partials(View<BFloat16, 4> all, View<float, 3> lse) {
  --to_collect_;
  if (shape_.rows == 0) return {};
  const MailboxLayout& layout = box_.layout();
  const int width = shape_.partial_width;
  return box_.collect(Exchange::kPartials, 2 * shape_.rows, threads_, [&](int from, int64_t i) -> IncomingMail {
    const int64_t row = i / 2;
    if (i % 2 == 0) {
      return {WordFormat::kBf16Pair, layout.value(box_.buffer(), from, row, width), bytes_at(all.row(from, row)),
              layout.value_words(width)};
    }
    return {WordFormat::kLse, layout.lse(box_.buffer(), from, row), bytes_at(lse.row(from, row)), layout.lse_words()};
  });
}

// ---- weights ----

// They travel through the query mailboxes, in as many box runs as it takes. A weight may have any bits, so each takes a
// word of its own, which no empty word looks like.
Status all_gather(Box::Impl& box, Threads& threads, std::span<const BFloat16> mine, std::span<BFloat16> all) {
  const MailboxLayout& layout = box.layout();
  const int64_t row_words = layout.query_words();
  const int64_t most = layout.sizes().cap * row_words;
  const int64_t size = int64_t(mine.size());
  const int ranks = box.size();
  std::vector<uint32_t> sent(size_t(std::min(most, size))), taken(sent.size() * size_t(ranks));

  for (int64_t begin = 0; begin < size; begin += most) {
    const int64_t words = std::min(most, size - begin);
    const int64_t rows = (words + row_words - 1) / row_words;
    const auto in_row = [&](int64_t row) { return std::min(row_words, words - row * row_words); };
    for (int64_t i = 0; i < words; ++i) sent[size_t(i)] = mine[size_t(begin + i)].bits;

    if (Status s = box.begin({rows, 0, 0, uint32_t(size)}); !s.ok()) return s;
    Status status = box.publish(Exchange::kWeights, rows, threads, [&](int, int64_t row) -> OutgoingMail {
      return {WordFormat::kPlain, layout.query(box.buffer(), row, box.rank()), bytes_at(&sent[size_t(row * row_words)]),
              in_row(row)};
    });
    if (!status.ok()) return status;
    status = box.collect(Exchange::kWeights, rows, threads, [&](int from, int64_t row) -> IncomingMail {
      return {layout.query_format(), layout.query(box.buffer(), row, from),
              bytes_at(&taken[size_t(from * words + row * row_words)]), in_row(row)};
    });
    if (!status.ok()) return status;
    for (int from = 0; from < ranks; ++from) {
      for (int64_t i = 0; i < words; ++i)
        all[size_t(from * size + begin + i)].bits = uint16_t(taken[size_t(from * words + i)]);
    }
  }
  return {};
}

Status gather_value_weights(Box::Impl& box, Threads& threads, const LayerModel& model, std::byte* all) {
  const View<const BFloat16, 3> w_uv = model.w_uv();
  const int64_t heads = w_uv.extent(0);
  const int64_t head_elems = w_uv.extent(1) * w_uv.extent(2);
  std::vector<BFloat16> mine(size_t(heads * head_elems));
  for (int64_t h = 0; h < heads; ++h) std::copy_n(w_uv.row(h), head_elems, mine.begin() + h * head_elems);
  return all_gather(box, threads, mine, {reinterpret_cast<BFloat16*>(all), size_t(box.size() * heads * head_elems)});
}

}  // namespace dsacore
