// dsacore inspect: a file, a plan, or a selection over a text.
#include "cli/inspect.h"

#include <memory>

#include "cli/commands.h"
#include "cli/options.h"

namespace dsacore::cli {
namespace {

struct InspectCommand {
  std::string file, plan;
  RunOptions run;
  double deadline_seconds = 10;
  TextOptions text;
  bool json = false;
};

[[noreturn]] void refuse(const char* argument, const std::string& value, const char* allowed) {
  throw Exception({ErrorCode::kRefused, argument, value, allowed});
}

int inspect(InspectCommand& c) {
  if (c.plan.empty() == c.file.empty())
    refuse("inspect", c.file.empty() ? "nothing" : c.file, "give a FILE or --plan SHAPE");
  if (!c.plan.empty()) {
    if (!c.text.tokens.empty()) refuse("tokens", c.text.tokens, "only with an output file");
    require_built(c.run.backend);
    return inspect_plan(c.plan, c.run, c.json);
  }
  if (c.text.tokens.empty()) {
    if (!c.text.html.empty()) refuse("html", c.text.html, "only with --tokens");
    return inspect_file(c.file, c.json);
  }
  c.text.out = c.file;
  c.text.json = c.json;
  return inspect_text(c.text);
}

}  // namespace

void add_inspect(CLI::App& program, Chosen& chosen) {
  const auto c = std::make_shared<InspectCommand>();
  CLI::App& app = *program.add_subcommand(
      "inspect", "Show what is in a file, what would be chosen for a shape, or what was selected of a text");
  app.add_option("FILE", c->file, "Layer, step or output file")->type_name("");
  add_text(app, "--plan", c->plan, "SHAPE",
           "What would be chosen and reserved for a shape: keys kv, index, B, q, H (of one rank), len, dcp, I, topk, "
           "index_heads, "
           "q_lora, e.g. kv=fp8_ds_mla,index=fp8,B=16,q=1,H=12,len=65536");
  add_backend(app, c->run.backend)->description("Backend of the plan");
  add_machine(app, c->run);
  add_plan(app, c->run);
  add_named<PartialFormat>(app, "--partial", c->run.partial, partial_format_of, {"auto", "bf16", "proj"},
                           "Partial results of a plan with dcp above 1");
  add_text(
      app, "--tokens", c->text.tokens, "FILE",
      "tokens.json of the text that the token ids of an output file (with a dump) stand for: shows what was selected");
  add_text(app, "--html", c->text.html, "FILE", "Write a page about the selection");
  add_number(app, "--top", c->text.top, 1, 1000, "Passages printed of each row");
  app.add_flag("--json", c->json, "Print in JSON");
  app.callback([c, &chosen] { chosen.act = [c] { return inspect(*c); }; });
}

}  // namespace dsacore::cli
