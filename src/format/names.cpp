// The names of formats and choices, as files and the command line spell them (spec 6, 8; layer.md 3).
#include <array>
#include <utility>

#include "dsacore/formats.h"

namespace dsacore {
namespace {

template <class E, size_t N>
using Names = std::array<std::pair<E, std::string_view>, N>;

constexpr Names<KvFormat, 3> kKvFormats{{
    {KvFormat::kFp8DsMla, "fp8_ds_mla"},
    {KvFormat::kFp8, "fp8"},
    {KvFormat::kNvfp4DsMla, "nvfp4_ds_mla"},
}};
constexpr Names<IndexFormat, 2> kIndexFormats{{
    {IndexFormat::kFp8, "fp8"},
    {IndexFormat::kMxfp4, "mxfp4"},
}};
constexpr Names<BackendKind, 3> kBackends{{
    {BackendKind::kReference, "reference"},
    {BackendKind::kCpu, "cpu"},
    {BackendKind::kCuda, "cuda"},
}};
constexpr Names<PartialFormat, 3> kPartialFormats{{
    {PartialFormat::kAuto, "auto"},
    {PartialFormat::kBf16, "bf16"},
    {PartialFormat::kProj, "proj"},
}};
constexpr Names<OverlapMode, 6> kOverlapModes{{
    {OverlapMode::kSerial, "serial"},
    {OverlapMode::kWait, "wait"},
    {OverlapMode::kFork, "fork"},
    {OverlapMode::kFront, "front"},
    {OverlapMode::kLate, "late"},
    {OverlapMode::kLateFront, "late_front"},
}};
constexpr Names<ElementType, 5> kElementTypes{{
    {ElementType::kBf16, "BF16"},
    {ElementType::kF32, "F32"},
    {ElementType::kU8, "U8"},
    {ElementType::kI32, "I32"},
    {ElementType::kI64, "I64"},
}};

template <class E, size_t N>
constexpr std::string_view find_name(const Names<E, N>& names, E value) {
  for (const auto& [each, name] : names) {
    if (each == value) return name;
  }
  return "unknown";
}

template <class E, size_t N>
constexpr std::optional<E> find_value(const Names<E, N>& names, std::string_view text) {
  for (const auto& [value, name] : names) {
    if (name == text) return value;
  }
  return std::nullopt;
}

}  // namespace

std::string_view name_of(KvFormat value) { return find_name(kKvFormats, value); }
std::string_view name_of(IndexFormat value) { return find_name(kIndexFormats, value); }
std::string_view name_of(BackendKind value) { return find_name(kBackends, value); }
std::string_view name_of(PartialFormat value) { return find_name(kPartialFormats, value); }
std::string_view name_of(OverlapMode value) { return find_name(kOverlapModes, value); }
std::string_view name_of(ElementType value) { return find_name(kElementTypes, value); }
std::optional<KvFormat> kv_format_of(std::string_view text) { return find_value(kKvFormats, text); }
std::optional<IndexFormat> index_format_of(std::string_view text) { return find_value(kIndexFormats, text); }
std::optional<BackendKind> backend_of(std::string_view text) { return find_value(kBackends, text); }
std::optional<PartialFormat> partial_format_of(std::string_view text) { return find_value(kPartialFormats, text); }
std::optional<OverlapMode> overlap_mode_of(std::string_view text) { return find_value(kOverlapModes, text); }

}  // namespace dsacore
