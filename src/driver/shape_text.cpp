#include "driver/shape_text.h"

#include <fmt/format.h>

#include <array>
#include <charconv>
#include <set>

#include "dsacore/status.h"

namespace dsacore {
namespace {

[[noreturn]] void refuse(std::string_view key, std::string_view value, std::string allowed) {
  throw Exception({ErrorCode::kRefused, std::string(key), std::string(value), std::move(allowed)});
}

int64_t number_of(std::string_view key, std::string_view value, int64_t low, int64_t high) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error != std::errc() || end != value.data() + value.size() || number < low || number > high) {
    refuse(key, value, fmt::format("allowed {}..{}", low, high));
  }
  return number;
}

void set_key(ProblemShape& shape, std::string_view key, std::string_view value) {
  const auto integer = [&](int64_t low, int64_t high) { return int(number_of(key, value, low, high)); };
  if (key == "kv") {
    const auto format = kv_format_of(value);
    if (!format) refuse(key, value, "allowed fp8_ds_mla, fp8, nvfp4_ds_mla");
    shape.kv_format = *format;
  } else if (key == "index") {
    const auto format = index_format_of(value);
    if (!format) refuse(key, value, "allowed fp8, mxfp4");
    shape.index_format = *format;
  } else if (key == "B") {
    shape.rows = integer(1, kMaxRows);
  } else if (key == "q") {
    shape.q = integer(1, kMaxQ);
  } else if (key == "H") {
    shape.heads = integer(1, kMaxHeads);
  } else if (key == "len") {
    shape.length = number_of(key, value, 1, kMaxContext);
  } else if (key == "dcp") {
    shape.ranks = integer(1, kMaxRanks);
  } else if (key == "I") {
    shape.interleave = integer(1, kMaxContext);
  } else if (key == "topk") {
    shape.topk = integer(1, kMaxTopk);
  } else if (key == "index_heads") {
    shape.index_heads = integer(kMinIndexHeads, kMaxIndexHeads);
  } else if (key == "q_lora") {
    shape.q_lora = integer(kQLoraStep, kMaxQLora);
    if (shape.q_lora % kQLoraStep != 0) refuse(key, value, "allowed: multiples of 128");
  } else {
    refuse("shape", key, "allowed keys: kv, index, B, q, H, len, dcp, I, topk, index_heads, q_lora");
  }
}

}  // namespace

std::string ProblemShape::text() const {
  std::string text =
      fmt::format("kv={},index={},B={},q={},H={},len={},topk={},index_heads={},q_lora={}", name_of(kv_format),
                  name_of(index_format), rows, q, heads, length, topk, index_heads, q_lora);
  if (ranks > 1) text += fmt::format(",dcp={},I={}", ranks, interleave);
  return text;
}

ProblemShape parse_shape(std::string_view text) {
  ProblemShape shape;
  std::set<std::string_view> seen;
  while (!text.empty()) {
    const std::string_view part = text.substr(0, text.find(','));
    text.remove_prefix(part.size() < text.size() ? part.size() + 1 : part.size());
    const size_t equals = part.find('=');
    if (equals == std::string_view::npos) refuse("shape", part, "must be key=value");
    const std::string_view key = part.substr(0, equals);
    if (!seen.insert(key).second) refuse("shape", key, "each key at most once");
    set_key(shape, key, part.substr(equals + 1));
  }
  if (shape.rows % shape.q != 0)
    refuse("B", std::to_string(shape.rows), fmt::format("must be a multiple of q = {}", shape.q));
  return shape;
}

}  // namespace dsacore
