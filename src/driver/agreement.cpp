#include "driver/agreement.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "format/numeric.h"

namespace dsacore {
namespace {

constexpr double kShare = 0.005;  // of codes that may be neighbours, of scales that may move (spec 9)
constexpr double kRowFactor = 4;  // no row may be worse than this times its tensor's bound

double value_of(CodeKind kind, uint8_t code) {
  return kind == CodeKind::kE4m3 ? double(e4m3_to_float(code)) : double(e2m1_to_float(code));
}

int order_of(CodeKind kind, uint8_t code) {
  return kind == CodeKind::kE4m3 ? order_of_e4m3(code) : order_of_e2m1(code);
}

/// What one code is worth near a value: half its spacing on the coarser of two scales whose sum is `unit`.
double coarseness(CodeKind kind, double value, double unit) {
  return kind == CodeKind::kE4m3 ? value / 8 + unit * 0x1p-9 : unit;
}

}  // namespace

int order_of_bf16(BFloat16 code) {
  const int magnitude = code.bits & 0x7FFF;
  return code.bits & 0x8000 ? -magnitude : magnitude;
}

int order_of_e4m3(uint8_t code) { return code & 0x80 ? -(code & 0x7F) : code & 0x7F; }

int order_of_e2m1(uint8_t code) { return code & 8 ? -(code & 7) : code & 7; }

bool factor_two(double a, double b) { return a == 2 * b || b == 2 * a; }

int64_t allowed_share(int64_t total, int64_t at_least) {
  return std::max(at_least, int64_t(std::ceil(kShare * double(total))));
}

void CodeTally::codes(CodeKind kind, std::span<const uint8_t> got, std::span<const uint8_t> expected, double slack) {
  double largest = 0;
  if (slack > 0) {
    for (uint8_t code : expected) largest = std::max(largest, std::fabs(value_of(kind, code)));
  }
  total_ += int64_t(got.size());
  for (size_t i = 0; i < got.size(); ++i) {
    const int gap = std::abs(order_of(kind, got[i]) - order_of(kind, expected[i]));
    if (gap == 0) continue;
    const bool near = gap == 1 || std::fabs(value_of(kind, got[i]) - value_of(kind, expected[i])) <= slack * largest;
    near ? ++differ_ : ++far_;
  }
}

void CodeTally::scale(bool same, bool near) {
  ++scales_;
  if (!same) near ? ++moved_ : ++wrong_;
}

void CodeTally::block(CodeKind kind, CodeBlock got, CodeBlock expected) {
  const bool same = got.scale == expected.scale;
  const bool near = factor_two(got.scale, expected.scale);
  scale(same, near);
  if (same) return codes(kind, got.codes, expected.codes);
  if (!near) return;
  const double unit = got.scale + expected.scale;
  for (size_t i = 0; i < got.codes.size(); ++i) {
    const double x = value_of(kind, got.codes[i]) * got.scale;
    const double y = value_of(kind, expected.codes[i]) * expected.scale;
    if (!(std::fabs(x - y) <= coarseness(kind, std::max(std::fabs(x), std::fabs(y)), unit))) ++far_;
  }
}

void CodeTally::coded_block(std::span<const uint8_t> got, uint8_t got_scale, std::span<const uint8_t> expected,
                            uint8_t expected_scale) {
  const int gap = std::abs(order_of_e4m3(got_scale) - order_of_e4m3(expected_scale));
  scale(gap == 0, gap == 1);
  if (gap != 1) return codes(CodeKind::kE2m1, got, expected);
  total_ += int64_t(got.size());
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::abs(order_of_e2m1(got[i]) - order_of_e2m1(expected[i])) > 1) ++far_;
  }
}

void CodeTally::exact(std::span<const std::byte> got, std::span<const std::byte> expected) {
  for (size_t i = 0; i < got.size(); ++i) wrong_ += got[i] != expected[i];
}

AgreementLine CodeTally::line(std::string tensor) const {
  const int64_t allowed = allowed_share(total_, 4);
  const int64_t allowed_scales = allowed_share(scales_, 1);
  AgreementLine line{std::move(tensor), fmt::format("{} of {} codes are neighbours", differ_, total_),
                     fmt::format("<= {}", allowed),
                     far_ == 0 && wrong_ == 0 && differ_ <= allowed && moved_ <= allowed_scales};
  if (moved_ > 0) {
    line.figure += fmt::format(", {} of {} scales one unit off", moved_, scales_);
    line.bound += fmt::format(", <= {}", allowed_scales);
  }
  if (far_ > 0) line.figure += fmt::format(", {} codes further apart", far_);
  if (wrong_ > 0) line.figure += fmt::format(", {} fields wrong", wrong_);
  if (far_ + wrong_ > 0) line.bound += ", none";
  return line;
}

void RowErrors::add(int64_t row, std::span<const double> got, std::span<const double> expected) {
  double difference = 0, norm = 0;
  bool finite = true;
  for (size_t i = 0; i < got.size(); ++i) {
    if (!std::isfinite(expected[i])) return;
    finite = finite && std::isfinite(got[i]);
    difference += (got[i] - expected[i]) * (got[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  if (!finite) {
    if (not_finite_row_ < 0) not_finite_row_ = row;
    return;
  }
  difference_ += difference;
  norm_ += norm;
  const double error = std::sqrt(difference) / std::max(std::sqrt(norm), 1e-30);
  if (worst_row_ < 0 || error > worst_) worst_ = error, worst_row_ = row;
}

AgreementLine RowErrors::line(std::string tensor, double bound) const {
  AgreementLine line{std::move(tensor), {}, fmt::format("e < {:.0e}, row < {:.1e}", bound, kRowFactor * bound), false};
  if (not_finite_row_ >= 0) {
    line.figure = fmt::format("row {} is not finite", not_finite_row_);
    return line;
  }
  const double e = norm_ > 0         ? std::sqrt(difference_ / norm_)
                   : difference_ > 0 ? std::numeric_limits<double>::infinity()
                                     : 0;
  line.figure = fmt::format("e = {:.2e}, worst row {:.2e} (row {})", e, worst_, worst_row_);
  line.ok = e < bound && worst_ < kRowFactor * bound;
  return line;
}

}  // namespace dsacore
