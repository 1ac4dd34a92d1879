// The header of a safetensors file: JSON text -> names, types, shapes and places of its tensors, all checked.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "dsacore/formats.h"
#include "dsacore/status.h"

namespace dsacore {

struct SafetensorsTensor {
  std::string name;
  std::string dtype;                ///< as the file spells it
  std::optional<ElementType> type;  ///< none: a type this library has no use for
  std::vector<int64_t> shape;
  int64_t begin = 0;  ///< in the data that follows the header
  int64_t end = 0;
};

struct SafetensorsHeader {
  std::vector<SafetensorsTensor> tensors;              ///< in the order of the file
  std::map<std::string, size_t, std::less<>> by_name;  ///< position in `tensors`
  std::map<std::string, std::string, std::less<>> metadata;
};

/// Parses `text` for a file with `data_bytes` bytes behind its header. Throws `kMalformedFile`; `file` names the file
/// in errors. Refused: anything but an object of tensors, names twice or with a NUL, shapes that are no counts or whose
/// product overflows, data that does not fit the shape, lies outside the file, overlaps, or leaves holes.
SafetensorsHeader parse_safetensors_header(std::string_view text, int64_t data_bytes, const std::string& file);

/// "[2, 3]".
std::string shape_text(const std::vector<int64_t>& shape);
/// `text` fit for a message: control bytes as \xNN, cut after 80 bytes.
std::string printable(std::string_view text);
/// An exception about `what` in `file`: "FILE: what = value: allowed".
Exception file_error(ErrorCode code, const std::string& file, std::string_view what, std::string value,
                     std::string allowed);

}  // namespace dsacore
