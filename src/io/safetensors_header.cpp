#include "io/safetensors_header.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <utility>

namespace dsacore {
namespace {

struct Dtype {
  std::string_view name;
  int bytes;
};
// Types of other files' tensors whose size is known, so that their bytes are checked as well. Ours are in ElementType.
constexpr Dtype kForeign[] = {{"BOOL", 1}, {"I8", 1},  {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"F8_E8M0", 1}, {"I16", 2},
                              {"U16", 2},  {"F16", 2}, {"U32", 4},     {"U64", 8},     {"F64", 8},     {"C64", 8}};
constexpr ElementType kOurs[] = {ElementType::kBf16, ElementType::kF32, ElementType::kU8, ElementType::kI32,
                                 ElementType::kI64};

/// Bytes of an element; none where the type's name is not known.
std::optional<int> bytes_of(const SafetensorsTensor& tensor) {
  if (tensor.type) return element_bytes(*tensor.type);
  for (const auto& [name, bytes] : kForeign) {
    if (name == tensor.dtype) return bytes;
  }
  return std::nullopt;
}

/// Follows the JSON text without building a tree, so that depth costs nothing and keys that appear twice are seen.
class HeaderReader {
 public:
  HeaderReader(SafetensorsHeader& header, const std::string& file) : header_(header), file_(file) {}

  /// What was wrong, in the order found; only where parsing stopped.
  const std::optional<Exception>& error() const { return error_; }

  // The events of nlohmann's parser. False ends the parse.
  bool null() { return wrong_value("null"); }
  bool boolean(bool value) { return wrong_value(value ? "true" : "false"); }
  bool number_float(double, const std::string& text) { return wrong_value(text); }
  bool binary(nlohmann::json::binary_t&) { return wrong_value("binary"); }
  bool number_integer(int64_t value) { return wrong_value(std::to_string(value)); }  // only negative ones arrive here

  bool number_unsigned(uint64_t value) {
    if (place_ != Place::kShape && place_ != Place::kOffsets) return wrong_value(std::to_string(value));
    if (value > uint64_t(std::numeric_limits<int64_t>::max())) return wrong_value(std::to_string(value));
    numbers_.push_back(int64_t(value));
    return true;
  }

  bool string(std::string& text) {
    if (place_ == Place::kMetadata) {
      if (!header_.metadata.emplace(key_, text).second) return fail("__metadata__", key_, "every key may appear once");
      return true;
    }
    if (place_ != Place::kTensor || key_ != "dtype") return wrong_value(fmt::format("\"{}\"", printable(text)));
    tensor_.dtype = text;
    return true;
  }

  bool start_object(size_t) {
    switch (place_) {
      case Place::kOutside: place_ = Place::kTop; return true;
      case Place::kTop:
        if (key_ == "__metadata__") {
          place_ = Place::kMetadata;
          return true;
        }
        tensor_ = {};
        tensor_.name = key_;
        seen_.clear();
        place_ = Place::kTensor;
        return true;
      default: return wrong_value("an object");
    }
  }

  bool key(std::string& name) {
    key_ = name;
    if (place_ == Place::kTop) {
      if (name.find('\0') != std::string::npos) return fail("header", name, "names must not hold NUL");
      if (!names_.insert(name).second) return fail("header", name, "every name may appear once");
    }
    if (place_ == Place::kTensor && !seen_.insert(name).second)
      return fail(tensor_.name, name, "every key may appear once");
    return true;
  }

  bool end_object() {
    if (place_ == Place::kTop) {
      place_ = Place::kOutside;
      return true;
    }
    if (place_ == Place::kTensor && !end_tensor()) return false;
    place_ = Place::kTop;
    return true;
  }

  bool start_array(size_t) {
    if (place_ != Place::kTensor || (key_ != "shape" && key_ != "data_offsets")) return wrong_value("an array");
    place_ = key_ == "shape" ? Place::kShape : Place::kOffsets;
    numbers_.clear();
    return true;
  }

  bool end_array() {
    if (place_ == Place::kShape) {
      tensor_.shape = numbers_;
    } else {
      if (numbers_.size() != 2 || numbers_[0] > numbers_[1]) {
        return fail(tensor_.name + ".data_offsets", shape_text(numbers_),
                    "must be [begin, end] with begin at most end");
      }
      tensor_.begin = numbers_[0];
      tensor_.end = numbers_[1];
    }
    place_ = Place::kTensor;
    return true;
  }

  bool parse_error(size_t position, const std::string&, const nlohmann::json::exception&) {
    return fail("header", fmt::format("JSON that breaks off at its byte {}", position), "must be one JSON object");
  }

 private:
  enum class Place { kOutside, kTop, kMetadata, kTensor, kShape, kOffsets };

  bool fail(std::string_view what, std::string_view value, std::string allowed) {
    error_ = file_error(ErrorCode::kMalformedFile, file_, printable(what), printable(value), std::move(allowed));
    return false;
  }

