#include "layer/context.h"

#include <charconv>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <thread>

#include "plan/tables.h"

namespace dsacore {
namespace {

constexpr int kMaxThreads = 1024;

std::string environment(const char* name) {
  const char* text = std::getenv(name);
  return text != nullptr ? text : "";
}

int thread_count(int wanted) {
  std::string argument = "threads";
  std::string value = std::to_string(wanted);
  if (wanted == 0) {
    argument = "DSACORE_THREADS";
    value = environment("DSACORE_THREADS");
    if (value.empty()) {
      const int cores = int(std::thread::hardware_concurrency());
      return cores < 1 ? 1 : cores < kMaxThreads ? cores : kMaxThreads;
    }
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), wanted);
    if (error != std::errc() || end != value.data() + value.size()) wanted = -1;
  }
  if (wanted < 1 || wanted > kMaxThreads) throw Exception({ErrorCode::kRefused, argument, value, "allowed 1..1024"});
  return wanted;
}

std::unique_ptr<Device> find_device(const ContextOptions& options) {
  if (options.backend != BackendKind::kCuda) return nullptr;
#if defined(DSACORE_CUDA)
  return make_cuda_device(options.device);
#else
  throw Exception({ErrorCode::kUnsupported, "backend", "cuda", "this build has the backends reference and cpu"});
#endif
}

const Backend* find_backend(const ContextOptions& options) {
  if (options.backend == BackendKind::kReference) return &reference_backend();
#if defined(DSACORE_CUDA)  // elsewhere find_device has refused it
  if (options.backend == BackendKind::kCuda) return &cuda_backend();
#endif
  const bool given = !options.cpu_target.empty();
  const std::string target = given ? options.cpu_target : environment("DSACORE_CPU_TARGET");
  const Backend* backend = cpu_backend(target);
  if (backend != nullptr) return backend;
  std::string allowed = "this machine runs";
  for (std::string_view name : cpu_targets()) allowed += " " + std::string(name);
  throw Exception({ErrorCode::kUnsupported, given ? "cpu_target" : "DSACORE_CPU_TARGET", target, allowed});
}

}  // namespace

Context::Impl::Impl(const ContextOptions& options)
    : device(find_device(options)),
      backend(find_backend(options)),
      kind(options.backend),
      threads(device != nullptr ? 1 : thread_count(options.threads)),
      arena(memory()),
      plans(device.get()),
      on_choice(options.on_choice) {
  const std::string file = !options.tables_file.empty() ? options.tables_file : environment("DSACORE_TABLES");
  if (file.empty()) {
    tables_text = builtin_tables();
    tables_source = "built-in tables";
    return;
  }
  std::ifstream in(file, std::ios::binary);
  tables_text.assign(std::istreambuf_iterator<char>(in), {});
  if (!in) throw Exception({ErrorCode::kIo, "tables", file, "cannot be read"});
  tables_source = file;
  read_tables(tables_text, tables_source, backend->name, backend->target, 1);  // refuse a bad file now, not at prepare
}

Context::Context(const ContextOptions& options) : impl_(std::make_unique<Impl>(options)) {}
Context::~Context() = default;

BackendKind Context::backend() const { return impl_->kind; }
int Context::threads() const { return impl_->threads.count(); }
std::string_view Context::cpu_target() const { return impl_->backend->target; }
std::vector<ReservedItem> Context::reserved() const { return impl_->arena.items(); }
int Context::plans() const { return impl_->plans.size(); }

}  // namespace dsacore
