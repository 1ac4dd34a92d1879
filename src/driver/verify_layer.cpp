#include "driver/verify_layer.h"

#include <cstring>
#include <string>

#include "driver/compare.h"
#include "dsacore/status.h"
#include "layer/context.h"

namespace dsacore {
namespace {

/// Inputs on the host with caches of their own.
struct HostInputs {
  explicit HostInputs(const Inputs& described)
      : kv(host_memory(), cache_bytes(described.kv), "kv_cache"),
        index(host_memory(), cache_bytes(described.index), "index_cache"),
        inputs(described) {
    inputs.kv.data = kv.data();
    inputs.index.data = index.data();
  }

  MemoryBlock kv, index;
  Inputs inputs;
};

void require_room(const Inputs& host) {
  const int64_t bytes = 3 * (cache_bytes(host.kv) + cache_bytes(host.index));
  if (bytes <= kMostVerifiedBytes) return;
  throw Exception({ErrorCode::kNoMemory, "--verify", std::to_string(bytes) + " bytes of host memory",
                   "allowed up to " + std::to_string(kMostVerifiedBytes)});
}

}  // namespace

std::vector<AgreementLine> verify_layer(Context& context, PreparedLayer& layer, const PlacedInputs& placed,
                                        const Inputs& host) {
  require_room(host);
  HostInputs before(host), expected_inputs(host), after(host);
  placed.fetch_caches(before.inputs);
  std::memcpy(expected_inputs.kv.data(), before.kv.data(), size_t(before.kv.size()));
  std::memcpy(expected_inputs.index.data(), before.index.data(), size_t(before.index.size()));

  Device* device = context.impl().device.get();
  const Queue queue = device != nullptr ? device->own_queue() : Queue{};
  layer.run(placed.inputs().step, queue).or_throw();
  if (device != nullptr) device->wait(queue);
  Outputs got;
  got.stages = dump_of(layer.stages(), true, context.impl().memory());
  got.out = placed.fetch_out();
  placed.fetch_caches(after.inputs);
  got.kv = after.inputs.kv;
  got.index = after.inputs.index;

  RunOptions cpu;
  cpu.dump = true;
  const RunResult expected = run_case(expected_inputs.inputs, cpu);
  CompareOptions options;
  options.threads = expected.report.threads;
  options.topk_tolerance = kCudaTopkTolerance;
  return compare(before.inputs, *cpu_backend(expected.report.target), expected.outputs, got, options);
}

}  // namespace dsacore
