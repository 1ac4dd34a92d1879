#include "io/case_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "dsacore/status.h"

namespace dsacore {
namespace {

// Bounds of what problem.h leaves open: far beyond use, small enough that no product of them overflows.
constexpr int kMaxPage = 1 << 20;
constexpr int kMaxPitchPad = 1 << 16;
constexpr int kMaxSparePages = 1 << 20;

[[noreturn]] void refuse(std::string option, std::string value, std::string allowed) {
  throw Exception({ErrorCode::kRefused, std::move(option), std::move(value), std::move(allowed)});
}

void require_range(const char* option, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return;
  refuse(option, std::to_string(value), fmt::format("allowed {}..{}", low, high));
}

void require_multiple(const char* option, int64_t value, int64_t of, int64_t high) {
  if (value >= of && value <= high && value % of == 0) return;
  refuse(option, std::to_string(value), fmt::format("allowed: multiples of {} up to {}", of, high));
}

[[noreturn]] void refuse_context(const std::string& text) {
  refuse("--context", text, fmt::format("allowed: N, a list A,B,C or LO-HI, each 1..{}, LO at most HI", kMaxContext));
}

int64_t parse_length(const std::string& whole, std::string_view part) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), value);
  if (error != std::errc() || end != part.data() + part.size() || value < 1 || value > kMaxContext)
    refuse_context(whole);
  return value;
}

struct ContextText {
  std::vector<int64_t> values;                       ///< of a list
  std::optional<std::pair<int64_t, int64_t>> range;  ///< of LO-HI
};

ContextText parse_context(const std::string& text) {
  ContextText parsed;
  const std::string_view view = text;
  if (const size_t dash = view.find('-'); dash != std::string_view::npos) {
    const int64_t low = parse_length(text, view.substr(0, dash));
    const int64_t high = parse_length(text, view.substr(dash + 1));
    if (low > high) refuse_context(text);
    parsed.range = {low, high};
    return parsed;
  }
  for (size_t at = 0; at <= view.size();) {
    const size_t comma = std::min(view.find(',', at), view.size());
    parsed.values.push_back(parse_length(text, view.substr(at, comma - at)));
    at = comma + 1;
  }
  return parsed;
}

/// low * ((high + 1) / low)^u for a random u in [0, 1): the powers are square roots, which IEEE rounds the same
/// everywhere.
int64_t log_uniform(Rng& rng, int64_t low, int64_t high) {
  const uint64_t digits = rng.next();
  double factor = double(high + 1) / double(low);
  double value = double(low);
  for (int bit = 63; bit >= 32; --bit) {
    factor = std::sqrt(factor);
    if ((digits >> bit & 1) != 0) value *= factor;
  }
  return std::clamp(int64_t(value), low, high);
}

}  // namespace

void check_case_options(const CaseOptions& o) {
  require_range("--heads", o.heads, 1, kMaxHeads);
  require_range("--batch", o.batch, 1, kMaxRows);
  require_range("--q", o.q, 1, kMaxQ);
  if (o.batch % o.q != 0) refuse("--batch", std::to_string(o.batch), fmt::format("must be a multiple of --q {}", o.q));
  require_range("--pad-requests", o.pad_requests, 0, o.batch / o.q);
  parse_context(o.context);
  require_multiple("--page", o.page, kIndexPage, kMaxPage);
  if (o.stride_rows != 0) require_range("--stride-rows", o.stride_rows, o.page, std::numeric_limits<int32_t>::max());
  require_range("--topk", o.topk, 1, kMaxTopk);
  require_range("--index-heads", o.index_heads, kMinIndexHeads, kMaxIndexHeads);
  require_multiple("--q-lora", o.q_lora, kQLoraStep, kMaxQLora);
  require_range("--pitch-pad", o.pitch_pad, 0, kMaxPitchPad);
  require_range("--spare-pages", o.spare_pages, 0, kMaxSparePages);
  case_kinds(o);
}

CaseKinds case_kinds(const CaseOptions& options) {
  CaseKinds kinds;
  const std::pair<std::string_view, bool*> names[] = {{"ties", &kinds.ties},
                                                      {"equal", &kinds.equal},
                                                      {"magnitude", &kinds.magnitude},
                                                      {"subnormal", &kinds.subnormal},
                                                      {"zero", &kinds.zero},
                                                      {"negzero", &kinds.negzero},
                                                      {"nan", &kinds.nan},
                                                      {"inf", &kinds.inf}};
  for (const std::string& text : options.adversarial) {
    bool known = text == "all";
    for (const auto& [name, flag] : names) {
      if (text != "all" && text != name) continue;
      *flag = true;
      known = true;
    }
    if (!known)
      refuse("--adversarial", text, "allowed: all, ties, equal, magnitude, subnormal, zero, negzero, nan, inf");
  }
  return kinds;
}

std::vector<int64_t> case_lengths(const CaseOptions& options, int requests) {
  const ContextText text = parse_context(options.context);
  std::vector<int64_t> lengths(size_t(requests), 0);
  if (!text.range) {
    for (size_t r = 0; r < lengths.size(); ++r) lengths[r] = text.values[r % text.values.size()];
    return lengths;
  }
  const auto [low, high] = *text.range;
  Rng rng(part_seed(options.seed, CasePart::kLengths));
  for (int64_t& length : lengths) length = log_uniform(rng, low, high);
  if (requests == 0) return lengths;
  // Both ends are used: the longest by any request, the shortest by another one where there is another.
  const int64_t longest = rng.below(requests);
  lengths[size_t(longest)] = high;
  if (requests > 1) lengths[size_t((longest + 1 + rng.below(requests - 1)) % requests)] = low;
  return lengths;
}

}  // namespace dsacore
