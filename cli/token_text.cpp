#include "cli/token_text.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "dsacore/status.h"

namespace dsacore::cli {
namespace {

using nlohmann::json;

[[noreturn]] void malformed(const std::string& path, const std::string& key, std::string value, std::string allowed) {
  throw Exception({ErrorCode::kMalformedFile, path + ": " + key, std::move(value), std::move(allowed)});
}

json read_json(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(in), {}};
  if (!in) throw Exception({ErrorCode::kIo, "tokens", path, "cannot be read"});
  try {
    json parsed = json::parse(bytes);
    if (parsed.is_object()) return parsed;
  } catch (const json::exception& error) {
    malformed(path, "JSON", "unreadable", error.what());
  }
  malformed(path, "JSON", "no object", "must have the keys rows, text, begin, end, sources");
}

template <class T>
T get(const json& object, const std::string& path, const char* key, const char* allowed) {
  const auto found = object.find(key);
  if (found == object.end()) malformed(path, key, "absent", allowed);
  try {
    return found->get<T>();
  } catch (const json::exception&) {
    malformed(path, key, found->type_name(), allowed);
  }
}

/// Byte offset of each character of a UTF-8 text, and of its end.
std::vector<size_t> character_offsets(const std::string& text) {
  std::vector<size_t> offsets;
  for (size_t i = 0; i < text.size(); ++i) {
    if ((static_cast<unsigned char>(text[i]) & 0xC0) != 0x80) offsets.push_back(i);
  }
  offsets.push_back(text.size());
  return offsets;
}

/// Where the joined files begin: after the places where a file's last newline meets the blank line between files, if
/// there are as many of them as files need; else empty.
std::vector<size_t> guess_sources(const std::string& text, size_t count) {
  constexpr std::string_view kJoint = "\n\n\n";
  std::vector<size_t> begins = {0};
  for (size_t at = text.find(kJoint); at != std::string::npos; at = text.find(kJoint, at + kJoint.size())) {
    begins.push_back(at + kJoint.size());
  }
  return begins.size() == count ? begins : std::vector<size_t>();
}

std::vector<TextSource> sources_of(const std::string& text, const std::vector<std::string>& names,
                                   std::vector<size_t> begins) {
  if (begins.empty()) begins = guess_sources(text, names.size());
  if (begins.empty()) return {{"", {0, text.size()}}};
  std::vector<TextSource> sources;
  for (size_t i = 0; i < names.size(); ++i) {
    sources.push_back({names[i], {begins[i], i + 1 < begins.size() ? begins[i + 1] : text.size()}});
  }
  return sources;
}

}  // namespace

size_t TokenText::source_at(size_t byte) const {
  size_t at = 0;
  while (at + 1 < sources.size() && byte >= sources[at + 1].span.begin) ++at;
  return at;
}

TokenText read_token_text(const std::string& path) {
  const json object = read_json(path);
  TokenText out;
  out.rows = get<std::vector<std::string>>(object, path, "rows", "must be a list of texts");
  out.text = get<std::string>(object, path, "text", "must be a text");
  const auto begin = get<std::vector<size_t>>(object, path, "begin", "must be a list of character offsets");
  const auto end = get<std::vector<size_t>>(object, path, "end", "must be a list of character offsets");
  const auto names = get<std::vector<std::string>>(object, path, "sources", "must be a list of names");
  if (begin.size() != end.size()) {
    malformed(path, "end", std::to_string(end.size()) + " entries",
              "must be the " + std::to_string(begin.size()) + " of begin");
  }
  const std::vector<size_t> offsets = character_offsets(out.text);
  for (size_t i = 0; i < begin.size(); ++i) {
    if (begin[i] > end[i] || end[i] >= offsets.size() || (i > 0 && begin[i] < end[i - 1])) {
      malformed(path, "token " + std::to_string(i), std::to_string(begin[i]) + ".." + std::to_string(end[i]),
                "tokens must follow each other in a text of " + std::to_string(offsets.size() - 1) + " characters");
    }
    out.tokens.push_back({offsets[begin[i]], offsets[end[i]]});
  }
  std::vector<size_t> begins;
  if (object.contains("source_begin")) {
    begins = get<std::vector<size_t>>(object, path, "source_begin", "must be a list of character offsets");
    const bool fits = begins.size() == names.size() && std::is_sorted(begins.begin(), begins.end()) &&
                      !begins.empty() && begins.front() == 0 && begins.back() < offsets.size();
    if (!fits) malformed(path, "source_begin", "no ascending offsets from 0", "one for each source, inside the text");
    for (size_t& b : begins) b = offsets[b];
  }
  out.sources = sources_of(out.text, names, std::move(begins));
  return out;
}

}  // namespace dsacore::cli
