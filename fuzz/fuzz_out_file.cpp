// Any bytes as an output file: an error that names what is wrong, or tensors that lie inside the file.
#include "fuzz/fuzz_support.h"
#include "io/out_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::vector<std::byte> bytes = dsacore::fuzz::file_of(data, size);
  try {
    const dsacore::OutFile f = dsacore::parse_out_file(dsacore::SafetensorsFile::parse(bytes, "input"));
    dsacore::fuzz::require(!f.tensors.out.empty(), "out is there");
    for (const auto& [name, tensor] : f.tensors.named()) dsacore::fuzz::touch(*tensor);
  } catch (const dsacore::Exception& e) {
    dsacore::fuzz::require_file_error(e);
  }
  return 0;
}
