#include "driver/compare_caches.h"

#include <fmt/format.h>

#include <array>
#include <cstring>
#include <vector>

#include "format/layouts.h"
#include "format/paging.h"

namespace dsacore {
namespace {

std::span<const uint8_t> codes_at(const std::byte* at, int count) {
  return {reinterpret_cast<const uint8_t*>(at), size_t(count)};
}

/// Two e2m1 codes a byte, taken apart.
template <int Count>
std::array<uint8_t, Count> nibbles_at(const std::byte* at) {
  std::array<uint8_t, Count> codes;
  for (int i = 0; i < Count; i += 2) {
    codes[size_t(i)] = uint8_t(at[i / 2]) & 15;
    codes[size_t(i + 1)] = uint8_t(at[i / 2]) >> 4;
  }
  return codes;
}

void tally_row(KvFp8DsMla layout, const std::byte* got, const std::byte* expected, CodeTally& tally) {
  for (int tile = 0; tile < layout.kTiles; ++tile) {
    const int at = layout.kValuesAt + tile * layout.kTile;
    tally.block(CodeKind::kE4m3, {codes_at(got + at, layout.kTile), double(layout.scale(got, tile))},
                {codes_at(expected + at, layout.kTile), double(layout.scale(expected, tile))});
  }
  tally.exact({got + layout.kPeAt, layout.kRowBytes - layout.kPeAt},
              {expected + layout.kPeAt, layout.kRowBytes - layout.kPeAt});
}

void tally_row(KvFp8 layout, const std::byte* got, const std::byte* expected, CodeTally& tally) {
  tally.codes(CodeKind::kE4m3, codes_at(got, layout.kRowBytes), codes_at(expected, layout.kRowBytes));
}

void tally_row(KvNvfp4DsMla layout, const std::byte* got, const std::byte* expected, CodeTally& tally) {
  for (int block = 0; block < layout.kBlocks; ++block) {
    const int at = layout.kValuesAt + block * layout.kBlock / 2;
    const auto x = nibbles_at<KvNvfp4DsMla::kBlock>(got + at), y = nibbles_at<KvNvfp4DsMla::kBlock>(expected + at);
    tally.coded_block(x, uint8_t(got[layout.scale_at(block)]), y, uint8_t(expected[layout.scale_at(block)]));
  }
  tally.exact({got + layout.kPeAt, kPe}, {expected + layout.kPeAt, kPe});
}

void tally_key(IndexFp8 layout, const std::byte* got, const std::byte* expected, int token, CodeTally& tally) {
  const int at = layout.value_at(token);
  tally.block(CodeKind::kE4m3, {codes_at(got + at, layout.kValueBytes), double(layout.scale(got, token))},
              {codes_at(expected + at, layout.kValueBytes), double(layout.scale(expected, token))});
}

void tally_key(IndexMxfp4 layout, const std::byte* got, const std::byte* expected, int token, CodeTally& tally) {
  for (int block = 0; block < layout.kBlocks; ++block) {
    const int at = layout.value_at(token) + block * layout.kBlock / 2;
    const auto x = nibbles_at<IndexMxfp4::kBlock>(got + at), y = nibbles_at<IndexMxfp4::kBlock>(expected + at);
    tally.block(CodeKind::kE2m1, {x, double(layout.scale(got, token, block))},
                {y, double(layout.scale(expected, token, block))});
  }
}

/// Bytes of `[0, size)` that differ and that `inserted` (offset, length; not ordered) does not cover.
int64_t changed_elsewhere(const std::byte* got, const std::byte* before, int64_t size,
                          const std::vector<std::pair<int64_t, int64_t>>& inserted) {
  constexpr int64_t kChunk = 1 << 16;
  int64_t changed = 0;
  for (int64_t at = 0; at < size; at += kChunk) {
    const int64_t length = std::min(kChunk, size - at);
    if (std::memcmp(got + at, before + at, size_t(length)) == 0) continue;
    for (int64_t i = at; i < at + length; ++i) {
      if (got[i] == before[i]) continue;
      bool covered = false;
      for (const auto& [from, count] : inserted) covered = covered || (i >= from && i < from + count);
      changed += !covered;
    }
  }
  return changed;
}

AgreementLine finished(const CodeTally& tally, const char* tensor, size_t rows, int64_t elsewhere) {
  AgreementLine line = tally.line(tensor);
  line.figure = fmt::format("{} rows inserted: {}", rows, line.figure);
  if (elsewhere > 0) {
    line.figure += fmt::format("; {} bytes changed elsewhere", elsewhere);
    line.ok = false;
  }
  return line;
}

}  // namespace

AgreementLine compare_kv_cache(const Inputs& before, const KvCache& expected, const KvCache& got,
                               const JudgedRows& judged) {
  CodeTally tally;
  std::vector<std::pair<int64_t, int64_t>> inserted;
  for (int64_t b = 0; b < before.step.slots.extent(0); ++b) {
    if (before.step.slots(b) < 0) continue;
    const PhysicalRow row = physical_row(place_of(Slot(before.step.slots(b)), before.kv.page), before.kv.stride_rows);
    inserted.emplace_back(int64_t(row.value()) * before.kv.row_bytes, before.kv.row_bytes);
    if (judged.dirty[size_t(b)]) continue;
    with_layout(before.kv.format,
                [&](auto layout) { tally_row(layout, row_at(got, row), row_at(expected, row), tally); });
  }
  const int64_t elsewhere = changed_elsewhere(got.data, before.kv.data, cache_bytes(before.kv), inserted);
  return finished(tally, "kv_cache", inserted.size(), elsewhere);
}

AgreementLine compare_index_cache(const Inputs& before, const IndexCache& expected, const IndexCache& got,
                                  const JudgedRows& judged) {
  CodeTally tally;
  std::vector<std::pair<int64_t, int64_t>> inserted;
  size_t rows = 0;
  for (int64_t b = 0; b < before.step.index_slots.extent(0); ++b) {
    if (before.step.index_slots(b) < 0) continue;
    ++rows;
    const Place place = place_of(Slot(before.step.index_slots(b)), kIndexPage);
    const int64_t page = int64_t(place.page.value()) * kIndexPage * before.index.row_bytes;
    with_layout(before.index.format, [&](auto layout) {
      inserted.emplace_back(page + layout.value_at(place.offset), layout.kValueBytes);
      inserted.emplace_back(page + layout.scale_at(place.offset), layout.kScaleBytes);
      if (!judged.dirty[size_t(b)]) tally_key(layout, got.data + page, expected.data + page, place.offset, tally);
    });
  }
  const int64_t elsewhere = changed_elsewhere(got.data, before.index.data, cache_bytes(before.index), inserted);
  return finished(tally, "index_cache", rows, elsewhere);
}

}  // namespace dsacore
