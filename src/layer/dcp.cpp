#include "layer/dcp.h"

#include <algorithm>
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

/// Calls `each(row)` for rows 0..rows-1 until one fails.
template <class F>
Status for_rows(int64_t rows, F&& each) {
  for (int64_t row = 0; row < rows; ++row) {
    if (Status s = each(row); !s.ok()) return s;
  }
  return {};
}

}  // namespace

WorkHeartbeat::WorkHeartbeat(Box::Impl& box, Threads& threads) : threads_(threads) {
  threads_.set_progress([](void* impl) { static_cast<Box::Impl*>(impl)->progress(); }, &box);
}
WorkHeartbeat::~WorkHeartbeat() { threads_.set_progress(nullptr, nullptr); }

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
  const int64_t words = layout.query_words();
  return box_.publish(Exchange::kQuery, box_.size() * shape_.rows * words, [&](int to) {
    return for_rows(shape_.rows, [&](int64_t row) {
      return box_.send(to, layout.query_format(), layout.query(box_.buffer(), row, box_.rank()), mine.at(row, 0),
                       words);
    });
  });
}

Status BoxRun::collect_query(const QueryRows& all) {
  const MailboxLayout& layout = box_.layout();
  return box_.collect(Exchange::kQuery, [&](int from) {
    return for_rows(shape_.rows, [&](int64_t row) {
      return box_.take(from, layout.query_format(), layout.query(box_.buffer(), row, from),
                       all.at(row, from * layout.sizes().heads), layout.query_words());
    });
  });
}

// ---- candidates ----

/// Spec 5, step 10: where n <= topk every token is selected, and no score is needed.
bool BoxRun::sends_candidates(int64_t row) const {
  return keys_seen(shape_.seq_lens(row / shape_.q), shape_.q, int(row % shape_.q)) > box_.layout().sizes().topk;
}

int64_t BoxRun::candidate_rows() const {
  int64_t count = 0;
  for (int64_t row = 0; row < shape_.rows; ++row) count += sends_candidates(row) ? 1 : 0;
  return count;
}

Status BoxRun::publish_candidates(View<const Candidate, 2> mine) {
  const int64_t travelling = candidate_rows();
  if (travelling == 0) return {};
  const MailboxLayout& layout = box_.layout();
  const int64_t words = layout.candidate_words();
  return box_.publish(Exchange::kCandidates, box_.size() * travelling * words, [&](int to) {
    return for_rows(shape_.rows, [&](int64_t row) {
      if (!sends_candidates(row)) return Status();
      return box_.send(to, WordFormat::kPlain, layout.candidates(box_.buffer(), box_.rank(), row), mine.row(row),
                       words);
    });
  });
}

Status BoxRun::collect_candidates(View<Candidate, 3> all) {
  if (candidate_rows() == 0) return {};
  const MailboxLayout& layout = box_.layout();
  return box_.collect(Exchange::kCandidates, [&](int from) {
    return for_rows(shape_.rows, [&](int64_t row) {
      if (!sends_candidates(row)) return Status();
      return box_.take(from, WordFormat::kPlain, layout.candidates(box_.buffer(), from, row), all.row(from, row),
                       layout.candidate_words());
    });
  });
}

// ---- partials ----

Status BoxRun::publish_partials(View<const BFloat16, 3> mine, View<const float, 2> lse) {
  if (shape_.rows == 0) return {};
  const MailboxLayout& layout = box_.layout();
  const int width = shape_.partial_width;
  const int64_t words = layout.value_words(width) + layout.lse_words();
  return box_.publish(Exchange::kPartials, box_.size() * shape_.rows * words, [&](int to) {
    const int64_t head = int64_t(to) * layout.sizes().heads;
    return for_rows(shape_.rows, [&](int64_t row) {
      const int64_t value_at = layout.value(box_.buffer(), box_.rank(), row, width);
      const int64_t lse_at = layout.lse(box_.buffer(), box_.rank(), row);
      if (Status s = box_.send(to, WordFormat::kBf16Pair, value_at, mine.row(row, head), layout.value_words(width));
          !s.ok()) {
        return s;
      }
      return box_.send(to, WordFormat::kLse, lse_at, &lse(row, head), layout.lse_words());
    });
  });
}

