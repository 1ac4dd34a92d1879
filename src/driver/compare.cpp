#include "driver/compare.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "driver/compare_caches.h"
#include "driver/rerun.h"
#include "driver/selection.h"
#include "dsacore/status.h"
#include "format/numeric.h"

namespace dsacore {
namespace {

// Spec 9.
constexpr double kQueryBound = 2e-3;
constexpr double kWeightBound = 1e-6;
constexpr double kLatentBound = 4e-3;
constexpr double kLseBound = 2e-3;
constexpr double kOutBound = 8e-3;
/// What one BF16 unit of `x` (step 2) may move a value of the FP8 query by, relative to the head's largest.
constexpr double kCodeSlack = 0x1p-7;

std::vector<double> values_of(const BFloat16* codes, int64_t count) {
  std::vector<double> values(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) values[size_t(i)] = double(to_float(codes[i]));
  return values;
}

/// A run and its dump.
struct DumpedRun {
  const Outputs& outputs;
  const StageDump& dump;
};

/// One comparison: holds what later stages are judged on, each from the judged run where it passed.
class Comparison {
 public:
  Comparison(const Inputs& before, const Backend& backend, const DumpedRun& expected, const DumpedRun& got,
             const CompareOptions& options)
      : before_(before),
        rerun_(backend, before, options.threads),
        options_(options),
        expected_(expected.outputs),
        got_(got.outputs),
        expected_dump_(expected.dump),
        got_dump_(got.dump),
        judged_(judged_rows(before)),
        query_(expected.dump.query),
        index_query_{expected.dump.index_query, expected.dump.head_weights},
        kv_(expected.outputs.kv),
        index_(expected.outputs.index) {}

  std::vector<AgreementLine> all() {
    part("query");
    compare_q_c();
    compare_query();
    compare_head_weights();
    compare_index_query();
    part("caches");
    if (got_.kv.data != nullptr) compare_caches();
    part("selection");
    compare_selection();
    part("attention");
    compare_attention();
    return std::move(lines_);
  }

 private:
  void part(const char* name) const {
    if (options_.on_part) options_.on_part(name);
  }

  bool say(AgreementLine line) {
    lines_.push_back(std::move(line));
    return lines_.back().ok;
  }

  template <class Body>
  void for_rows(const std::vector<bool>& which, Body body) {
    for (int64_t b = 0; b < before_.step.batch; ++b) {
      if (which[size_t(b)]) body(b);
    }
  }

  void compare_q_c();
  void compare_query();
  void compare_head_weights();
  void compare_index_query();
  void compare_caches();
  void compare_selection();
  void compare_valid();
  void compare_rows();
  void compare_attention();
  void compare_values(const char* name, double bound, const std::vector<BFloat16>& got,
                      const std::vector<BFloat16>& expected);
  void compare_lse(const std::vector<float>& expected);

