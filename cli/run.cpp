// dsacore run: one step from files to an output file (spec 8).
#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/options.h"
#include "cli/terminal.h"
#include "driver/case_files.h"
#include "dsacore/version.h"

namespace dsacore::cli {
namespace {

struct RunCommand {
  std::string layer, step, out;
  RunOptions run;
  std::string dump = "out";
  std::string transport = "threads";
  std::string rendezvous;
  int rank = -1;
  double deadline_seconds = 10;
  bool json = false;
};

void require_transport(const RunCommand& c) {
  if (c.transport != "threads") {
    throw Exception({ErrorCode::kUnsupported, "transport", c.transport, "not built in; this build has: threads"});
  }
  if (!c.rendezvous.empty()) {
    throw Exception({ErrorCode::kRefused, "rendezvous", c.rendezvous,
                     "only for ranks that are processes; the transport is threads"});
  }
  if (c.rank >= 0) {
    throw Exception({ErrorCode::kRefused, "rank", std::to_string(c.rank),
                     "only for ranks that are processes; the transport threads runs all ranks"});
  }
}

std::string shape_text(const Inputs& in) {
  return fmt::format("B={} q={} H={} index_heads={} q_lora={} topk={}, {} requests up to {} tokens, kv {} index {}",
                     in.step.batch, in.step.q, in.sizes.heads, in.sizes.index_heads, in.sizes.q_lora, in.config.topk,
                     in.step.seq_lens.extent(0), longest_context(in.step), name_of(in.config.kv_format),
                     name_of(in.config.index_format));
}

void print_summary(const RunCommand& c, const Inputs& in, const RunReport& report, int64_t file_bytes) {
  fmt::print("{}\n", shape_text(in));
  fmt::print("{} on {}, {} thread{}{}\n", name_of(c.run.backend), report.target, report.threads,
             report.threads == 1 ? "" : "s", c.run.dcp > 1 ? fmt::format(" in each of {} ranks", c.run.dcp) : "");
  std::string stages;
  for (const StageTime& stage : report.stages) {
    stages += fmt::format("{}{} {}", stages.empty() ? "" : ", ", stage.stage, seconds_text(stage.seconds));
  }
  fmt::print("{}{}{}\n", styled(Style::kBold, seconds_text(report.run_seconds)), stages.empty() ? "" : ": ", stages);
  fmt::print("prepared in {}; {} of files, {} reserved\n", seconds_text(report.prepare_seconds),
             bytes_text(double(file_bytes)), bytes_text(double(report.reserved_bytes)));
  fmt::print("wrote {}\n", c.out);
}

nlohmann::json summary_json(const RunCommand& c, const Inputs& in, const RunReport& report, int64_t file_bytes) {
  nlohmann::json stages = nlohmann::json::array(), reserved = nlohmann::json::array();
  for (const StageTime& stage : report.stages) stages.push_back({{"stage", stage.stage}, {"seconds", stage.seconds}});
  for (const ReservedItem& item : report.reserved) reserved.push_back({{"name", item.name}, {"bytes", item.bytes}});
  return {{"version", version()},
          {"commit", commit()},
          {"out", c.out},
          {"backend", name_of(c.run.backend)},
          {"target", report.target},
          {"threads", report.threads},
          {"dcp", c.run.dcp},
          {"shape",
           {{"B", in.step.batch},
            {"q", in.step.q},
            {"H", in.sizes.heads},
            {"index_heads", in.sizes.index_heads},
            {"q_lora", in.sizes.q_lora},
            {"topk", in.config.topk},
            {"requests", in.step.seq_lens.extent(0)},
            {"longest", longest_context(in.step)},
            {"kv_format", name_of(in.config.kv_format)},
            {"index_format", name_of(in.config.index_format)}}},
          {"choices", report.choices},
          {"prepare_seconds", report.prepare_seconds},
          {"run_seconds", report.run_seconds},
          {"stages", stages},
          {"file_bytes", file_bytes},
          {"reserved_bytes", report.reserved_bytes},
          {"reserved", reserved}};
}

int run(RunCommand& c) {
  require_built(c.run.backend);
  require_transport(c);
  c.run.dump = c.dump == "all";
  c.run.deadline = deadline_of(c.deadline_seconds);
  CaseFiles files = open_case(c.layer, c.step);
  const Inputs inputs = inputs_of(files);
  RunResult result;
  {
    const Progress progress(fmt::format("running {} rows", inputs.step.batch), 0);
    result = run_case(inputs, c.run);
    write_outputs(c.out, inputs, result.outputs, files.step.flat);
  }
  if (c.json) {
    fmt::print("{}\n", summary_json(c, inputs, result.report, files.bytes()).dump(2));
  } else {
    print_summary(c, inputs, result.report, files.bytes());
  }
  return 0;
}

}  // namespace

void add_run(CLI::App& program, Chosen& chosen) {
  const auto c = std::make_shared<RunCommand>();
  CLI::App& app = *program.add_subcommand("run", "Run one step of a layer, from files to a file");
  add_case(app, c->layer, c->step);
  add_text(app, "--out", c->out, "FILE", "Output file (safetensors), written whole or not at all")->required();
  add_backend(app, c->run.backend);
  add_machine(app, c->run);
  add_plan(app, c->run);
  add_device(app, c->run);
  add_word(app, "--dump", c->dump, {"out", "all"}, "all: write the tensors between the stages and the caches too");
  app.add_flag("--check-inputs", c->run.check_inputs,
               "Check slots, pages and lengths on the CUDA device too; on the host they are always checked");
  add_ranks(app, c->run, c->deadline_seconds);
  add_word(app, "--transport", c->transport, {"threads", "shm", "mpi", "cuda", "nccl"}, "How ranks reach each other");
  add_text(app, "--rendezvous", c->rendezvous, "FOLDER", "Where ranks that are processes meet");
  app.add_option("--rank", c->rank, "This process's rank, where ranks are processes (0..7)")
      ->check(CLI::Range(0, kMaxRanks - 1).description(""))
      ->type_name("N");
  app.add_flag("--json", c->json, "Print a summary in JSON");
  app.callback([c, &chosen] { chosen.act = [c] { return run(*c); }; });
}

}  // namespace dsacore::cli
