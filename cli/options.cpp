#include "cli/options.h"

#include <cmath>

#include "dsacore/problem.h"
#include "dsacore/status.h"
#include "dsacore/version.h"

namespace dsacore::cli {

CLI::Option* add_text(CLI::App& app, const std::string& flags, std::string& value, const char* type,
                      const std::string& help) {
  return app.add_option(flags, value, help)->type_name(type);
}

CLI::Option* add_word(CLI::App& app, const std::string& flags, std::string& value,
                      const std::vector<std::string>& words, const std::string& help) {
  return app.add_option(flags, value, help)
      ->check(CLI::IsMember(words).description(""))
      ->type_name(fmt::format("{}", fmt::join(words, "|")))
      ->capture_default_str();
}

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
  add_text(app, "--cpu-target", options.cpu_target, "NAME",
           "Instruction set of the cpu backend, one of " + compiled_cpu_target_names() +
               " (default: DSACORE_CPU_TARGET, else the best that this machine runs)");
  app.add_option("--threads", options.threads, "Threads in all (1..1024; default: DSACORE_THREADS, else every core)")
      ->check(CLI::Range(1, 1024).description(""))
      ->type_name("N");
  add_text(app, "--tables", options.tables_file, "FILE",
           "Kernel and overlap tables (default: DSACORE_TABLES, else the built-in ones)");
}

void add_plan(CLI::App& app, RunOptions& options) {
  add_text(app, "--overlap", options.overlap, "TABLE", kOverlapHelp);
  add_kernels(app, options.kernels);
  app.add_option("--plan-rows", options.plan_rows,
                 "Row capacities (1..256) of plans and scratch that the batches below them share, such as 16,64; the "
                 "output has the same bits with and without")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->type_name("N");
}

void add_kernels(CLI::App& app, std::string& kernels) {
  add_text(app, "--kernels", kernels, "TABLES",
           "Kernels of stages by rows, such as value=wide or query=1-8:fused;value=wide, or several to choose from, "
           "a|b (default: the tables')");
}

void add_device(CLI::App& app, RunOptions& options) {
  add_number(app, "--device", options.device, 0, 63, "CUDA device; the CPU backends do not read it");
}

void add_ranks(CLI::App& app, RunOptions& options, double& deadline_seconds) {
  add_number(app, "--dcp", options.dcp, 1, kMaxRanks,
             "Ranks that share each context (decode context parallelism); must divide the heads");
  add_number(app, "--interleave", options.interleave, 1, int(kMaxContext), "Tokens in a row that one rank owns");
  add_named<PartialFormat>(app, "--partial", options.partial, partial_format_of, {"auto", "bf16", "proj"},
                           "How partial results travel between ranks; auto: as the tables say");
  add_number(app, "--deadline", deadline_seconds, 0.001, 86400.0,
             "Seconds that a rank may be silent before the run fails");
}

void add_case(CLI::App& app, std::string& layer, std::string& step) {
  add_text(app, "--layer", layer, "FILE", "Layer file (safetensors)")->required();
  add_text(app, "--step", step, "FILE", "Step file (safetensors); it is not changed")->required();
}

void add_shape(CLI::App& app, CaseOptions& o) {
  add_number(app, "--heads", o.heads, 1, kMaxHeads, "Attention heads H");
  add_number(app, "--batch", o.batch, 1, kMaxRows, "Rows B, padded requests included");
  add_number(app, "--q", o.q, 1, kMaxQ, "Rows per request; must divide the rows");
  add_kv_format(app, o.kv_format);
  add_index_format(app, o.index_format);
}

void add_sizes(CLI::App& app, CaseOptions& o) {
  app.add_option("--seed", o.seed, "Same seed and options, same bytes")->type_name("N")->capture_default_str();
  add_number(app, "--topk", o.topk, 1, kMaxTopk, "Keys that a row attends to");
  add_number(app, "--index-heads", o.index_heads, kMinIndexHeads, kMaxIndexHeads, "Index heads");
  add_number(app, "--q-lora", o.q_lora, kQLoraStep, kMaxQLora, "Width of q_c: a multiple of 128");
  app.add_option("--page", o.page, "Rows of an MLA cache page: 64 or a multiple")
      ->type_name("N")
      ->capture_default_str();
}

void require_built(BackendKind backend) {
  if (backend != BackendKind::kCuda || (" " + backends() + " ").find(" cuda ") != std::string::npos) return;
  throw Exception({ErrorCode::kUnsupported, "backend", "cuda", "not built in; this build has: " + backends()});
}

std::chrono::milliseconds deadline_of(double seconds) {
  return std::chrono::milliseconds(std::llround(seconds * 1000));
}

}  // namespace dsacore::cli