Status BoxRun::collect_partials(View<BFloat16, 4> all, View<float, 3> lse) {
  if (shape_.rows == 0) return {};
  const MailboxLayout& layout = box_.layout();
  const int width = shape_.partial_width;
  return box_.collect(Exchange::kPartials, [&](int from) {
    return for_rows(shape_.rows, [&](int64_t row) {
      const int64_t value_at = layout.value(box_.buffer(), from, row, width);
      const int64_t lse_at = layout.lse(box_.buffer(), from, row);
      if (Status s = box_.take(from, WordFormat::kBf16Pair, value_at, all.row(from, row), layout.value_words(width));
          !s.ok()) {
        return s;
      }
      return box_.take(from, WordFormat::kLse, lse_at, lse.row(from, row), layout.lse_words());
    });
  });
}

// ---- weights ----

// They travel through the query mailboxes, in as many box runs as it takes. A weight may have any bits, so each takes a
// word of its own, which no empty word looks like.
Status all_gather(Box::Impl& box, std::span<const BFloat16> mine, std::span<BFloat16> all) {
  const MailboxLayout& layout = box.layout();
  const int64_t row_words = layout.query_words();
  std::vector<uint32_t> row_of(static_cast<size_t>(row_words));
  const int64_t size = int64_t(mine.size());
  const auto in_row = [&](int64_t at) { return size_t(std::min(row_words, size - at)); };

  for (int64_t begin = 0; begin < size; begin += layout.sizes().cap * row_words) {
    const int64_t rows = std::min<int64_t>(layout.sizes().cap, (size - begin + row_words - 1) / row_words);
    const int64_t end = std::min(size, begin + rows * row_words);
    if (Status s = box.begin({rows, 0, 0, uint32_t(size)}); !s.ok()) return s;
    Status sent = box.publish(Exchange::kWeights, box.size() * (end - begin), [&](int to) {
      return for_rows(rows, [&](int64_t row) {
        const int64_t at = begin + row * row_words;
        for (size_t i = 0; i < in_row(at); ++i) row_of[i] = mine[size_t(at) + i].bits;
        return box.send(to, WordFormat::kPlain, layout.query(box.buffer(), row, box.rank()), row_of.data(),
                        int64_t(in_row(at)));
      });
    });
    if (!sent.ok()) return sent;
    Status taken = box.collect(Exchange::kWeights, [&](int from) {
      return for_rows(rows, [&](int64_t row) {
        const int64_t at = begin + row * row_words;
        const int64_t mailbox = layout.query(box.buffer(), row, from);
        if (Status s = box.take(from, layout.query_format(), mailbox, row_of.data(), int64_t(in_row(at))); !s.ok())
          return s;
        BFloat16* out = &all[size_t(from * size + at)];
        for (size_t i = 0; i < in_row(at); ++i) out[i].bits = uint16_t(row_of[i]);
        return Status();
      });
    });
    if (!taken.ok()) return taken;
  }
  return {};
}

Status gather_value_weights(Box::Impl& box, const LayerModel& model, std::byte* all) {
  const View<const BFloat16, 3> w_uv = model.w_uv();
  const int64_t heads = w_uv.extent(0);
  const int64_t head_elems = w_uv.extent(1) * w_uv.extent(2);
  std::vector<BFloat16> mine(size_t(heads * head_elems));
  for (int64_t h = 0; h < heads; ++h) std::copy_n(w_uv.row(h), head_elems, mine.begin() + h * head_elems);
  return all_gather(box, mine, {reinterpret_cast<BFloat16*>(all), size_t(box.size() * heads * head_elems)});
}

}  // namespace dsacore
