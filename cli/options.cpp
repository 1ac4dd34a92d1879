#include "cli/options.h"

#include <cmath>

#include "dsacore/problem.h"
#include "dsacore/status.h"
#include "dsacore/version.h"

namespace dsacore::cli {

CLI::Option* add_kv_format(CLI::App& app, KvFormat& format) {
  return add_named<KvFormat>(app, "--kv-format", format, kv_format_of, {"fp8_ds_mla", "fp8", "nvfp4_ds_mla"},
                             "Format of the MLA cache");
}

CLI::Option* add_index_format(CLI::App& app, IndexFormat& format) {
  return add_named<IndexFormat>(app, "--index-format", format, index_format_of, {"fp8", "mxfp4"},
                                "Format of the index cache");
}

CLI::Option* add_backend(CLI::App& app, BackendKind& backend) {
  return add_named<BackendKind>(app, "--backend", backend, backend_of, {"reference", "cpu", "cuda"}, "What computes");
}

void add_machine(CLI::App& app, RunOptions& options) {
  app.add_option("--cpu-target", options.cpu_target,
                 "Instruction set of the cpu backend, one of: " + compiled_cpu_target_names() +
                     " (default: DSACORE_CPU_TARGET, else the best that this machine runs)");
  app.add_option("--threads", options.threads, "Threads in all, 1..1024 (default: DSACORE_THREADS, else every core)")
      ->check(CLI::Range(1, 1024));
  app.add_option("--tables", options.tables_file,
                 "Kernel and overlap tables (default: DSACORE_TABLES, else the built-in ones)");
  app.add_option("--overlap", options.overlap,
                 "Overlap mode, or a table of modes by rows such as 1-4:front,5-64:fork (default: the tables'); modes: "
                 "serial wait "
                 "fork front late late_front; the CPU backends give the same bits in each");
}

void add_ranks(CLI::App& app, RunOptions& options, double& deadline_seconds) {
  app.add_option("--dcp", options.dcp,
                 "Ranks that share each context (decode context parallelism), 1..8; must divide the heads")
      ->check(CLI::Range(1, kMaxRanks))
      ->capture_default_str();
  app.add_option("--interleave", options.interleave, "Tokens in a row that one rank owns, at least 1")
      ->check(CLI::Range(1, int(kMaxContext)))
      ->capture_default_str();
  add_named<PartialFormat>(app, "--partial", options.partial, partial_format_of, {"auto", "bf16", "proj"},
                           "How partial results travel between ranks; auto: the tables' choice");
  app.add_option("--deadline", deadline_seconds, "Seconds that a rank may be silent before the run fails, 0.001..86400")
      ->check(CLI::Range(0.001, 86400.0))
      ->capture_default_str();
}

void add_case(CLI::App& app, std::string& layer, std::string& step) {
  app.add_option("--layer", layer, "Layer file (safetensors)")->required();
  app.add_option("--step", step, "Step file (safetensors); it is not changed")->required();
}

void require_built(BackendKind backend) {
  if (backend != BackendKind::kCuda) return;
  throw Exception({ErrorCode::kUnsupported, "backend", "cuda", "not built in; this build has: " + backends()});
}

std::chrono::milliseconds deadline_of(double seconds) {
  return std::chrono::milliseconds(std::llround(seconds * 1000));
}

}  // namespace dsacore::cli
