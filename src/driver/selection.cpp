#include "driver/selection.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <unordered_map>

#include "format/layouts.h"

namespace dsacore {
namespace {

struct RowVerdict {
  std::string malformed;
  int64_t exchanged = 0;
  int64_t broken_ties = 0;
  double worst = 0;
};

/// Scores of one row, and the sums of the absolute values of their terms.
struct Scores {
  std::vector<double> score, size;
};

/// Values of a key without its FP32 scale (`fp8`), with its block scales (`mxfp4`); returns the FP32 scale, or 1.
double key_of(const IndexCache& index, Place place, double* values) {
  const std::byte* page = index_page_at(index, place.page);
  if (index.format == IndexFormat::kFp8) {
    for (int i = 0; i < kIndexDim; ++i) values[i] = double(IndexFp8::value(page, place.offset, i));
    return double(IndexFp8::scale(page, place.offset));
  }
  for (int i = 0; i < kIndexDim; ++i) {
    values[i] = double(IndexMxfp4::value(page, place.offset, i)) *
                double(IndexMxfp4::scale(page, place.offset, i / IndexMxfp4::kBlock));
  }
  return 1;
}

/// Step 9 for all tokens of a row. Products of e4m3 and e2m1 values, and their sums of 128, are exact in FP64, and
/// heads are added in order, so equal keys have equal scores.
Scores score_row(const Inputs& in, const SelectionInputs& given, int64_t row, int64_t n) {
  const int heads = in.sizes.index_heads;
  const uint8_t* codes = given.index_query + row * heads * kIndexDim;
  const float* weights = given.head_weights + row * heads;
  std::vector<double> query(size_t(kIndexDim * heads));  // [128, heads], so that the inner loop runs over heads
  for (int h = 0; h < heads; ++h) {
    for (int i = 0; i < kIndexDim; ++i) query[size_t(i * heads + h)] = double(e4m3_to_float(codes[h * kIndexDim + i]));
  }
  Scores out{std::vector<double>(size_t(n)), std::vector<double>(size_t(n))};
  std::array<double, kIndexDim> key;
  std::array<double, kMaxIndexHeads> dots;
  for (int64_t t = 0; t < n; ++t) {
    const double scale = key_of(given.index, index_place_of(in, row / in.step.q, LocalId(int32_t(t))), key.data());
    std::fill_n(dots.begin(), heads, 0.0);
    for (int i = 0; i < kIndexDim; ++i) {
      const double k = key[size_t(i)];
      const double* q = query.data() + i * heads;
      for (int h = 0; h < heads; ++h) dots[size_t(h)] += q[h] * k;
    }
    double sum = 0, size = 0;
    for (int h = 0; h < heads; ++h) {
      const double dot = dots[size_t(h)];
      const double term = (dot > 0 || std::isnan(dot) ? dot : 0) * double(weights[h]);
      sum += term;
      size += std::fabs(term);
    }
    out.score[size_t(t)] = sum * scale;
    out.size[size_t(t)] = size * std::fabs(scale);
  }
  return out;
}

/// Whether token `a` comes before `b`: larger score first, NaN last, then the smaller id.
bool better(const std::vector<double>& score, int32_t a, int32_t b) {
  const double x = score[size_t(a)], y = score[size_t(b)];
  if (std::isnan(x) != std::isnan(y)) return std::isnan(y);
  if (x != y && !std::isnan(x)) return x > y;
  return a < b;
}

/// Step 10: the `k` best of all tokens, ascending; `threshold` is the worst score among them.
std::vector<int32_t> best_of(const std::vector<double>& score, int64_t k, double& threshold) {
  std::vector<int32_t> order(score.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = int32_t(i);
  const auto nth = order.begin() + (k - 1);
  std::nth_element(order.begin(), nth, order.end(), [&](int32_t a, int32_t b) { return better(score, a, b); });
  threshold = score[size_t(*nth)];
  if (std::isnan(threshold)) threshold = -std::numeric_limits<double>::infinity();
  order.resize(size_t(k));
  std::sort(order.begin(), order.end());
  return order;
}

/// Equal for tokens with the same key bytes, and for all tokens without a term that is not zero.
uint64_t key_hash(const Inputs& in, const IndexCache& index, int64_t request, int32_t token, double size) {
  if (size == 0) return 0;
  const Place place = index_place_of(in, request, LocalId(token));
  const std::byte* page = index_page_at(index, place.page);
  uint64_t hash = 14695981039346656037u;  // FNV-1a
  const auto mix = [&](const std::byte* bytes, int count) {
    for (int i = 0; i < count; ++i) hash = (hash ^ uint64_t(bytes[i])) * 1099511628211u;
  };
  return with_layout(index.format, [&](auto layout) {
    mix(page + layout.value_at(place.offset), layout.kValueBytes);
    mix(page + layout.scale_at(place.offset), layout.kScaleBytes);
    return hash;
  });
}

/// Groups of equal keys of which a later token was taken and an earlier one was not.
int64_t broken_ties(const Inputs& in, const IndexCache& index, int64_t request, const Scores& scores,
                    const std::vector<int32_t>& taken, const std::vector<int32_t>& exchanged) {
  struct Group {
    int32_t last_taken = -1;
    int32_t first_left = std::numeric_limits<int32_t>::max();
  };
  std::unordered_map<uint64_t, Group> groups;
  for (int32_t t : exchanged) groups.try_emplace(key_hash(in, index, request, t, scores.size[size_t(t)]));
  size_t next = 0;
  for (int32_t t = 0; t < int32_t(scores.score.size()); ++t) {
    const bool is_taken = next < taken.size() && taken[next] == t;
    next += is_taken;
    const auto group = groups.find(key_hash(in, index, request, t, scores.size[size_t(t)]));
    if (group == groups.end()) continue;
    if (is_taken) group->second.last_taken = t;
    if (!is_taken) group->second.first_left = std::min(group->second.first_left, t);
  }
  int64_t broken = 0;
  for (const auto& [hash, group] : groups) broken += group.last_taken > group.first_left;
  return broken;
}

/// Whether the row is `take` ascending ids below `n`, then -1.
bool well_formed(std::span<const int32_t> row, int64_t take, int64_t n) {
  for (int64_t i = 0; i < int64_t(row.size()); ++i) {
    const int32_t t = row[size_t(i)];
    if (i >= take ? t != -1 : t < 0 || t >= n || (i > 0 && row[size_t(i - 1)] >= t)) return false;
  }
  return true;
}

RowVerdict judge_row(const Inputs& in, const SelectionInputs& given, int64_t row, std::span<int32_t> best_row) {
  const int64_t n = keys_of_row(in.step, row), topk = in.config.topk, take = std::min(topk, n);
  const std::span<const int32_t> got_row(given.topk_tokens + row * topk, size_t(topk));
  RowVerdict verdict;
  if (!well_formed(got_row, take, n))
    verdict.malformed = fmt::format("row {}: not {} ascending ids below {} and then -1", row, take, n);
  if (n <= topk) {
    for (int32_t i = 0; i < n; ++i) best_row[size_t(i)] = i;
    return verdict;
  }
  const Scores scores = score_row(in, given, row, n);
  double threshold = 0;
  const std::vector<int32_t> best = best_of(scores.score, topk, threshold);
  std::copy(best.begin(), best.end(), best_row.begin());
  if (!verdict.malformed.empty()) return verdict;

  const std::vector<int32_t> got(got_row.begin(), got_row.end());
  std::vector<int32_t> exchanged;
  std::set_symmetric_difference(got.begin(), got.end(), best.begin(), best.end(), std::back_inserter(exchanged));
  if (exchanged.empty()) return verdict;
  verdict.exchanged = int64_t(exchanged.size()) / 2;
  for (int32_t t : exchanged) {
    const double score = scores.score[size_t(t)];
    if (score == threshold) continue;
    const double distance = std::fabs(score - threshold) / std::max(std::fabs(threshold), scores.size[size_t(t)]);
    verdict.worst = std::max(verdict.worst, std::isnan(distance) ? std::numeric_limits<double>::infinity() : distance);
  }
  verdict.broken_ties = broken_ties(in, given.index, row / in.step.q, scores, got, exchanged);
  return verdict;
}

}  // namespace

SelectionVerdict judge_selection(const Inputs& inputs, const SelectionInputs& given, const std::vector<bool>& judged,
                                 double tolerance, Threads& threads) {
  const int64_t rows = inputs.step.batch, topk = inputs.config.topk;
  SelectionVerdict out;
  out.best.assign(size_t(rows * topk), -1);
  out.valid.resize(size_t(rows));
  std::vector<RowVerdict> verdicts(static_cast<size_t>(rows));
  threads.for_each(rows, [&](int64_t row, int) {
    out.valid[size_t(row)] = int32_t(std::min<int64_t>(topk, keys_of_row(inputs.step, row)));
    verdicts[size_t(row)] = judge_row(inputs, given, row, {out.best.data() + row * topk, size_t(topk)});
  });
  RowVerdict all;
  for (int64_t row = 0; row < rows; ++row) {
    const RowVerdict& v = verdicts[size_t(row)];
    if (!judged[size_t(row)]) continue;
    if (all.malformed.empty()) all.malformed = v.malformed;
    all.exchanged += v.exchanged;
    all.broken_ties += v.broken_ties;
    all.worst = std::max(all.worst, v.worst);
  }
  out.line = {
      "topk_tokens", fmt::format("{} tokens exchanged, worst {:.1e} of the threshold", all.exchanged, all.worst),
      fmt::format("<= {:.0e}", tolerance), all.malformed.empty() && all.worst <= tolerance && all.broken_ties == 0};
  if (all.broken_ties > 0) {
    out.line.figure += fmt::format(", {} broken ties", all.broken_ties);
    out.line.bound += ", none";
  }
  if (!all.malformed.empty()) out.line.figure = all.malformed;
  return out;
}

}  // namespace dsacore
