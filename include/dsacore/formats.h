// The formats and choices that have names, and their names as files and the command line spell them.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace dsacore {

/// The storage of a BF16 number. Arithmetic is in src/format/numeric.h.
struct BFloat16 {
  uint16_t bits = 0;
};

enum class KvFormat : uint8_t { kFp8DsMla, kFp8, kNvfp4DsMla };
enum class IndexFormat : uint8_t { kFp8, kMxfp4 };
enum class BackendKind : uint8_t { kReference, kCpu, kCuda };
/// How partial latents travel between DCP ranks (spec 7, step 4). `kAuto` is the table's choice.
enum class PartialFormat : uint8_t { kAuto, kBf16, kProj };
enum class OverlapMode : uint8_t { kSerial, kWait, kFork, kFront, kLate, kLateFront };
enum class ElementType : uint8_t { kBf16, kF32, kU8, kI32, kI64 };

/// Names as in spec 6, 8 and layer.md 3; an unknown text gives nullopt.
std::string_view name_of(KvFormat);
std::string_view name_of(IndexFormat);
std::string_view name_of(BackendKind);
std::string_view name_of(PartialFormat);
std::string_view name_of(OverlapMode);
std::string_view name_of(ElementType);
std::optional<KvFormat> kv_format_of(std::string_view);
std::optional<IndexFormat> index_format_of(std::string_view);
std::optional<BackendKind> backend_of(std::string_view);
std::optional<PartialFormat> partial_format_of(std::string_view);
std::optional<OverlapMode> overlap_mode_of(std::string_view);

/// Bytes of one element.
constexpr int element_bytes(ElementType type) {
  switch (type) {
    case ElementType::kBf16: return 2;
    case ElementType::kF32: return 4;
    case ElementType::kU8: return 1;
    case ElementType::kI32: return 4;
    case ElementType::kI64: return 8;
  }
  return 0;
}

/// Whether the query rows of this cache format are FP8 (else BF16), spec 4 step 4.
constexpr bool has_fp8_query(KvFormat format) { return format != KvFormat::kFp8DsMla; }

}  // namespace dsacore
