// The input check's kernel (check_inputs.h says what it is for).
// Work is cut into units: one for each kind of slots, and 2048 table entries of a request each. A unit's offenders are
// ordered numbers, of which the largest is the first offender; the last block to finish reads it, fills the record and
// the checked copies. Bounds: 4 bytes a table entry: 1 MB at 64 requests of 256K tokens; below that a kernel's start
// and one atomic a block.
#include <algorithm>

#include "backends/cuda/check_inputs.h"
#include "backends/cuda/launch.h"
#include "backends/cuda/ptx/dependency.cuh"

namespace dsacore::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kUnitEntries = 2048;
constexpr int kMaxBlocks = 8 * kMultiprocessors;  // resident at once
constexpr int kSlotUnits = 2;
static_assert(kThreads >= kMaxRows, "one thread a slot");

/// An offender as a number: the larger, the sooner it is reported; 0 is none.
using Offender = unsigned long long;

__device__ __forceinline__ Offender offender(InputCheck check, int at, int64_t position = 0) {
  const bool of_slots = check < InputCheck::kSeqLen;
  const Offender phase = of_slots ? Offender(check) : Offender(InputCheck::kSeqLen);
  const Offender step = of_slots ? 0 : Offender(check);
  return ~(phase << 56 | Offender(uint32_t(at)) << 40 | step << 32 | uint32_t(position));
}
struct OffenderPlace {
  InputCheck check;
  int at;
  int position;
};
__device__ __forceinline__ OffenderPlace place_of(Offender number) {
  const Offender bits = ~number;
  const auto phase = InputCheck(uint32_t(bits >> 56));
  const auto step = InputCheck(uint32_t(bits >> 32) & 0xFF);
  return {phase < InputCheck::kSeqLen ? phase : step, int(bits >> 40 & 0xFFFF), int(uint32_t(bits))};
}

/// Slots below `rows`, and no non-negative one twice: of those the smallest, and its last row.
__device__ Offender check_slots(View<const int64_t, 1> slots, int64_t rows, InputCheck outside, InputCheck twice) {
  __shared__ int64_t slot_of[kThreads];
  __shared__ unsigned long long smallest;
  __shared__ int last_row;
  const int row = int(threadIdx.x);
  const int count = int(slots.extent(0));
  const int64_t slot = row < count ? slots(row) : -1;
  __syncthreads();  // these arrays are used twice
  slot_of[row] = slot;
  if (row == 0) {
    smallest = ~0ull;
    last_row = -1;
  }
  __syncthreads();
  bool repeated = false;
  for (int other = 0; other < count; ++other) repeated |= other != row && slot_of[other] == slot;
  repeated &= slot >= 0;
  if (repeated) atomicMin(&smallest, (unsigned long long)(slot));
  __syncthreads();
  if (repeated && smallest == (unsigned long long)(slot)) atomicMax(&last_row, row);
  __syncthreads();
  if (slot >= rows) return offender(outside, row);
  return row == 0 && last_row >= 0 ? offender(twice, last_row) : 0;
}

/// A thread's entries of a unit: all are on their way before the first is looked at.
struct Entries {
  static constexpr int kCount = kUnitEntries / kThreads;
  int32_t page[kCount];
  int first;  // index of page[0]; the next are kThreads apart
  int end;

  __device__ __forceinline__ Entries(const int32_t* row, int first_of_unit, int end_of_row)
      : first(first_of_unit + int(threadIdx.x)), end(end_of_row) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) page[i] = first + i * kThreads < end ? row[first + i * kThreads] : 0;
  }
  /// The first of those below `count` that is not in 0..pages-1.
  __device__ __forceinline__ Offender check(int count, int64_t pages, InputCheck check, int request) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int at = first + i * kThreads;
      if (at < min(count, end) && (page[i] < 0 || page[i] >= pages)) return offender(check, request, at);
    }
    return 0;
  }
};

/// A request's length, and `kUnitEntries` of its table entries from `first` on.
__device__ Offender check_request(const InputCheckArgs& p, int request, int first) {
  const int32_t length = p.seq_lens(request);
  if (length < 0 || length > p.max_context) return offender(InputCheck::kSeqLen, request);
  const int32_t local = p.shard.ranks == 1 ? length : int32_t(local_count(p.shard, length));
  if (local > p.local_context) return offender(InputCheck::kSeqLenBeyondPages, request);
  const int full = local / p.kv.page;  // whole pages
  const int rest = local - full * p.kv.page;
  const int count = full + (rest != 0);
  if (count > p.block_table.extent(1)) return offender(InputCheck::kBlockTableWidth, request);
  const int32_t* row = p.block_table.row(request);
  const Entries entries(row, first, count);
  Offender found = entries.check(count, p.kv.pages, InputCheck::kBlockTable, request);
  if (!p.index_block_table.empty()) {
    const int index_count = int(pages_of(local, kIndexPage));
    if (index_count > p.index_block_table.extent(1)) {
      return max(found, offender(InputCheck::kIndexBlockTableWidth, request));
    }
    const Entries index_entries(p.index_block_table.row(request), first, index_count);
    return max(found, index_entries.check(index_count, p.index.pages, InputCheck::kIndexBlockTable, request));
  }
  const int parts = p.kv.page / kIndexPage;  // index pages of an MLA page
  found = max(found, entries.check(full, p.index.pages / parts, InputCheck::kDerivedIndexPage, request));
  if (rest != 0) {  // the last page needs the index pages of its tokens only
    const int64_t last = int64_t(row[full]) * parts + pages_of(rest, kIndexPage) - 1;
    if (last >= p.index.pages) found = max(found, offender(InputCheck::kDerivedLastIndexPage, request, full));
  }
  return found;
}

