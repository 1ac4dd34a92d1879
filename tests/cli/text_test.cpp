// inspect OUT --tokens: what was selected of a text, in the terminal, as JSON and as a page.
#include <nlohmann/json.hpp>

#include "cli/markup.h"
#include "cli/program.h"
#include "io/out_file.h"

namespace dsacore::test {
namespace {

using nlohmann::json;

/// Words of a text as its tokens; two files, the second after a blank line.
struct WordText {
  std::string text;
  std::vector<size_t> begin, end;

  void add(const std::string& word, size_t characters = 0) {
    begin.push_back(at_);
    end.push_back(at_ + (characters != 0 ? characters : word.size()));
    put(word, characters);
  }
  void put(const std::string& between, size_t characters = 0) {
    text += between;
    at_ += characters != 0 ? characters : between.size();
  }

 private:
  size_t at_ = 0;
};

class Text : public ProgramTest {
 protected:
  void SetUp() override {
    ProgramTest::SetUp();
    words_ = awkward_text();
  }

  /// 40 words of a first file, then of a second one with awkward characters.
  static WordText awkward_text() {
    WordText w;
    for (int i = 0; i < 40; ++i) {
      w.add("first" + std::to_string(i));
      w.put(i == 39 ? "\n" : i % 10 == 9 ? "\n\n" : " ");
    }
    w.put("\n\n");
    w.add("<b>&\"bold'</b>");
    w.put(" ");
    w.add(
        "gr\xc3\xbc\xc3\x9f"
        "e",
        5);  // two-byte characters shift what follows
    w.put(" ");
    w.add("</mark>");
    w.put(" last\n");
    return w;
  }

  void write_tokens(const std::vector<std::string>& rows) {
    const json tokens = {{"rows", rows},
                         {"text", words_.text},
                         {"begin", words_.begin},
                         {"end", words_.end},
                         {"sources", {"one.txt", "two & three.txt"}}};
    write_text(path("tokens.json"), tokens.dump());
  }

  /// An output file whose rows selected these tokens.
  void write_selection(const std::vector<std::vector<int32_t>>& rows) {
    size_t topk = 1;
    for (const auto& row : rows) topk = std::max(topk, row.size());
    std::vector<int32_t> tokens(rows.size() * topk, -1);
    for (size_t b = 0; b < rows.size(); ++b)
      std::copy(rows[b].begin(), rows[b].end(), tokens.begin() + ptrdiff_t(b * topk));
    const std::vector<BFloat16> out(rows.size() * 128);
    OutTensors tensors;
    tensors.out = tensor_view(View<const BFloat16, 2>(out.data(), rows.size(), 128));
    tensors.topk_tokens = tensor_view(View<const int32_t, 2>(tokens.data(), rows.size(), topk));
    write_out_file(path("out.safetensors"), tensors);
  }

  Ran inspect(const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"inspect", path("out.safetensors"), "--tokens", path("tokens.json")};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_program(arguments);
  }

  WordText words_;
};

TEST_F(Text, FindsPassagesDensestFirst) {
  write_tokens({"What?"});
  write_selection({{2, 20, 21, 22, 24, 43}});
  const Ran ran = inspect({"--json"});
  ASSERT_EQ(ran.status, 0) << ran.err;
  const json row = json::parse(ran.out)[0];
  EXPECT_EQ(row["asks"], "What?");
  EXPECT_EQ(row["selected"], 5);
  EXPECT_EQ(row["beyond"], 1) << "token 43 is past the text: the step's own";
  ASSERT_EQ(row["passages"].size(), 2u);
  EXPECT_EQ(row["passages"][0]["first"], 20);
  EXPECT_EQ(row["passages"][0]["last"], 24);
  EXPECT_EQ(row["passages"][0]["selected"], 4);
  EXPECT_EQ(row["passages"][0]["source"], "one.txt");
  EXPECT_EQ(row["passages"][0]["text"],
            "first20 first21 first22 first23 first24 first25 first26 first27 first28 first29")
      << "the passage and its surroundings end with its paragraph";
}

TEST_F(Text, DoesNotJoinPassagesAcrossSources) {
  write_tokens({"What?"});
  write_selection({{39, 40}});
  const json row = json::parse(inspect({"--json"}).out)[0];
  ASSERT_EQ(row["passages"].size(), 2u);
  EXPECT_NE(row["passages"][0]["source"], row["passages"][1]["source"]);
}

TEST_F(Text, MarksWordsWithoutATerminal) {
  write_tokens({"What?"});
  write_selection({{20, 21, 24}, {41}});
  const Ran ran = inspect({});
  ASSERT_EQ(ran.status, 0) << ran.err;
  EXPECT_NE(ran.out.find("<<first20 first21>> first22 first23 <<first24>>"), std::string::npos) << ran.out;
  EXPECT_NE(ran.out.find("<<gr\xc3\xbc\xc3\x9f"
                         "e>>"),
            std::string::npos)
      << "offsets count characters, not bytes\n"
      << ran.out;
  EXPECT_NE(ran.out.find("row 1"), std::string::npos) << "a row without a question";
  EXPECT_EQ(ran.out.find('\x1b'), std::string::npos) << "no colours where there is no terminal";
}

TEST_F(Text, WritesAnEscapedWellFormedPage) {
  write_tokens({"<script>alert('x')</script> & co?", "And?"});
  write_selection({{20, 21, 40, 42}, {}});
  const Ran ran = inspect({"--html", path("page.html")});
  ASSERT_EQ(ran.status, 0) << ran.err;
  const std::string page = read_text(path("page.html"));
  EXPECT_TRUE(well_formed(page));
  EXPECT_EQ(page.find("<script"), std::string::npos);
  EXPECT_NE(page.find("&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt; &amp; co?"), std::string::npos);
  EXPECT_NE(page.find("<mark>first20 first21</mark>"), std::string::npos);
  EXPECT_NE(page.find(">&lt;b&gt;&amp;&quot;bold&#39;&lt;/b&gt;</mark>"), std::string::npos);
  EXPECT_NE(page.find("two &amp; three.txt"), std::string::npos);
  EXPECT_NE(page.find("Nothing of the text was selected."), std::string::npos) << "the second row";
  EXPECT_EQ(page.find("http"), std::string::npos) << "self-contained";
}

TEST_F(Text, RefusesTokensThatDoNotFitTheText) {
  write_selection({{1}});
  for (const char* bad :
       {R"({"rows":[],"text":"ab","begin":[0,1],"end":[1],"sources":[]})",
        R"({"rows":[],"text":"ab","begin":[0],"end":[9],"sources":[]})",
        R"({"rows":[],"text":"ab","begin":[1],"end":[0],"sources":[]})", R"({"rows":[],"text":"ab","begin":[0]})",
        R"({"rows":{},"text":"ab","begin":[],"end":[],"sources":[]})", "[1]", "{"}) {
    write_text(path("tokens.json"), bad);
    const Ran ran = inspect({"--html", path("page.html")});
    EXPECT_EQ(ran.status, 2) << bad << "\n" << ran.out;
    EXPECT_NE(ran.err.find("tokens.json"), std::string::npos) << ran.err;
    EXPECT_FALSE(std::filesystem::exists(path("page.html")));
  }
}

}  // namespace
}  // namespace dsacore::test
