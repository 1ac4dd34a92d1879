#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "cli/inspect.h"
#include "cli/terminal.h"
#include "io/layer_file.h"
#include "io/out_file.h"
#include "io/step_file.h"

namespace dsacore::cli {
namespace {

using nlohmann::ordered_json;

/// What a file says of itself, as keys and values in the order in which they are printed.
struct FileReport {
  std::string kind;
  ordered_json facts;
  UnknownFields unknown;
};

FileReport report_layer(SafetensorsFile file) {
  const LayerFile f = parse_layer_file(std::move(file));
  const LayerConfig& c = f.config;
  FileReport report{"layer", {}, f.unknown};
  report.facts = {{"kv_format", name_of(c.kv_format)},
                  {"index_format", name_of(c.index_format)},
                  {"heads", f.sizes.heads},
                  {"index_heads", f.sizes.index_heads},
                  {"q_lora", f.sizes.q_lora},
                  {"topk", c.topk},
                  {"projected row", f.sizes.width()},
                  {"eps", c.eps},
                  {"softmax_scale", c.softmax_scale},
                  {"index_softmax_scale", c.index_softmax_scale},
                  {"index_head_scale", c.index_head_scale}};
  if (has_fp8_query(c.kv_format)) report.facts["q_scale_inv"] = c.q_scale_inv;
  if (c.kv_format == KvFormat::kFp8) report.facts["k_scale_inv"] = c.k_scale_inv;
  report.facts["index key bias"] = f.weights.k_norm_bias.data != nullptr;
  return report;
}

ordered_json lengths_of(const Step& step) {
  std::vector<int64_t> lengths;
  for (int64_t r = 0; r < step.seq_lens.extent(0); ++r) {
    if (step.seq_lens(r) != 0) lengths.push_back(step.seq_lens(r));
  }
  std::sort(lengths.begin(), lengths.end());
  ordered_json out = {{"requests", lengths.size()}, {"padded", step.seq_lens.extent(0) - int64_t(lengths.size())}};
  if (lengths.empty()) return out;
  int64_t sum = 0;
  for (int64_t n : lengths) sum += n;
  out.update({{"shortest", lengths.front()},
              {"median", lengths[lengths.size() / 2]},
              {"longest", lengths.back()},
              {"tokens", sum}});
  return out;
}

int64_t written(View<const int64_t, 1> slots) {
  int64_t count = 0;
  for (int64_t b = 0; b < slots.extent(0); ++b) count += slots(b) >= 0;
  return count;
}

FileReport report_step(SafetensorsFile file) {
  const StepFile f = parse_step_file(std::move(file));
  FileReport report{"step", {}, f.unknown};
  report.facts = {
      {"B", f.step.batch},
      {"q", f.step.q},
      {"R", f.step.seq_lens.extent(0)},
      {"pitch", f.step.projected.stride(0)},
      {"lengths", lengths_of(f.step)},
      {"keys written", {{"kv_cache", written(f.step.slots)}, {"index_cache", written(f.step.index_slots)}}},
      {"kv_cache",
       {{"pages", f.kv.pages}, {"page", f.kv.page}, {"stride_rows", f.kv.stride_rows}, {"row_bytes", f.kv.row_bytes}}},
      {"index_cache", {{"pages", f.index.pages}, {"row_bytes", f.index.row_bytes}}},
      {"block table width", f.step.block_table.extent(1)},
      {"index block table", !f.step.index_block_table.empty()}};
  return report;
}

/// Values of a BF16 tensor that are NaN or infinite, and the largest finite magnitude.
ordered_json values_of(const TensorView& tensor) {
  int64_t wild = 0;
  double largest = 0;
  for (int64_t i = 0; i < tensor.elements(); ++i) {
    const uint16_t bits = tensor.as<BFloat16>()[i].bits;
    if ((bits & 0x7F80) == 0x7F80) {
      ++wild;
    } else {
      const int exponent = (bits >> 7) & 0xFF;
      const double mantissa = exponent == 0 ? (bits & 0x7F) : 128 + (bits & 0x7F);
      largest = std::max(largest, std::ldexp(mantissa, std::max(exponent, 1) - 134));
    }
  }
  return {{"not finite", wild}, {"largest", largest}};
}

FileReport report_out(SafetensorsFile file) {
  const OutFile f = parse_out_file(std::move(file));
  FileReport report{"output", {}, f.unknown};
  const OutTensors& t = f.tensors;
  report.facts = {{"B", t.out.shape[0]}, {"heads", t.out.shape[1] / kValue}, {"values of out", values_of(t.out)}};
  if (!t.topk_tokens.empty()) report.facts["topk"] = t.topk_tokens.shape[1];
  if (!t.valid.empty()) {
    const int32_t* valid = t.valid.as<int32_t>();
    const auto [low, high] = std::minmax_element(valid, valid + t.valid.shape[0]);
    report.facts["selected tokens"] = {{"fewest", *low}, {"most", *high}};
  }
  return report;
}

FileReport report_of(const std::string& path) {
  SafetensorsFile file = SafetensorsFile::open(path);
  const std::string* format = find_metadata(file, "format");
  if (format == nullptr) {
    throw file_error(ErrorCode::kMalformedFile, path, "format", "absent",
                     "metadata of dsacore files has it (is this another file?)");
  }
  if (*format == "dsacore.layer") return report_layer(std::move(file));
  if (*format == "dsacore.step") return report_step(std::move(file));
  if (*format == "dsacore.out") return report_out(std::move(file));
  throw file_error(ErrorCode::kRefused, path, "format", *format, "allowed dsacore.layer, dsacore.step, dsacore.out");
}

/// A fact's value in a line: objects as "key value, key value".
std::string fact_text(const ordered_json& value) {
  if (value.is_boolean()) return value.get<bool>() ? "yes" : "no";
  if (value.is_string()) return value.get<std::string>();
  if (!value.is_object()) return value.dump();
  std::string text;
  for (const auto& [key, part] : value.items()) text += (text.empty() ? "" : ", ") + key + " " + fact_text(part);
  return text;
}

ordered_json tensors_json(const SafetensorsFile& file, const std::set<std::string>& unknown) {
  ordered_json out = ordered_json::array();
  for (const SafetensorsTensor& tensor : file.tensors()) {
    out.push_back({{"name", tensor.name},
                   {"type", tensor.dtype},
                   {"shape", tensor.shape},
                   {"bytes", tensor.end - tensor.begin},
                   {"known", unknown.count(tensor.name) == 0}});
  }
  return out;
}

void print_report(const std::string& path, const SafetensorsFile& file, const FileReport& report,
                  const std::set<std::string>& unknown) {
  fmt::print("{}: {} file, {}\n\n", path, report.kind, bytes_text(double(file.bytes())));
  Table facts({{"", false}, {"", false}});
  for (const auto& [key, value] : report.facts.items()) facts.add({key, fact_text(value)});
  fmt::print("{}\n", facts.text());
  Table tensors({{"tensor", false}, {"type", false}, {"shape", false}, {"bytes", true}, {"", false}});
  for (const SafetensorsTensor& tensor : file.tensors()) {
    tensors.add({printable(tensor.name), tensor.dtype, shape_text(tensor.shape),
                 bytes_text(double(tensor.end - tensor.begin)),
                 unknown.count(tensor.name) != 0 ? "unknown, ignored" : ""});
  }
  fmt::print("{}", tensors.text());
  for (const std::string& key : report.unknown.metadata) {
    fmt::print("metadata {} = {}: unknown, ignored\n", printable(key), printable(file.metadata().find(key)->second));
  }
}

}  // namespace

int inspect_file(const std::string& path, bool json) {
  const FileReport report = report_of(path);
  const SafetensorsFile file = SafetensorsFile::open(path);  // for the list of tensors; only its header is read
  const std::set<std::string> unknown(report.unknown.tensors.begin(), report.unknown.tensors.end());
  if (!json) {
    print_report(path, file, report, unknown);
    return 0;
  }
  const ordered_json out = {{"file", path},
                            {"kind", report.kind},
                            {"bytes", file.bytes()},
                            {"facts", report.facts},
                            {"tensors", tensors_json(file, unknown)},
                            {"unknown_metadata", report.unknown.metadata}};
  fmt::print("{}\n", out.dump(2, ' ', false, ordered_json::error_handler_t::replace));
  return 0;
}

}  // namespace dsacore::cli
