// What layer, step and output files have in common: the format line, strict numbers in metadata, tensors of a given
// type and rank, and what a reader of version 1 does not know.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "io/safetensors.h"

namespace dsacore {

/// Version of the files of spec 8. Files of version 1 are read for ever: a change that a reader of version 1 would
/// misread takes another number, and this one keeps its reader.
inline constexpr std::string_view kFileVersion = "1";

/// Tensors and metadata keys that the reader ignored; `inspect` shows them.
struct UnknownFields {
  std::vector<std::string> tensors;
  std::vector<std::string> metadata;
};

/// Requires `format` and version 1. Throws `kMalformedFile` where they are missing, `kRefused` where they are others.
void require_format(const SafetensorsFile& file, std::string_view format);

/// Null where the key is absent.
const std::string* find_metadata(const SafetensorsFile& file, std::string_view key);
/// Throws `kMalformedFile` where the key is absent.
const std::string& need_metadata(const SafetensorsFile& file, std::string_view key);
/// The whole text as a number: no spaces, no sign but '-', nothing after it. Throws `kMalformedFile`.
int64_t need_integer(const SafetensorsFile& file, std::string_view key);
/// The same for a finite FP64 number.
double need_number(const SafetensorsFile& file, std::string_view key);

/// The shortest text that reads back as `value`.
std::string number_text(double value);

/// The tensor, of one of the types and of `rank` axes. Throws `kMalformedFile` where it is absent, else `kRefused`.
const SafetensorsTensor& need_tensor(const SafetensorsFile& file, std::string_view name,
                                     std::initializer_list<ElementType> types, int rank);
/// Requires an extent; `allowed` says why, e.g. "must be q_lora 1536".
void require_extent(const SafetensorsFile& file, const SafetensorsTensor& tensor, int axis, int64_t extent,
                    const std::string& allowed);

/// "I32 [2, 3]".
std::string tensor_text(const SafetensorsTensor& tensor);

UnknownFields unknown_fields(const SafetensorsFile& file, std::initializer_list<std::string_view> tensors,
                             std::initializer_list<std::string_view> metadata);

}  // namespace dsacore
