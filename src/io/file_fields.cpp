#include "io/file_fields.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <utility>

namespace dsacore {
namespace {

/// The whole of `text` as a number, or false.
template <class T>
bool parse_whole(const std::string& text, T& value) {
  const char* end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && stopped == end;
}

}  // namespace

const std::string* find_metadata(const SafetensorsFile& file, std::string_view key) {
  const auto found = file.metadata().find(key);
  return found == file.metadata().end() ? nullptr : &found->second;
}

const std::string& need_metadata(const SafetensorsFile& file, std::string_view key) {
  const std::string* text = find_metadata(file, key);
  if (text == nullptr)
    throw file_error(ErrorCode::kMalformedFile, file.name(), key, "absent", "must be given in __metadata__");
  return *text;
}

void require_format(const SafetensorsFile& file, std::string_view format) {
  const auto require = [&](std::string_view key, std::string_view wanted) {
    const std::string& text = need_metadata(file, key);
    if (text != wanted)
      throw file_error(ErrorCode::kRefused, file.name(), key, printable(text), fmt::format("must be {}", wanted));
  };
  require("format", format);
  require("version", kFileVersion);
}

int64_t need_integer(const SafetensorsFile& file, std::string_view key) {
  const std::string& text = need_metadata(file, key);
  int64_t value = 0;
  if (!parse_whole(text, value)) {
    throw file_error(ErrorCode::kMalformedFile, file.name(), key, fmt::format("\"{}\"", printable(text)),
                     "must be an integer");
  }
  return value;
}

double need_number(const SafetensorsFile& file, std::string_view key) {
  const std::string& text = need_metadata(file, key);
  double value = 0;
  if (!parse_whole(text, value) || !std::isfinite(value)) {
    throw file_error(ErrorCode::kMalformedFile, file.name(), key, fmt::format("\"{}\"", printable(text)),
                     "must be a finite number");
  }
  return value;
}

std::string number_text(double value) {
  char text[32];
  return std::string(text, std::to_chars(text, text + sizeof(text), value).ptr);
}

std::string tensor_text(const SafetensorsTensor& tensor) {
  return fmt::format("{} {}", printable(tensor.dtype), shape_text(tensor.shape));
}

const SafetensorsTensor& need_tensor(const SafetensorsFile& file, std::string_view name,
                                     std::initializer_list<ElementType> types, int rank) {
  std::vector<std::string_view> names;
  for (const ElementType type : types) names.push_back(name_of(type));
  const std::string allowed =
      fmt::format("must be {} of {} {}", fmt::join(names, " or "), rank, rank == 1 ? "axis" : "axes");
  const SafetensorsTensor* tensor = file.find(name);
  if (tensor == nullptr) throw file_error(ErrorCode::kMalformedFile, file.name(), name, "absent", allowed);
  const bool typed = tensor->type && std::find(types.begin(), types.end(), *tensor->type) != types.end();
  if (!typed || int(tensor->shape.size()) != rank) {
    throw file_error(ErrorCode::kRefused, file.name(), name, tensor_text(*tensor), allowed);
  }
  return *tensor;
}

void require_extent(const SafetensorsFile& file, const SafetensorsTensor& tensor, int axis, int64_t extent,
                    const std::string& allowed) {
  if (tensor.shape[size_t(axis)] == extent) return;
  throw file_error(ErrorCode::kRefused, file.name(), tensor.name, tensor_text(tensor),
                   fmt::format("axis {} {}", axis, allowed));
}

UnknownFields unknown_fields(const SafetensorsFile& file, std::initializer_list<std::string_view> tensors,
                             std::initializer_list<std::string_view> metadata) {
  const auto knows = [](std::initializer_list<std::string_view> names, const std::string& name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  UnknownFields unknown;
  for (const SafetensorsTensor& tensor : file.tensors()) {
    if (!knows(tensors, tensor.name)) unknown.tensors.push_back(tensor.name);
  }
  for (const auto& [key, value] : file.metadata()) {
    if (!knows(metadata, key)) unknown.metadata.push_back(key);
  }
  return unknown;
}

}  // namespace dsacore