/// The largest of all threads' numbers, in thread 0.
__device__ Offender first_of_block(Offender found) {
  __shared__ Offender of_warp[kWarps];
  for (int distance = 16; distance > 0; distance /= 2) {
    found = max(found, __shfl_xor_sync(0xFFFFFFFF, found, distance));
  }
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = found;
  __syncthreads();
  for (int w = 0; w < kWarps; ++w) found = max(found, of_warp[w]);
  return found;
}

/// Counts a block: what it wrote before is visible to the one that counts after it.
__device__ __forceinline__ uint32_t arrive(uint32_t* counter) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

/// What was found at an offender's place.
__device__ int64_t value_at(const InputCheckArgs& p, OffenderPlace place) {
  switch (place.check) {
    case InputCheck::kSlot:
    case InputCheck::kSlotTwice: return p.slots(place.at);
    case InputCheck::kIndexSlot:
    case InputCheck::kIndexSlotTwice: return p.index_slots(place.at);
    case InputCheck::kBlockTableWidth: return p.block_table.extent(1);
    case InputCheck::kIndexBlockTableWidth: return p.index_block_table.extent(1);
    case InputCheck::kIndexBlockTable: return p.index_block_table(place.at, place.position);
    case InputCheck::kBlockTable:
    case InputCheck::kDerivedIndexPage:
    case InputCheck::kDerivedLastIndexPage: return p.block_table(place.at, place.position);
    default: return p.seq_lens(place.at);
  }
}

/// By the last block: the copies for the stages, and the record.
__device__ void conclude(const InputCheckArgs& p, Offender found) {
  const int i = int(threadIdx.x);
  const bool right = found == 0;
  if (i < p.slots.extent(0)) p.checked.slots(i) = right ? p.slots(i) : -1;
  if (i < p.index_slots.extent(0)) p.checked.index_slots(i) = right ? p.index_slots(i) : -1;
  if (i < p.seq_lens.extent(0)) p.checked.seq_lens(i) = right ? p.seq_lens(i) : 0;
  if (i != 0) return;
  InputRecord& record = *p.record;
  if (!right && record.check == InputCheck::kNone) {
    const OffenderPlace place = place_of(found);
    record.at = place.at;
    record.position = place.position;
    record.seq_len = place.check < InputCheck::kSeqLen ? 0 : p.seq_lens(place.at);
    record.value = value_at(p, place);
    record.check = place.check;
  }
  record.first = 0;
  record.arrived = 0;
}

__global__ void __launch_bounds__(kThreads)
    check_inputs(const __grid_constant__ InputCheckArgs p, int units, int parts) {
  __shared__ bool last;
  __shared__ Offender of_all;
  wait_for_earlier_kernels();
  let_next_kernel_start();
  Offender found = 0;
  for (int unit = int(blockIdx.x); unit < units; unit += int(gridDim.x)) {
    if (unit == 0) {
      found = max(found, check_slots(p.slots, p.kv.pages * p.kv.page, InputCheck::kSlot, InputCheck::kSlotTwice));
    } else if (unit == 1) {
      found = max(found, check_slots(p.index_slots, p.index.pages * kIndexPage, InputCheck::kIndexSlot,
                                     InputCheck::kIndexSlotTwice));
    } else {
      found = max(found, check_request(p, (unit - kSlotUnits) / parts, (unit - kSlotUnits) % parts * kUnitEntries));
    }
  }
  found = first_of_block(found);
  if (threadIdx.x == 0) {
    auto* first = reinterpret_cast<unsigned long long*>(&p.record->first);
    if (found != 0) atomicMax(first, found);
    last = arrive(&p.record->arrived) == gridDim.x - 1;
    if (last) of_all = *static_cast<volatile Offender*>(first);
  }
  __syncthreads();
  if (last) conclude(p, of_all);
}

}  // namespace

void enqueue_input_check(const InputCheckArgs& args, const Workspace& workspace) {
  const int64_t requests = args.seq_lens.extent(0);
  int64_t entries = std::min(args.block_table.extent(1), pages_of(args.local_context, args.kv.page));
  if (!args.index_block_table.empty()) {
    const int64_t index_entries = std::min(args.index_block_table.extent(1), pages_of(args.local_context, kIndexPage));
    entries = std::max(entries, index_entries);
  }
  const int64_t parts = std::max<int64_t>(1, (entries + kUnitEntries - 1) / kUnitEntries);
  const int64_t units = kSlotUnits + requests * parts;
  launch(check_inputs, {.grid = dim3(unsigned(std::min<int64_t>(units, kMaxBlocks))), .block = dim3(kThreads)},
         workspace, args, int(units), int(parts));
}

}  // namespace dsacore::cuda
