// The refusals of spec 10 that a step can earn, all before the first write. Allocates only to report.
#include <algorithm>
#include <array>

#include "layer/layer_impl.h"

namespace dsacore {
namespace {

Status refused(std::string argument, std::string value, std::string allowed) {
  return Status({ErrorCode::kRefused, std::move(argument), std::move(value), std::move(allowed)});
}

Status refused(const char* array, int64_t at, int64_t value, std::string allowed) {
  return refused(std::string(array) + "[" + std::to_string(at) + "]", std::to_string(value), std::move(allowed));
}

Status wrong_extent(const char* name, int64_t value, int64_t wanted) {
  return refused(std::string(name) + " extent", std::to_string(value), "must be " + std::to_string(wanted));
}

/// Elements lie as their type must: kernels read them whole.
template <class T, int Rank>
Status check_elements(const char* name, const View<T, Rank>& view) {
  return check_address(name, view.data(), alignof(T));
}

/// Slots below `rows`, and no non-negative one twice.
Status check_slots(const char* name, View<const int64_t, 1> slots, int64_t rows) {
  std::array<int64_t, kMaxRows> used;
  size_t count = 0;
  for (int64_t b = 0; b < slots.extent(0); ++b) {
    const int64_t slot = slots(b);
    if (slot >= rows) return refused(name, b, slot, "the cache has " + std::to_string(rows) + " rows");
    if (slot >= 0) used[count++] = slot;
  }
  std::sort(used.begin(), used.begin() + count);
  const auto twice = std::adjacent_find(used.begin(), used.begin() + count);
  if (twice == used.begin() + count) return {};
  int64_t second = 0;
  for (int64_t b = 0; b < slots.extent(0); ++b) {
    if (slots(b) == *twice) second = b;
  }
  return refused(name, second, *twice, "each slot at most once in a step");
}

/// The first `count` entries of a request's table row lie in 0..pages-1.
Status check_pages(const char* name, View<const int32_t, 2> table, int64_t request, int64_t count, int64_t pages,
                   int64_t seq_len) {
  if (count > table.extent(1)) {
    return refused(
        std::string(name) + " width", std::to_string(table.extent(1)),
        "seq_lens[" + std::to_string(request) + "] = " + std::to_string(seq_len) + " needs " + std::to_string(count));
  }
  const int32_t* row = table.row(request);
  int32_t low = 0;
  int32_t high = -1;
  for (int64_t i = 0; i < count; ++i) {
    low = std::min(low, row[i]);
    high = std::max(high, row[i]);
  }
  if (low >= 0 && high < pages) return {};
  int64_t at = 0;
  while (row[at] >= 0 && row[at] < pages) ++at;
  return refused(std::string(name) + "[" + std::to_string(request) + "][" + std::to_string(at) + "]",
                 std::to_string(row[at]), "the cache has " + std::to_string(pages) + " pages");
}

}  // namespace

const PreparedShape* PreparedLayer::Impl::find_shape(int rows, int q) const {
  const auto found = std::find_if(shapes.begin(), shapes.end(),
                                  [&](const PreparedShape& s) { return s.key.rows == rows && s.key.q == q; });
  return found != shapes.end() ? &*found : nullptr;
}

Status PreparedLayer::Impl::check(const Step& step, const PreparedShape** shape) const {
  if (Status s = check_shapes(step, shape); !s.ok()) return s;
  const bool readable = context.device == nullptr;
  return readable && step.seq_lens.extent(0) > 0 ? check_contents(step, **shape) : Status();
}

/// What the host knows wherever the tensors lie.
Status PreparedLayer::Impl::check_shapes(const Step& step, const PreparedShape** shape) const {
  if (!bound) return refused("caches", "none", "call prepare_cache before run");
  if (step.q < 1 || step.batch % step.q != 0) {
    return refused("batch", std::to_string(step.batch), "must be a multiple of q = " + std::to_string(step.q));
  }
  const PreparedShape* found = find_shape(step.batch, step.q);
  if (found == nullptr) {
    std::string allowed = "prepared (batch, q):";
    for (const PreparedShape& s : shapes)
      allowed += " (" + std::to_string(s.key.rows) + ", " + std::to_string(s.key.q) + ")";
    return refused("batch, q", std::to_string(step.batch) + ", " + std::to_string(step.q), allowed);
  }
  *shape = found;
  if (step.page != 0 && step.page != kv.page) {
    return refused("page", std::to_string(step.page), "prepared with " + std::to_string(kv.page));
  }

  const int64_t requests = step.seq_lens.extent(0);
  const int64_t rows = requests * step.q;
  if (rows > step.batch) {
    return refused("seq_lens extent", std::to_string(requests),
                   "at most " + std::to_string(step.batch / step.q) + " requests");
  }
  if (step.projected.extent(0) != rows) return wrong_extent("projected", step.projected.extent(0), rows);
  if (step.slots.extent(0) != rows) return wrong_extent("slots", step.slots.extent(0), rows);
  if (step.index_slots.extent(0) != rows) return wrong_extent("index_slots", step.index_slots.extent(0), rows);
  if (step.block_table.extent(0) != requests) return wrong_extent("block_table", step.block_table.extent(0), requests);
  if (!step.index_block_table.empty() && step.index_block_table.extent(0) != requests) {
    return wrong_extent("index_block_table", step.index_block_table.extent(0), requests);
  }
  const LayerSizes& sizes = model().sizes;
  if (step.out.empty() || step.out.extent(0) != step.batch || step.out.extent(1) != int64_t(sizes.heads) * kValue) {
    return refused(
        "out", "[" + std::to_string(step.out.extent(0)) + ", " + std::to_string(step.out.extent(1)) + "]",
        "must be [" + std::to_string(step.batch) + ", " + std::to_string(int64_t(sizes.heads) * kValue) + "]");
  }
  if (step.out.stride(0) < step.out.extent(1) || step.out.stride(0) > kMaxPitch) {
    return refused("out pitch", std::to_string(step.out.stride(0)),
                   "allowed " + std::to_string(step.out.extent(1)) + ".." + std::to_string(kMaxPitch));
  }
  if (Status s = check_elements("out", step.out); !s.ok()) return s;
  if (rows == 0) return {};
  if (step.projected.extent(1) < sizes.width()) {
    return refused("projected width", std::to_string(step.projected.extent(1)),
                   "must be at least " + std::to_string(sizes.width()));
  }
  if (step.projected.stride(0) != found->pitch_elems) {
    return refused("projected pitch", std::to_string(step.projected.stride(0)),
                   "prepared with " + std::to_string(found->pitch_elems));
  }
  if (Status s = check_elements("projected", step.projected); !s.ok()) return s;
  if (Status s = check_elements("slots", step.slots); !s.ok()) return s;
  if (Status s = check_elements("index_slots", step.index_slots); !s.ok()) return s;
  if (Status s = check_elements("block_table", step.block_table); !s.ok()) return s;
  if (Status s = check_elements("index_block_table", step.index_block_table); !s.ok()) return s;
  return check_elements("seq_lens", step.seq_lens);
}

/// What the tensors hold: slots, lengths and pages inside the caches.
Status PreparedLayer::Impl::check_contents(const Step& step, const PreparedShape& shape) const {
  const int64_t requests = step.seq_lens.extent(0);
  if (Status s = check_slots("slots", step.slots, kv.pages * kv.page); !s.ok()) return s;
  if (Status s = check_slots("index_slots", step.index_slots, index.pages * kIndexPage); !s.ok()) return s;

  for (int64_t r = 0; r < requests; ++r) {
    const int64_t n = step.seq_lens(r);
    if (n < 0 || n > max_context) {
      return refused("seq_lens", r, n, "allowed 0.." + std::to_string(max_context) + ", the prepared max_context");
    }
    const int64_t local = local_count(shard, n);
    if (local > shape.key.max_context) {
      return refused("seq_lens", r, n, "more tokens than the prepared cache_pages hold");
    }
    if (Status s = check_pages("block_table", step.block_table, r, pages_of(local, kv.page), kv.pages, n); !s.ok())
      return s;
    if (!step.index_block_table.empty()) {
      const int64_t count = pages_of(local, kIndexPage);
      if (Status s = check_pages("index_block_table", step.index_block_table, r, count, index.pages, n); !s.ok())
        return s;
    } else {
      const int64_t whole = index.pages / (kv.page / kIndexPage);  // MLA pages whose index pages all exist
      const int64_t full = local / kv.page;
      if (Status s = check_pages("block_table (index cache)", step.block_table, r, full, whole, n); !s.ok()) return s;
      if (local % kv.page != 0) {  // the last page needs the index pages of its tokens only
        const int32_t page = step.block_table(r, full);
        const int64_t last = int64_t(page) * (kv.page / kIndexPage) + pages_of(local % kv.page, kIndexPage) - 1;
        if (last >= index.pages) {
          return refused("block_table[" + std::to_string(r) + "][" + std::to_string(full) + "]", std::to_string(page),
                         "its index pages lie outside an index cache of " + std::to_string(index.pages) + " pages");
        }
      }
    }
  }
  return {};
}

}  // namespace dsacore
