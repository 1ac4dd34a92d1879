// Backends as data: each stage has a list of kernels, fastest first; src/plan/choose.h takes the first that the tables
// allow and that accepts the shape. A new kernel is one entry in a backend's list, and no new `if` anywhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "dsacore/queue.h"
#include "dsacore/status.h"
#include "plan/device.h"
#include "stages/input_check.h"
#include "stages/stages.h"
#include "threads/threads.h"

namespace dsacore {

/// Everything that a choice of kernel may depend on.
struct ShapeKey {
  LayerSizes sizes;
  KvFormat kv_format;
  IndexFormat index_format;
  int topk;
  int rows;  ///< B
  int q;
  int ranks;            ///< D
  int64_t max_context;  ///< longest n that a row may see on this rank
  bool parts = false;   ///< for the value stage: the sparse core can leave it parts to merge

  bool operator==(const ShapeKey&) const = default;
};

/// Whether a kernel takes a shape, and if not, why.
struct Verdict {
  bool ok = true;
  std::string reason;
};

/// Scratch and threads of one kernel run.
struct Workspace {
  /// At least what `scratch_bytes` asked for, 64-byte aligned; contents unspecified. cuda: 256-byte aligned; zero at
  /// first, then as the kernel's last run left it, of whichever shape or layer: what a kernel keeps lies at one place
  /// for all.
  std::span<std::byte> scratch;
  Threads* threads;
  const void* target;       ///< the backend's `target_data`
  Queue queue{};            ///< cuda: where the kernel is enqueued
  bool early_start = true;  ///< cuda: it may be launched before the kernels ahead of it have ended (plan/overlap.h)
  bool beside = false;      ///< cuda: it may run beside the stage ahead of it, and waits for it at its end
};

template <class Args>
struct Kernel {
  std::string_view name;
  Verdict (*accepts)(const ShapeKey& shape);
  /// Bytes of scratch for a shape with this many threads.
  int64_t (*scratch_bytes)(const ShapeKey& shape, int threads);
  /// cuda: enqueues on the workspace's queue and returns. Else: returns when all is written.
  void (*run)(const Args& args, const Workspace& workspace);
  /// Called once for a shape before it is run, on the context's device: what must be set on it. Null: nothing.
  void (*prepare)(const ShapeKey& shape) = nullptr;
  // What plan/overlap.h must know of kernels that are enqueued:
  /// Reads its inputs before its wait, so that the kernel before it must not let it start early.
  bool held = false;
  /// Index projection: norms `q_a` itself, does not read `q_c` and writes it where that is asked for.
  bool front = false;
  /// Indexer: two kernels, of which the first lets the second start after its own wait; so when the second starts,
  /// which at once lets the next stage start, all before the indexer has ended, and that stage may run beside it.
  bool fused = false;
  /// Sparse core: can leave what it has of each split of a row's keys in its scratch; value: merges that. Where both
  /// are chosen, on one rank, the value kernel writes the latent and its lse.
  bool parts = false;
};

/// A backend's stages. Lists are in order of preference.
struct Backend {
  std::string_view name;    ///< "reference", "cpu"
  std::string_view target;  ///< instruction set, e.g. "avx512_bf16"; "scalar" for the reference
  const void* target_data;  ///< what its kernels must know of the instruction set; handed to each in its Workspace
  int64_t (*packed_bytes)(const LayerSizes& sizes);
  void (*pack)(const LayerModel& model, std::byte* packed, Threads& threads);
  std::span<const Kernel<QueryArgs>> query;
  std::span<const Kernel<IndexProjectionArgs>> index_projection;
  std::span<const Kernel<IndexerArgs>> indexer;
  std::span<const Kernel<CandidateMergeArgs>> candidate_merge;
  std::span<const Kernel<SparseCoreArgs>> sparse_core;
  std::span<const Kernel<ValueArgs>> value;
  std::span<const Kernel<GateArgs>> gate;
  std::span<const Kernel<PartialMergeArgs>> partial_merge;
  std::span<const Kernel<NormArgs>> norm{};  ///< backends that enqueue: `q_c` alone, where the query comes later
  /// Writes what rows past the requests have between the stages (PadArgs); null: src/layer/run.cpp does, on the host.
  void (*pad)(const PadArgs& args, const Workspace& workspace) = nullptr;
  /// Backends whose steps the host cannot read: enqueues the check of one, and puts what it found into words.
  void (*check_inputs)(const InputCheckArgs& args, const Workspace& workspace) = nullptr;
  std::optional<Error> (*offence_of)(const InputRecord& record, const InputCheckArgs& args) = nullptr;
  int alignment = 1;  ///< bytes at whose multiples weights and caches begin; prepare and prepare_cache refuse others
};

/// The reference backend (src/backends/reference).
const Backend& reference_backend();

/// The cpu backend for an instruction set by name, or the best one for an empty name. Null: this machine cannot run it.
const Backend* cpu_backend(std::string_view target);
/// The cuda backend (src/backends/cuda) and the device that its kernels run on; defined where DSACORE_CUDA is. Throws
/// `kUnsupported` naming what was found and what is needed where there is no such device, or its driver is too old.
const Backend& cuda_backend();
std::unique_ptr<Device> make_cuda_device(int ordinal);
/// The toolkit that it was built with, e.g. "13.0".
const char* cuda_toolkit_version();

/// Names of the cpu targets that this machine runs, best first.
std::span<const std::string_view> cpu_targets();
/// Names of all targets compiled in, best first.
std::span<const std::string_view> compiled_cpu_targets();

}  // namespace dsacore
