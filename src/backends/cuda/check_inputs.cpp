// The words of the input check's refusals: those of src/layer/check_step.cpp.
#include "backends/cuda/check_inputs.h"

#include <string>

namespace dsacore::cuda {
namespace {

std::string number(int64_t n) { return std::to_string(n); }
std::string element(const char* array, int64_t at) { return std::string(array) + "[" + number(at) + "]"; }

/// A table whose row is too short for a request's length.
Error too_narrow(const std::string& table, const InputRecord& r, int64_t needed) {
  return {ErrorCode::kRefused, table + " width", number(r.value),
          element("seq_lens", r.at) + " = " + number(r.seq_len) + " needs " + number(needed)};
}
/// An entry of a table's row.
Error wrong_entry(const char* table, const InputRecord& r, std::string allowed) {
  return {ErrorCode::kRefused, element(table, r.at) + "[" + number(r.position) + "]", number(r.value),
          std::move(allowed)};
}
Error wrong_at(const char* array, const InputRecord& r, std::string allowed) {
  return {ErrorCode::kRefused, element(array, r.at), number(r.value), std::move(allowed)};
}

std::string cache_rows(int64_t rows) { return "the cache has " + number(rows) + " rows"; }
std::string cache_pages(int64_t pages) { return "the cache has " + number(pages) + " pages"; }

}  // namespace

std::optional<Error> offence_of(const InputRecord& r, const InputCheckArgs& args) {
  constexpr const char* kOnce = "each slot at most once in a step";
  const int64_t local = local_count(args.shard, r.seq_len);
  switch (r.check) {
    case InputCheck::kNone: return {};
    case InputCheck::kSlot: return wrong_at("slots", r, cache_rows(args.kv.pages * args.kv.page));
    case InputCheck::kSlotTwice: return wrong_at("slots", r, kOnce);
    case InputCheck::kIndexSlot: return wrong_at("index_slots", r, cache_rows(args.index.pages * kIndexPage));
    case InputCheck::kIndexSlotTwice: return wrong_at("index_slots", r, kOnce);
    case InputCheck::kSeqLen:
      return wrong_at("seq_lens", r, "allowed 0.." + number(args.max_context) + ", the prepared max_context");
    case InputCheck::kSeqLenBeyondPages:
      return wrong_at("seq_lens", r, "more tokens than the prepared cache_pages hold");
    case InputCheck::kBlockTableWidth: return too_narrow("block_table", r, pages_of(local, args.kv.page));
    case InputCheck::kBlockTable: return wrong_entry("block_table", r, cache_pages(args.kv.pages));
    case InputCheck::kIndexBlockTableWidth: return too_narrow("index_block_table", r, pages_of(local, kIndexPage));
    case InputCheck::kIndexBlockTable: return wrong_entry("index_block_table", r, cache_pages(args.index.pages));
    case InputCheck::kDerivedIndexPage:
      return wrong_entry("block_table (index cache)", r, cache_pages(args.index.pages / (args.kv.page / kIndexPage)));
    case InputCheck::kDerivedLastIndexPage:
      return wrong_entry("block_table", r,
                         "its index pages lie outside an index cache of " + number(args.index.pages) + " pages");
  }
  return {};
}

}  // namespace dsacore::cuda
