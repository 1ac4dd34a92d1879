// Any bytes as a step file: an error that names what is wrong, or a step whose tensors lie inside the file and agree.
#include "fuzz/fuzz_support.h"
#include "io/step_file.h"

namespace dsacore::fuzz {
namespace {

void read(std::vector<std::byte>& bytes) {
  const StepFile f = parse_step_file(SafetensorsFile::parse(bytes, "input"));
  const Step& step = f.step;
  require(step.q >= 1 && step.batch >= 1 && step.batch % step.q == 0, "B is a multiple of q");
  const int64_t requests = step.batch / step.q;
  require(step.projected.extent(0) == step.batch && step.slots.extent(0) == step.batch &&
              step.index_slots.extent(0) == step.batch && step.block_table.extent(0) == requests &&
              step.seq_lens.extent(0) == requests,
          "the tensors have the rows and requests of the step");
  require(f.kv.page >= kIndexPage && f.kv.page % kIndexPage == 0 && f.kv.stride_rows >= f.kv.page, "pages fit");
  require(f.flat || f.kv.stride_rows == f.kv.page, "only a flat cache has a stride");
  touch(tensor_view(step.projected));
  touch(tensor_view(step.slots));
  touch(tensor_view(step.index_slots));
  touch(tensor_view(step.block_table));
  touch(tensor_view(step.index_block_table));
  touch(tensor_view(step.seq_lens));
  touch(cache_tensor(f.kv, f.flat));
  touch(cache_tensor(f.index));
}

}  // namespace
}  // namespace dsacore::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::vector<std::byte> bytes = dsacore::fuzz::file_of(data, size);
  try {
    dsacore::fuzz::read(bytes);
  } catch (const dsacore::Exception& e) {
    dsacore::fuzz::require_file_error(e);
  }
  return 0;
}
