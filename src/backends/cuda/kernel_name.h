// Short names of kernels for people: of a mangled name neither the result, the namespaces nor the parameters.
#pragma once

#include <string>

namespace dsacore::cuda {

/// "_ZN7dsacore4cuda5scoreILi4EEEvPf" -> "score<4>"; a name that does not demangle as it is.
std::string short_kernel_name(const char* mangled);

}  // namespace dsacore::cuda
