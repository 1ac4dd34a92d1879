// dsacore generate: a synthetic layer and step from a seed (the options of the oracle's make_case.py).
#include "io/generate.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <filesystem>
#include <memory>

#include "cli/commands.h"
#include "cli/options.h"
#include "cli/terminal.h"
#include "dsacore/status.h"
#include "io/layer_file.h"
#include "io/step_file.h"

namespace dsacore::cli {
namespace {

struct GenerateCommand {
  std::string out;
  CaseOptions options;
  std::string k_norm = "f32";
  std::string slots = "owned";
  std::string adversarial;
};

void make_folder(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) throw Exception({ErrorCode::kIo, "out", path, error.message()});
}

int generate(GenerateCommand& c) {
  c.options.k_norm_bf16 = c.k_norm == "bf16";
  c.options.slots = c.slots == "owned"      ? SlotsKind::kOwned
                    : c.slots == "negative" ? SlotsKind::kNegative
                                            : SlotsKind::kMixed;
  if (!c.adversarial.empty()) c.options.adversarial = CLI::detail::split(c.adversarial, ',');
  const std::string layer = c.out + "/layer.safetensors", step = c.out + "/step.safetensors";
  {
    const Progress progress("generating", 0);
    const Case made = make_case(c.options);
    make_folder(c.out);
    write_layer_file(layer, made.config, made.weights);
    write_step_file(step, made.step, made.kv, made.index);
  }
  const auto size = [](const std::string& path) { return bytes_text(double(std::filesystem::file_size(path))); };
  fmt::print("wrote {} ({}) and {} ({})\n", layer, size(layer), step, size(step));
  return 0;
}

}  // namespace

void add_generate(CLI::App& program, Chosen& chosen) {
  const auto c = std::make_shared<GenerateCommand>();
  CLI::App& app = *program.add_subcommand("generate", "Make a synthetic layer and step from a seed");
  CaseOptions& o = c->options;
  add_text(app, "--out", c->out, "FOLDER", "Where layer.safetensors and step.safetensors go; made where it is missing")
      ->required();
  add_shape(app, o);
  add_sizes(app, o);
  add_text(app, "--context", o.context, "LENGTHS",
           "seq_len of the requests: N, a list A,B,C (cycled), or LO-HI (log-uniform, both ends used)")
      ->capture_default_str();
  app.add_option("--stride-rows", o.stride_rows,
                 "Rows between the starts of two pages (default: --page); above --page the cache is flat in the file")
      ->type_name("N");
  app.add_flag("--index-table", o.index_table, "Give the index cache a block table of its own");
  add_number(app, "--pitch-pad", o.pitch_pad, 0, 65536, "Columns after each projected row, all NaN");
  add_number(app, "--pad-requests", o.pad_requests, 0, kMaxRows,
             "How many of the requests, the last ones, are padding");
  add_word(app, "--slots", c->slots, {"owned", "negative", "mixed"}, "Which rows write their keys: all, none, some");
  add_number(app, "--spare-pages", o.spare_pages, 0, 1 << 20, "Pages that no request owns");
  add_word(app, "--k-norm", c->k_norm, {"f32", "bf16"}, "Type of the index key norm");
  app.add_flag("--no-k-bias", o.no_k_bias, "Leave out the bias of the index key norm");
  CLI::Option* adversarial = app.add_option("--adversarial", c->adversarial,
                                            "Awkward values: all, or a list of "
                                            "ties,equal,magnitude,subnormal,zero,negzero,nan,inf; without a list all "
                                            "(nan and inf need 2 and 3 requests)")
                                 ->expected(0, 1)
                                 ->type_name("[LIST]");
  app.callback([c, adversarial, &chosen] {
    if (adversarial->count() > 0 && c->adversarial.empty()) c->adversarial = "all";
    chosen.act = [c] { return generate(*c); };
  });
}

}  // namespace dsacore::cli
