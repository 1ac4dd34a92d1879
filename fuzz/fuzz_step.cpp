// Hostile steps through the public interface: slots, pages, lengths, tables and shapes from the fuzzer on small
// prepared layers. Each step runs on the reference and on the cpu backend. Both must say the same: refused, with
// nothing written, exactly where the specification refuses it; else the right selection, caches that changed at the
// slots alone, and outputs that agree. The caches and tables lie in buffers of their exact size, so that the address
// sanitizer sees every touch outside.
#include <fuzzer/FuzzedDataProvider.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <memory>
#include <set>

#include "dsacore/layer.h"
#include "format/layouts.h"
#include "format/numeric.h"
#include "format/paging.h"
#include "fuzz/fuzz_support.h"
#include "io/generate.h"

namespace dsacore::fuzz {
namespace {

constexpr int kRows = 6;         ///< the prepared batch
constexpr int kMaxLength = 200;  ///< the prepared max_context
constexpr std::byte kPoison{0xEE};

/// A layer prepared on one backend, with caches of its own.
struct Runner {
  Runner(const Case& c, BackendKind backend)
      : context({.backend = backend, .threads = 1}),
        layer(context, c.config, c.weights,
              {.batches = {{kRows, c.step.projected.stride(0)}}, .queries = {1, 2, 3}, .max_context = kMaxLength}) {
    kv = c.kv;
    index = c.index;
    kv_bytes.resize(size_t(((kv.pages - 1) * kv.stride_rows + kv.page) * kv.row_bytes));
    index_bytes.resize(size_t(index.pages * kIndexPage * index.row_bytes));
    kv.data = kv_bytes.data();
    index.data = index_bytes.data();
    layer.prepare_cache(kv, index);
    out.resize(size_t(kRows) * size_t(c.sizes.heads) * kValue);
  }

  Status run(const Case& c, Step step) {
    std::copy_n(c.kv.data, kv_bytes.size(), kv_bytes.data());
    std::copy_n(c.index.data, index_bytes.size(), index_bytes.data());
    std::memset(out.data(), int(kPoison), out.size() * sizeof(BFloat16));
    step.out = View<BFloat16, 2>(out.data(), kRows, int64_t(c.sizes.heads) * kValue);
    return layer.run(step);
  }

