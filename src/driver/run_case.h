// run_case: from inputs to outputs in one call: context, prepare, bind, run, and for DCP one thread a rank with a shard
// each. What the command line's `run` and `check`, the tests and the fuzzers stand on.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "driver/inputs.h"
#include "dsacore/layer.h"
#include "memory/memory.h"

namespace dsacore {

struct RunOptions {
  BackendKind backend = BackendKind::kCpu;
  int device = 0;
  std::string cpu_target;  ///< empty: the best
  int threads = 0;         ///< of all ranks together; 0: DSACORE_THREADS, else every core
  std::string tables_file;
  std::string overlap;  ///< of `PrepareOptions`, as are `kernels` and `plan_rows`
  std::string kernels;
  std::vector<int> plan_rows;
  int dcp = 1;         ///< D
  int interleave = 1;  ///< I
  PartialFormat partial = PartialFormat::kAuto;
  std::chrono::milliseconds deadline{10000};
  bool dump = false;          ///< also the tensors between the stages
  bool check_inputs = false;  ///< cuda: let the device check the step too
};

/// The tensors between the stages, copied out of the context's scratch. Dense, shapes as in spec 8.
struct StageDump {
  std::vector<BFloat16> q_c;
  std::vector<std::byte> query;  ///< of all heads
  std::vector<uint8_t> index_query;
  std::vector<float> head_weights;
  std::vector<int32_t> topk_tokens;
  std::vector<int32_t> topk_rows;  ///< one rank only, else empty
  std::vector<int32_t> valid;
  std::vector<BFloat16> latent;  ///< empty for `proj` partials
  std::vector<float> lse;
};

/// What a run gave. It owns all but the caches, which are those of the inputs, updated (absent, `data` null, for D >
/// 1).
struct Outputs {
  std::vector<BFloat16> out;  ///< [B, H*128]
  std::optional<StageDump> stages;
  KvCache kv;
  IndexCache index;
};

/// How it was run.
struct RunReport {
  std::string target;                  ///< instruction set
  int threads = 0;                     ///< of one rank
  std::vector<std::string> choices;    ///< kernels, of rank 0
  std::vector<ReservedItem> reserved;  ///< of rank 0
  int64_t reserved_bytes = 0;          ///< of all ranks
  double prepare_seconds = 0;
  double run_seconds = 0;         ///< of the slowest rank; cuda: of a first run, with what it loads
  std::vector<StageTime> stages;  ///< of rank 0; cuda: none
};

struct RunResult {
  Outputs outputs;
  RunReport report;
};

/// The tensors of a run that has ended, from the memory of its context.
StageDump dump_of(const StageViews& views, bool one_rank, const Memory& memory);

/// The context that options ask for.
ContextOptions context_options_of(const RunOptions& options);
/// How to prepare for the shape of inputs in host memory; one rank.
PrepareOptions prepare_options_of(const Inputs& host, const RunOptions& options);

/// Throws `Exception`: what prepare refuses and what the step's Status says. Of several ranks' errors the one that is
/// no consequence of another's.
RunResult run_case(const Inputs& inputs, const RunOptions& options);

}  // namespace dsacore