  /// A value of a kind that does not belong where it stands.
  bool wrong_value(std::string_view value) {
    switch (place_) {
      case Place::kOutside: return fail("header", value, "must be one JSON object");
      case Place::kTop: return fail(key_, value, "must be an object with dtype, shape and data_offsets");
      case Place::kMetadata: return fail(fmt::format("__metadata__.{}", key_), value, "must be a string");
      case Place::kTensor:
        if (key_ == "dtype") return fail(tensor_.name + ".dtype", value, "must be a string");
        if (key_ == "shape") return fail(tensor_.name + ".shape", value, "must be an array");
        if (key_ == "data_offsets") return fail(tensor_.name + ".data_offsets", value, "must be an array");
        return fail(tensor_.name, key_, "allowed keys: dtype, shape, data_offsets");
      case Place::kShape: return fail(tensor_.name + ".shape", value, "must hold counts below 2^63");
      case Place::kOffsets: break;
    }
    return fail(tensor_.name + ".data_offsets", value, "must hold counts below 2^63");
  }

  bool end_tensor() {
    for (const char* key : {"dtype", "shape", "data_offsets"}) {
      if (!seen_.contains(key)) return fail(fmt::format("{}.{}", tensor_.name, key), "absent", "must be given");
    }
    for (const ElementType type : kOurs) {
      if (name_of(type) == tensor_.dtype) tensor_.type = type;
    }
    header_.by_name.emplace(tensor_.name, header_.tensors.size());
    header_.tensors.push_back(std::move(tensor_));
    return true;
  }

  SafetensorsHeader& header_;
  const std::string& file_;
  std::optional<Exception> error_;
  Place place_ = Place::kOutside;
  std::string key_;
  std::set<std::string> names_;
  std::set<std::string, std::less<>> seen_;  ///< keys of the tensor at hand
  SafetensorsTensor tensor_;
  std::vector<int64_t> numbers_;
};

/// Shape and place of one tensor against the data there is.
void check_tensor(const SafetensorsTensor& tensor, int64_t data_bytes, const std::string& file) {
  const auto fail = [&](const char* what, const std::string& value, std::string allowed) {
    return file_error(ErrorCode::kMalformedFile, file, printable(tensor.name) + what, value, std::move(allowed));
  };
  const std::string offsets = shape_text({tensor.begin, tensor.end});
  if (tensor.end > data_bytes) {
    throw fail(".data_offsets", offsets, fmt::format("must lie within the {} data bytes of the file", data_bytes));
  }
  const std::optional<int> bytes = bytes_of(tensor);
  if (!bytes) return;
  int64_t size = *bytes;
  for (const int64_t extent : tensor.shape) {
    if (__builtin_mul_overflow(size, extent, &size)) {
      throw fail(".shape", shape_text(tensor.shape), "the product of the extents must be below 2^63 bytes");
    }
  }
  if (size != tensor.end - tensor.begin) {
    throw fail(".data_offsets", offsets,
               fmt::format("{} {} takes {} bytes", tensor.dtype, shape_text(tensor.shape), size));
  }
}

/// The tensors' bytes must follow each other from 0 to the end of the file.
void check_coverage(const std::vector<SafetensorsTensor>& tensors, int64_t data_bytes, const std::string& file) {
  std::vector<size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), size_t(0));
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return std::pair(tensors[a].begin, tensors[a].end) < std::pair(tensors[b].begin, tensors[b].end);
  });
  int64_t at = 0;
  for (const size_t i : order) {
    const SafetensorsTensor& tensor = tensors[i];
    if (tensor.begin != at) {
      throw file_error(
          ErrorCode::kMalformedFile, file, printable(tensor.name) + ".data_offsets",
          shape_text({tensor.begin, tensor.end}),
          fmt::format("{}; must begin at {}", tensor.begin < at ? "overlaps another tensor" : "leaves a hole", at));
    }
    at = tensor.end;
  }
  if (at != data_bytes) {
    throw file_error(ErrorCode::kMalformedFile, file, "data", fmt::format("{} bytes", data_bytes),
                     fmt::format("the tensors take {}", at));
  }
}

}  // namespace

std::string shape_text(const std::vector<int64_t>& shape) {
  constexpr size_t kShown = 16;
  const bool cut = shape.size() > kShown;
  return fmt::format("[{}{}]", fmt::join(shape.begin(), shape.begin() + int64_t(std::min(shape.size(), kShown)), ", "),
                     cut ? ", ..." : "");
}

std::string printable(std::string_view text) {
  constexpr size_t kShown = 80;
  constexpr char kHex[] = "0123456789abcdef";
  std::string out;
  for (const char c : text.substr(0, kShown)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte != 0x7F) {
      out += c;
    } else {
      out += {'\\', 'x', kHex[byte >> 4], kHex[byte & 15]};
    }
  }
  return text.size() > kShown ? out + "..." : out;
}

Exception file_error(ErrorCode code, const std::string& file, std::string_view what, std::string value,
                     std::string allowed) {
  return Exception({code, fmt::format("{}: {}", file, what), std::move(value), std::move(allowed)});
}

SafetensorsHeader parse_safetensors_header(std::string_view text, int64_t data_bytes, const std::string& file) {
  SafetensorsHeader header;
  HeaderReader reader(header, file);
  if (!nlohmann::json::sax_parse(text.begin(), text.end(), &reader)) {
    throw reader.error().value_or(
        file_error(ErrorCode::kMalformedFile, file, "header", "text", "must be one JSON object"));
  }
  for (const SafetensorsTensor& tensor : header.tensors) check_tensor(tensor, data_bytes, file);
  check_coverage(header.tensors, data_bytes, file);
  return header;
}

}  // namespace dsacore
