#include "backends/cuda/kernel_name.h"

#include <cxxabi.h>

#include <cctype>
#include <cstdlib>
#include <memory>
#include <string_view>

namespace dsacore::cuda {
namespace {

bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }

/// Without the qualifiers of every name: "a::(anonymous namespace)::b<c::d>" -> "b<d>".
std::string unqualified(std::string_view text) {
  constexpr std::string_view kAnonymous = "(anonymous namespace)";
  std::string out;
  for (size_t i = 0; i < text.size();) {
    if (text.substr(i).starts_with("::")) {  // the name before it was a qualifier
      while (!out.empty() && is_word(out.back())) out.pop_back();
      i += 2;
    } else if (text.substr(i).starts_with(kAnonymous)) {
      i += kAnonymous.size();
    } else {
      out += text[i++];
    }
  }
  return out;
}

/// From the last blank outside angle brackets to the parameters: a template's demangled name begins with its result.
std::string without_signature(const std::string& text) {
  size_t begin = 0, end = text.size();
  int depth = 0;
  for (size_t i = 0; i < text.size() && end == text.size(); ++i) {
    if (text[i] == '<') ++depth;
    if (text[i] == '>') --depth;
    if (depth == 0 && text[i] == ' ') begin = i + 1;
    if (depth == 0 && text[i] == '(') end = i;
  }
  return text.substr(begin, end - begin);
}

}  // namespace

std::string short_kernel_name(const char* mangled) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> full(abi::__cxa_demangle(mangled, nullptr, nullptr, &status), std::free);
  return status == 0 ? without_signature(unqualified(full.get())) : mangled;
}

}  // namespace dsacore::cuda