  const Inputs& before_;
  StageRerun rerun_;
  const CompareOptions& options_;
  const Outputs& expected_;
  const Outputs& got_;
  const StageDump& expected_dump_;
  const StageDump& got_dump_;
  const JudgedRows judged_;
  std::vector<std::byte> query_;
  IndexQuery index_query_;
  KvCache kv_;
  IndexCache index_;
  std::vector<int32_t> tokens_, valid_;
  std::vector<double> scale_ratio_;  ///< [B, index_heads] got / expected scale of the index query: 1, 2 or 0.5
  std::vector<AgreementLine> lines_;
};

void Comparison::compare_q_c() {
  const int64_t width = before_.sizes.q_lora;
  int64_t near = 0, far = 0, total = 0;
  for_rows(judged_.stage, [&](int64_t b) {
    for (int64_t i = b * width; i < (b + 1) * width; ++i) {
      const int gap = std::abs(order_of_bf16(got_dump_.q_c[size_t(i)]) - order_of_bf16(expected_dump_.q_c[size_t(i)]));
      near += gap == 1;
      far += gap > 1;
    }
    total += width;
  });
  const int64_t allowed = std::max<int64_t>(2, total / 1000);
  const bool ok = say({"q_c", fmt::format("{} of {} one BF16 unit apart, {} further", near, total, far),
                       fmt::format("<= {}, none", allowed), far == 0 && near <= allowed});
  if (!ok || near == 0) return;
  query_ = rerun_.query(got_dump_.q_c.data());
  index_query_ = rerun_.index_query(got_dump_.q_c.data());
}

void Comparison::compare_query() {
  const bool fp8 = has_fp8_query(before_.config.kv_format);
  const int64_t heads = before_.sizes.heads;
  CodeTally tally;
  RowErrors errors;
  for_rows(judged_.stage, [&](int64_t b) {
    if (fp8) {
      for (int64_t at = b * heads * kQueryRow; at < (b + 1) * heads * kQueryRow; at += kQueryRow) {
        const auto codes = [&](const std::vector<std::byte>& query) {
          return std::span<const uint8_t>(reinterpret_cast<const uint8_t*>(query.data()) + at, size_t(kQueryRow));
        };
        tally.codes(CodeKind::kE4m3, codes(got_dump_.query), codes(query_), kCodeSlack);
      }
    } else {
      const auto values = [&](const std::vector<std::byte>& query) {
        return values_of(reinterpret_cast<const BFloat16*>(query.data()) + b * heads * kQueryRow, heads * kQueryRow);
      };
      errors.add(b, values(got_dump_.query), values(query_));
    }
  });
  if (say(fp8 ? tally.line("query") : errors.line("query", kQueryBound))) query_ = got_dump_.query;
}

void Comparison::compare_head_weights() {
  const int64_t heads = before_.sizes.index_heads;
  const std::vector<float>& got = got_dump_.head_weights;
  double worst = 0;
  int64_t moved = 0, total = 0;
  scale_ratio_.assign(got.size(), 1.0);
  for_rows(judged_.stage, [&](int64_t b) {
    for (int64_t i = b * heads; i < (b + 1) * heads; ++i) {
      const double x = double(got[size_t(i)]), y = double(index_query_.weights[size_t(i)]);
      ++total;
      if (x == y) continue;
      if (factor_two(x, y)) {  // the index query's scale moved by one unit
        ++moved;
        scale_ratio_[size_t(i)] = x / y;
        continue;
      }
      const double relative = std::fabs(x - y) / std::max(std::fabs(y), double(std::numeric_limits<float>::min()));
      worst = std::max(worst, std::isfinite(relative) ? relative : std::numeric_limits<double>::infinity());
    }
  });
  const int64_t allowed = allowed_share(total, 1);
  AgreementLine line{"head_weights", fmt::format("worst relative difference {:.1e}", worst),
                     fmt::format("< {:.0e}", kWeightBound), worst < kWeightBound && moved <= allowed};
  if (moved > 0) {
    line.figure += fmt::format(", {} by a factor of two", moved);
    line.bound += fmt::format(", <= {}", allowed);
  }
  if (say(line)) {
    index_query_.weights = got;
  } else {
    scale_ratio_.assign(got.size(), 1.0);
  }
}

void Comparison::compare_index_query() {
  const int64_t heads = before_.sizes.index_heads;
  CodeTally tally;
  for_rows(judged_.stage, [&](int64_t b) {
    for (int64_t i = b * heads; i < (b + 1) * heads; ++i) {
      const auto codes = [&](const std::vector<uint8_t>& all) {
        return std::span<const uint8_t>(all.data() + i * kIndexDim, size_t(kIndexDim));
      };
      tally.block(CodeKind::kE4m3, {codes(got_dump_.index_query), scale_ratio_[size_t(i)]},
                  {codes(index_query_.codes), 1.0});
    }
  });
  if (say(tally.line("index_query"))) index_query_.codes = got_dump_.index_query;
}

void Comparison::compare_caches() {
  if (say(compare_kv_cache(before_, expected_.kv, got_.kv, judged_))) kv_ = got_.kv;
  if (say(compare_index_cache(before_, expected_.index, got_.index, judged_))) index_ = got_.index;
}

void Comparison::compare_selection() {
  std::vector<bool> rows = judged_.rows;
  for (size_t b = 0; b < rows.size(); ++b) rows[b] = rows[b] || judged_.empty[b];
  SelectionVerdict verdict = judge_selection(
      before_, {index_query_.codes.data(), index_query_.weights.data(), got_dump_.topk_tokens.data(), index_}, rows,
      options_.topk_tolerance, rerun_.threads());
  valid_ = std::move(verdict.valid);
  tokens_ = std::move(verdict.best);
  if (say(std::move(verdict.line))) {
    // Rows that are not judged keep the recomputed selection: theirs may be anything.
    for_rows(rows, [&](int64_t b) {
      const int64_t topk = before_.config.topk;
      std::copy_n(got_dump_.topk_tokens.begin() + b * topk, topk, tokens_.begin() + b * topk);
    });
  }
  compare_valid();
  if (!got_dump_.topk_rows.empty()) compare_rows();
}

void Comparison::compare_valid() {
  int64_t bad = 0, first = -1, rows = 0;
  for (int64_t b = 0; b < before_.step.batch; ++b) {
    if (!judged_.rows[size_t(b)] && !judged_.empty[size_t(b)]) continue;
    ++rows;
    if (got_dump_.valid[size_t(b)] == valid_[size_t(b)]) continue;
    ++bad;
    if (first < 0) first = b;
  }
  std::string figure = fmt::format("{} of {} rows wrong", bad, rows);
  if (bad > 0)
    figure += fmt::format(", first row {}: {}, not {}", first, got_dump_.valid[size_t(first)], valid_[size_t(first)]);
  say({"valid", figure, "exact", bad == 0});
}

void Comparison::compare_rows() {
  const int64_t topk = before_.config.topk;
  int64_t bad = 0, total = 0;
  for (int64_t b = 0; b < before_.step.batch; ++b) {
    if (!judged_.rows[size_t(b)] && !judged_.empty[size_t(b)]) continue;
    for (int64_t i = 0; i < topk; ++i) {
      const int32_t token = tokens_[size_t(b * topk + i)];
      int32_t row = -1;
      if (token >= 0) {
        const int32_t* table = before_.step.block_table.row(b / before_.step.q);
        row = physical_row(kv_place(table, before_.kv.page, LocalId(token)), before_.kv.stride_rows).value();
      }
      bad += got_dump_.topk_rows[size_t(b * topk + i)] != row;
      ++total;
    }
  }
  say({"topk_rows", fmt::format("{} of {} differ from the rows of the tokens", bad, total), "exact", bad == 0});
}

void Comparison::compare_attention() {
  const Attention attention = rerun_.attend(query_.data(), tokens_, valid_, kv_);
  if (!got_dump_.latent.empty()) compare_values("latent", kLatentBound, got_dump_.latent, attention.latent);
  compare_lse(attention.lse);
  compare_values("out", kOutBound, got_.out, rerun_.value(attention.latent));
}

void Comparison::compare_values(const char* name, double bound, const std::vector<BFloat16>& got,
                                const std::vector<BFloat16>& expected) {
  const int64_t width = int64_t(got.size()) / before_.step.batch;
  RowErrors errors;
  int64_t not_zero = 0;
  for (int64_t b = 0; b < before_.step.batch; ++b) {
    const BFloat16* row = got.data() + b * width;
    if (judged_.empty[size_t(b)] && (judged_.padded[size_t(b)] || !judged_.dirty[size_t(b)])) {
      for (int64_t i = 0; i < width; ++i) not_zero += (row[i].bits & 0x7FFF) != 0;
    } else if (judged_.rows[size_t(b)]) {
      errors.add(b, values_of(row, width), values_of(expected.data() + b * width, width));
    }
  }
  AgreementLine line = errors.line(name, bound);
  if (not_zero > 0) {
    line.figure += fmt::format("; {} values of empty rows are not zero", not_zero);
    line.ok = false;
  }
  say(line);
}

void Comparison::compare_lse(const std::vector<float>& expected) {
  const std::vector<float>& got = got_dump_.lse;
  const int64_t heads = before_.sizes.heads;
  double worst = 0;
  int64_t bad = 0, not_empty = 0;
  for (int64_t b = 0; b < before_.step.batch; ++b) {
    for (int64_t i = b * heads; i < (b + 1) * heads; ++i) {
      const double x = double(got[size_t(i)]), y = double(expected[size_t(i)]);
      if (judged_.empty[size_t(b)] && (judged_.padded[size_t(b)] || !judged_.dirty[size_t(b)])) {
        not_empty += !(std::isinf(x) && x < 0);
      } else if (judged_.rows[size_t(b)] && std::isfinite(y)) {
        const double gap = std::isnan(x) ? std::numeric_limits<double>::infinity() : std::fabs(x - y);
        worst = std::max(worst, gap);
        bad += !(gap <= kLseBound + 1e-6 * std::fabs(y));
      }
    }
  }
  AgreementLine line{"lse", fmt::format("worst difference {:.1e}", worst), fmt::format("<= {:.0e}", kLseBound),
                     bad == 0 && not_empty == 0};
  if (not_empty > 0) line.figure += fmt::format("; {} values of empty rows are not -inf", not_empty);
  say(line);
}

}  // namespace

std::vector<AgreementLine> compare(const Inputs& before, const Backend& backend, const Outputs& expected,
                                   const Outputs& got, const CompareOptions& options) {
  if (!expected.stages || !got.stages || expected.kv.data == nullptr) {
    throw Exception(
        {ErrorCode::kInternal, "compare", "runs without a dump", "both runs need one, the expected one of one rank"});
  }
  return Comparison(before, backend, {expected, *expected.stages}, {got, *got.stages}, options).all();
}

}  // namespace dsacore