  Context context;
  PreparedLayer layer;
  KvCache kv;
  IndexCache index;
  std::vector<std::byte> kv_bytes;
  std::vector<std::byte> index_bytes;
  std::vector<BFloat16> out;
};

struct Fixture {
  explicit Fixture(const CaseOptions& options)
      : c(make_case(options)), reference(c, BackendKind::kReference), cpu(c, BackendKind::kCpu) {}
  Case c;
  Runner reference;
  Runner cpu;
};

Fixture& fixture(bool second) {
  const auto make = [](KvFormat kv, IndexFormat index, int page, int64_t stride_rows) {
    CaseOptions options;
    options.seed = 3;
    options.heads = 2;
    options.batch = kRows;
    options.context = "200";
    options.kv_format = kv;
    options.index_format = index;
    options.page = page;
    options.stride_rows = stride_rows;
    options.topk = 48;
    options.index_heads = 8;
    options.q_lora = 128;
    options.slots = SlotsKind::kNegative;  // every owned row holds a key
    return std::make_unique<Fixture>(options);
  };
  static const auto plain = make(KvFormat::kFp8DsMla, IndexFormat::kFp8, 64, 0);
  static const auto strided = make(KvFormat::kNvfp4DsMla, IndexFormat::kMxfp4, 128, 320);
  return second ? *strided : *plain;
}

/// A step whose tensors are of exactly the sizes it claims.
struct HostileStep {
  Step step;
  std::vector<BFloat16> projected;
  std::vector<int64_t> slots, index_slots;
  std::vector<int32_t> block_table, index_block_table, seq_lens;
};

/// Mostly a number of -1..high, now and then an extreme or any of the type.
template <class T>
T hostile(FuzzedDataProvider& in, int64_t high) {
  constexpr T kEdges[] = {std::numeric_limits<T>::min(), std::numeric_limits<T>::max(), T(-2), T(1) << 30};
  const int kind = in.ConsumeIntegralInRange<int>(0, 31);
  if (kind >= 28) return kEdges[kind - 28];
  if (kind >= 26) return in.ConsumeIntegral<T>();
  return T(in.ConsumeIntegralInRange<int64_t>(-1, high));
}

/// True now and then; false where the input is at its end.
bool seldom(FuzzedDataProvider& in) { return in.ConsumeIntegral<uint8_t>() >= 250; }

/// Replaces one of the values, or changes how many there are.
template <class T>
void spoil(FuzzedDataProvider& in, std::vector<T>& values, int64_t high, bool may_resize) {
  if (may_resize && seldom(in)) values.resize(in.ConsumeIntegralInRange<size_t>(0, 2 * kRows));
  if (values.empty()) return;
  values[in.ConsumeIntegralInRange<size_t>(0, values.size() - 1)] = hostile<T>(in, high);
}

/// A decode step over the case's own keys: lengths and which request's pages from the input, slots where the new tokens
/// belong.
void make_plain_step(FuzzedDataProvider& in, const Case& c, HostileStep& h, int q, int64_t requests) {
  const int64_t width = c.step.block_table.extent(1);
  const bool own_index = in.ConsumeBool();
  for (int64_t r = 0; r < requests; ++r) {
    const int64_t like = (r + in.ConsumeIntegralInRange<int64_t>(0, kRows - 1)) % kRows;
    const int64_t length = kMaxLength - in.ConsumeIntegralInRange<int64_t>(0, kMaxLength);
    h.seq_lens.push_back(int32_t(length));
    const int32_t* pages = c.step.block_table.row(like);
    h.block_table.insert(h.block_table.end(), pages, pages + width);
    for (int64_t i = 0; own_index && i < width * (c.kv.page / kIndexPage); ++i) {
      h.index_block_table.push_back(int32_t(in.ConsumeIntegralInRange<int64_t>(0, c.index.pages - 1)));
    }
    for (int j = 0; j < q; ++j) {
      const int64_t token = length - q + j;
      const bool writes = token >= 0 && !in.ConsumeBool();
      const Place kv = kv_place(pages, c.kv.page, LocalId(int32_t(std::max<int64_t>(token, 0))));
      const Place index = index_place(pages, nullptr, c.kv.page, LocalId(int32_t(std::max<int64_t>(token, 0))));
      h.slots.push_back(writes ? int64_t(kv.page.value()) * c.kv.page + kv.offset : -1);
      h.index_slots.push_back(writes ? int64_t(index.page.value()) * kIndexPage + index.offset : -1);
    }
  }
}

void make_step(FuzzedDataProvider& in, const Case& c, HostileStep& h) {
  Step& step = h.step;
  step.batch = seldom(in) ? in.ConsumeIntegral<int>() : kRows;
  step.q = in.ConsumeIntegralInRange<int>(1, 3);
  const int64_t requests = kRows / step.q - in.ConsumeIntegralInRange<int64_t>(-1, kRows / step.q);
  const int64_t rows = requests * step.q;
  make_plain_step(in, c, h, step.q, requests);
  int64_t table_width = c.step.block_table.extent(1);
  if (seldom(in)) table_width = in.ConsumeIntegralInRange<int64_t>(0, table_width);
  h.block_table.resize(size_t(requests * table_width));
  for (int edits = in.ConsumeIntegralInRange<int>(0, 6); edits > 0; --edits) {
    switch (in.ConsumeIntegralInRange<int>(0, 5)) {
      case 0: spoil(in, h.slots, c.kv.pages * c.kv.page, true); break;
      case 1: spoil(in, h.index_slots, c.index.pages * kIndexPage, true); break;
      case 2: spoil(in, h.seq_lens, kMaxLength + 1, false); break;
      case 3: spoil(in, h.block_table, c.kv.pages, false); break;
      case 4: spoil(in, h.index_block_table, c.index.pages, false); break;
      default: step.q = seldom(in) ? in.ConsumeIntegral<int>() : step.q; break;
    }
  }
  const int64_t width = c.sizes.width();
  for (int64_t b = 0; b < rows; ++b) {
    const BFloat16* row = c.step.projected.row(b % kRows);
    h.projected.insert(h.projected.end(), row, row + width);
  }
  // No spare capacity: a read behind the end must lie outside the allocation.
  h.projected.shrink_to_fit();
  h.slots.shrink_to_fit();
  h.index_slots.shrink_to_fit();
  h.block_table.shrink_to_fit();
  h.index_block_table.shrink_to_fit();
  h.seq_lens.shrink_to_fit();
  step.projected = View<const BFloat16, 2>(h.projected.data(), rows, width);
  step.slots = View<const int64_t, 1>(h.slots.data(), h.slots.size());
  step.index_slots = View<const int64_t, 1>(h.index_slots.data(), h.index_slots.size());
  step.seq_lens = View<const int32_t, 1>(h.seq_lens.data(), requests);
  step.block_table = View<const int32_t, 2>(h.block_table.data(), requests, table_width);
  if (h.index_block_table.empty()) return;
  const int64_t index_width = int64_t(h.index_block_table.size()) / requests;
  step.index_block_table = View<const int32_t, 2>(h.index_block_table.data(), requests, index_width);
}

// ---- what the specification says of a step, written anew from its section 10 ----

bool slots_allowed(const std::vector<int64_t>& slots, int64_t rows) {
  std::set<int64_t> used;
  return std::all_of(slots.begin(), slots.end(),
                     [&](int64_t slot) { return slot < 0 || (slot < rows && used.insert(slot).second); });
}

bool allowed(const HostileStep& h, const Case& c) {
  const Step& step = h.step;
  if (step.batch != kRows || step.q < 1 || step.q > 3) return false;
  const int64_t requests = step.seq_lens.extent(0);
  const int64_t rows = requests * step.q;
  if (rows > kRows || step.slots.extent(0) != rows || step.index_slots.extent(0) != rows) return false;
  if (step.block_table.extent(0) != requests) return false;
  if (!slots_allowed(h.slots, c.kv.pages * c.kv.page)) return false;
  if (!slots_allowed(h.index_slots, c.index.pages * kIndexPage)) return false;
  const bool own_index = !step.index_block_table.empty();
  for (int64_t r = 0; r < requests; ++r) {
    const int64_t n = step.seq_lens(r);
    if (n < 0 || n > kMaxLength) return false;
    if (pages_of(n, c.kv.page) > step.block_table.extent(1)) return false;
    if (own_index && pages_of(n, kIndexPage) > step.index_block_table.extent(1)) return false;
    for (int64_t t = 0; t < n; ++t) {
      const LocalId id{int32_t(t)};
      const int32_t page = kv_place(step.block_table.row(r), c.kv.page, id).page.value();
      if (page < 0 || page >= c.kv.pages) return false;
      const int32_t* index_table = own_index ? step.index_block_table.row(r) : nullptr;
      const int32_t index_page = index_place(step.block_table.row(r), index_table, c.kv.page, id).page.value();
      if (index_page < 0 || index_page >= c.index.pages) return false;
    }
  }
  return true;
}

// ---- what a run may have written ----

void require_untouched(const Runner& ran, const Case& c) {
  require(std::equal(ran.kv_bytes.begin(), ran.kv_bytes.end(), c.kv.data), "a refused step leaves the MLA cache alone");
  require(std::equal(ran.index_bytes.begin(), ran.index_bytes.end(), c.index.data), "... and the index cache");
  const auto* out = reinterpret_cast<const std::byte*>(ran.out.data());
  require(std::all_of(out, out + ran.out.size() * sizeof(BFloat16), [](std::byte b) { return b == kPoison; }),
          "... and out");
}

/// Only rows at slots may differ from what the cache held before.
void require_inserted(const Runner& ran, const Case& c, const HostileStep& h) {
  std::set<int64_t> written;
  for (const int64_t slot : h.slots) {
    if (slot >= 0) written.insert(physical_row(place_of(Slot(slot), c.kv.page), c.kv.stride_rows).value());
  }
  const int64_t bytes = c.kv.row_bytes;
  for (int64_t row = 0; row * bytes < int64_t(ran.kv_bytes.size()); ++row) {
    if (written.contains(row)) continue;
    require(std::memcmp(ran.kv_bytes.data() + row * bytes, c.kv.data + row * bytes, size_t(bytes)) == 0,
            "only slots are written");
  }
  const std::set<int64_t> index_slots(h.index_slots.begin(), h.index_slots.end());
  with_layout(c.index.format, [&](auto layout) {
    for (int64_t slot = 0; slot < c.index.pages * kIndexPage; ++slot) {
      if (index_slots.contains(slot)) continue;
      const int64_t page = slot / kIndexPage * layout.kPageBytes;
      const int token = int(slot % kIndexPage);
      const auto same = [&](int at, int size) {
        return std::memcmp(ran.index_bytes.data() + page + at, c.index.data + page + at, size_t(size)) == 0;
      };
      require(same(layout.value_at(token), layout.kValueBytes) && same(layout.scale_at(token), layout.kScaleBytes),
              "only index slots are written");
    }
  });
}

/// The selection of row `b`, as far as it does not depend on scores.
void require_selection(const StageViews& v, const Step& step, int64_t b, int topk) {
  const int64_t n = keys_seen(step.seq_lens(b / step.q), step.q, int(b % step.q));
  require(v.valid(b) == std::min<int64_t>(n, topk), "valid is min(topk, n)");
  for (int i = 0; i < topk; ++i) {
    const int32_t token = v.topk_tokens(b, i);
    if (i >= v.valid(b)) {
      require(token == -1 && v.topk_rows(b, i) == -1, "-1 follows the selection");
      continue;
    }
    require(token < n && (i == 0 || token > v.topk_tokens(b, i - 1)), "token ids ascend below n");
  }
}

bool same_tokens(const StageViews& a, const StageViews& b, int64_t row, int topk) {
  return std::equal(a.topk_tokens.row(row), a.topk_tokens.row(row) + topk, b.topk_tokens.row(row));
}

/// Outputs of one row: NaN in the same places, the rest within the bound of a single row (spec 9).
void require_close(const BFloat16* a, const BFloat16* b, int64_t n) {
  double difference = 0;
  double size = 0;
  for (int64_t i = 0; i < n; ++i) {
    const double x = to_float(a[i]);
    const double y = to_float(b[i]);
    require(std::isnan(x) == std::isnan(y), "NaN in the same places");
    if (std::isnan(x)) continue;
    difference += (x - y) * (x - y);
    size += y * y;
  }
  require(difference <= 4 * 8e-3 * 4 * 8e-3 * size, "outputs agree");
}

void require_agreement(Fixture& f, const HostileStep& h) {
  const Step& step = h.step;
  const int topk = f.c.config.topk;
  const int64_t width = int64_t(f.c.sizes.heads) * kValue;
  const StageViews a = f.cpu.layer.stages();
  const StageViews b = f.reference.layer.stages();
  for (int64_t row = 0; row < kRows; ++row) {
    const BFloat16* out = f.cpu.out.data() + row * width;
    const BFloat16* expected = f.reference.out.data() + row * width;
    const bool live = row / step.q < step.seq_lens.extent(0);
    if (!live || step.seq_lens(row / step.q) == 0) {
      const auto is_zero = [](BFloat16 x) { return x.bits == 0; };
      require(std::all_of(out, out + width, is_zero), "empty requests give zero on the cpu");
      require(std::all_of(expected, expected + width, is_zero), "... and in the reference");
      if (!live) continue;
    }
    require_selection(a, step, row, topk);
    require_selection(b, step, row, topk);
    // Scores that differ in their last bits may exchange tokens at the threshold: such a row has other keys to attend
    // to.
    const bool exchanged = !same_tokens(a, b, row, topk);
    require(!exchanged || a.valid(row) == topk, "with n <= topk every token is selected");
    if (!exchanged) require_close(out, expected, width);
  }
}

void run(FuzzedDataProvider& in) {
  Fixture& f = fixture(in.ConsumeBool());
  HostileStep h;
  make_step(in, f.c, h);
  const bool fine = allowed(h, f.c);
  for (Runner* runner : {&f.reference, &f.cpu}) {
    const Status status = runner->run(f.c, h.step);
    require(status.ok() == fine, fine ? "an allowed step runs" : "what the specification refuses is refused");
    if (fine) {
      require_inserted(*runner, f.c, h);
    } else {
      require(status.error().code == ErrorCode::kRefused && !status.error().argument.empty(), "the refusal has a name");
      require_untouched(*runner, f.c);
    }
  }
  if (fine) require_agreement(f, h);
}

}  // namespace
}  // namespace dsacore::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzedDataProvider in(data, size);
  dsacore::fuzz::run(in);
  return 0;
}
