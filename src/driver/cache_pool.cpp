#include "driver/cache_pool.h"

#include <string>

#include "format/layouts.h"
#include "io/random.h"

namespace dsacore {
namespace {

/// Of the values of a key: a code without its lowest bit is a code as well.
constexpr uint8_t low_bits(IndexFormat format) { return format == IndexFormat::kFp8 ? 0x01 : 0x11; }

int value_bytes(IndexFormat format) {
  return with_layout(format, [](auto layout) { return layout.kScalesAt; });
}

}  // namespace

void CachePool::fill(const CaseOptions& shape, const Inputs& placed, Memory& memory, uint64_t number) {
  const Inputs pool = inputs_of(pages_of(shape));
  const uint64_t seed = stream_seed(shape.seed, number);
  const auto spread = [&](std::byte* to, int64_t pages, const std::byte* from, int row_bytes, int values,
                          uint8_t bits) {
    const MemoryBlock there(memory, int64_t(kPages) * kIndexPage * row_bytes, "pool of cache pages");
    memory.copy_in(there.data(), from, there.size());
    memory.spread_pages({to, pages, there.data(), kPages, kIndexPage * row_bytes, values, bits, seed});
  };
  const KvCache& kv = placed.kv;
  spread(kv.data, kv.pages * (kv.page / kIndexPage), pool.kv.data, kv.row_bytes, 0, 0);
  const IndexCache& index = placed.index;
  // Keys that differ, so that scores do: ties are rare in a real context.
  spread(index.data, index.pages, pool.index.data, index.row_bytes, value_bytes(index.format), low_bits(index.format));
}

/// A case of one request has the keys of any with the same seed; its weights are small and not used.
const Case& CachePool::pages_of(const CaseOptions& shape) {
  const bool fits = pages_ && made_for_.seed == shape.seed && made_for_.kv_format == shape.kv_format &&
                    made_for_.index_format == shape.index_format;
  if (fits) return *pages_;
  CaseOptions o;
  o.seed = shape.seed;
  o.kv_format = shape.kv_format;
  o.index_format = shape.index_format;
  o.batch = o.heads = 1;
  o.q_lora = kQLoraStep;
  o.index_heads = kMinIndexHeads;
  o.context = std::to_string(kPages * kIndexPage);
  o.slots = SlotsKind::kNegative;  // the last token too is an earlier step's
  o.spare_pages = 0;
  pages_ = make_case(o);
  made_for_ = o;
  return *pages_;
}

}  // namespace dsacore
