#include "driver/inputs.h"

#include <algorithm>
#include <set>
#include <string>

#include "dsacore/status.h"
#include "io/generate.h"
#include "layer/model.h"

namespace dsacore {
namespace {

[[noreturn]] void refuse(std::string argument, int64_t value, std::string allowed) {
  throw Exception({ErrorCode::kRefused, std::move(argument), std::to_string(value), std::move(allowed)});
}

void check_pages(const char* name, View<const int32_t, 2> table, int64_t request, int64_t seq_len, int page,
                 int64_t pages) {
  const int64_t used = pages_of(seq_len, page);
  if (used > table.extent(1)) {
    refuse("seq_lens[" + std::to_string(request) + "]", seq_len,
           std::string(name) + " has " + std::to_string(table.extent(1)) + " pages of " + std::to_string(page) +
               " tokens");
  }
  for (int64_t i = 0; i < used; ++i) {
    const int32_t id = table(request, i);
    if (id < 0 || id >= pages) {
      refuse(std::string(name) + "[" + std::to_string(request) + ", " + std::to_string(i) + "]", id,
             "allowed 0.." + std::to_string(pages - 1) + ", the pages of the cache");
    }
  }
}

void require_extent(const char* name, int64_t value, int64_t wanted) {
  if (value != wanted) refuse(name, value, "must be " + std::to_string(wanted));
}

/// Slots below `rows`, and no non-negative one twice.
void check_slots(const char* name, View<const int64_t, 1> slots, int64_t rows) {
  std::set<int64_t> used;
  for (int64_t b = 0; b < slots.extent(0); ++b) {
    const std::string argument = std::string(name) + "[" + std::to_string(b) + "]";
    if (slots(b) >= rows) refuse(argument, slots(b), "the cache has " + std::to_string(rows) + " rows");
    if (slots(b) >= 0 && !used.insert(slots(b)).second) refuse(argument, slots(b), "each slot at most once in a step");
  }
}

void check_request(const Inputs& inputs, int64_t r) {
  const Step& step = inputs.step;
  const int64_t n = step.seq_lens(r);
  if (n < 0 || n > kMaxContext) {
    refuse("seq_lens[" + std::to_string(r) + "]", n, "allowed 0.." + std::to_string(kMaxContext));
  }
  check_pages("block_table", step.block_table, r, n, inputs.kv.page, inputs.kv.pages);
  if (!step.index_block_table.empty()) {
    check_pages("index_block_table", step.index_block_table, r, n, kIndexPage, inputs.index.pages);
    return;
  }
  for (int64_t t = 0; t < n; t += kIndexPage) {  // index pages derived from the block table (end of spec 6)
    const int32_t id = index_place(step.block_table.row(r), nullptr, inputs.kv.page, LocalId(int32_t(t))).page.value();
    if (id >= inputs.index.pages) {
      refuse("index page of token " + std::to_string(t) + " of request " + std::to_string(r), id,
             "the index cache has " + std::to_string(inputs.index.pages) + " pages");
    }
  }
}

}  // namespace

Inputs inputs_of(const Case& made) { return {made.config, made.sizes, made.weights, made.step, made.kv, made.index}; }

int64_t longest_context(const Step& step) {
  int64_t longest = 0;
  for (int64_t r = 0; r < step.seq_lens.extent(0); ++r) longest = std::max<int64_t>(longest, step.seq_lens(r));
  return longest;
}

int64_t keys_of_row(const Step& step, int64_t b) {
  const int64_t r = b / step.q;
  return r < step.seq_lens.extent(0) ? keys_seen(step.seq_lens(r), step.q, int(b % step.q)) : 0;
}

Place index_place_of(const Inputs& inputs, int64_t request, LocalId token) {
  const int32_t* own = inputs.step.index_block_table.empty() ? nullptr : inputs.step.index_block_table.row(request);
  return index_place(inputs.step.block_table.row(request), own, inputs.kv.page, token);
}

std::byte* index_page_at(const IndexCache& index, PageId page) {
  return index.data + int64_t(page.value()) * kIndexPage * index.row_bytes;
}

void check_inputs(const Inputs& inputs) {
  make_model(inputs.config, inputs.weights);  // throws where the weights are not those of one layer
  const Step& step = inputs.step;
  const int64_t requests = step.seq_lens.extent(0);
  require_extent("projected rows", step.projected.extent(0), requests * step.q);
  require_extent("slots", step.slots.extent(0), requests * step.q);
  require_extent("index_slots", step.index_slots.extent(0), requests * step.q);
  require_extent("block_table rows", step.block_table.extent(0), requests);
  if (step.projected.extent(1) < inputs.sizes.width()) {
    refuse("projected width", step.projected.extent(1),
           "must be at least the row's " + std::to_string(inputs.sizes.width()));
  }
  check_slots("slots", step.slots, inputs.kv.pages * inputs.kv.page);
  check_slots("index_slots", step.index_slots, inputs.index.pages * kIndexPage);
  for (int64_t r = 0; r < requests; ++r) check_request(inputs, r);
}

}  // namespace dsacore
