// The style sheet of text_page.cpp: light and dark, no images, system fonts.
#pragma once

#include <string_view>

namespace dsacore::cli {

inline constexpr std::string_view kPageStyle = R"css(
:root { color-scheme: light dark; --paper: #fdfdfb; --card: #ffffff; --ink: #1d2530; --soft: #5c6775; --line: #dde2e8;
  --mark: #ffe08a; --mark-ink: #1d2530; --accent: #2a62c4; --quiet: #f1f3f6;
  --s0: #2f7fd1; --s1: #d9822b; --s2: #2a9d6f; --s3: #b0479b; --s4: #8a7a1f; --s5: #6b6fd4; }
@media (prefers-color-scheme: dark) { :root { --paper: #14181d; --card: #1b2027; --ink: #e3e7ec; --soft: #98a3b0; --line: #303842;
  --mark: #7a5c00; --mark-ink: #fff3cf; --accent: #7fb0ff; --quiet: #222932;
  --s0: #5aa5f0; --s1: #eda35c; --s2: #56c596; --s3: #d680c6; --s4: #c4b24f; --s5: #9a9df0; } }
* { box-sizing: border-box; }
html { scroll-behavior: smooth; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
.page { max-width: 1240px; margin: 0 auto; padding: 28px 28px 60px; display: grid; grid-template-columns: 270px minmax(0, 1fr);
  column-gap: 36px; align-items: start; }
header { grid-column: 1 / -1; border-bottom: 1px solid var(--line); margin-bottom: 24px; padding-bottom: 14px; }
h1 { font-size: 25px; line-height: 1.25; margin: 0 0 4px; letter-spacing: -.01em; }
h2 { font-size: 22px; line-height: 1.3; margin: 0 0 4px; letter-spacing: -.01em; }
h3 { font-size: 15px; margin: 34px 0 10px; text-transform: uppercase; letter-spacing: .06em; color: var(--soft); }
p { margin: 0 0 10px; }
.soft { color: var(--soft); font-size: 14px; }
.legend { display: flex; flex-wrap: wrap; gap: 6px 20px; font-size: 14px; color: var(--soft); margin-top: 8px; }
.swatch { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 7px; vertical-align: -1px; background: var(--c); }
.tab { position: absolute; opacity: 0; pointer-events: none; }
nav { position: sticky; top: 16px; max-height: calc(100vh - 32px); overflow: auto; display: grid; gap: 4px; }
nav label { display: block; padding: 9px 12px; border-radius: 8px; cursor: pointer; line-height: 1.35; font-size: 15px; border: 1px solid transparent; }
nav label:hover { background: var(--quiet); }
nav label small { display: block; color: var(--soft); font-size: 12.5px; margin-top: 2px; }
.row { display: none; }
mark { background: var(--mark); color: var(--mark-ink); border-radius: 3px; padding: 0 .12em; box-decoration-break: clone; -webkit-box-decoration-break: clone; }
mark:target { outline: 2px solid var(--accent); outline-offset: 1px; }
.strip { margin: 14px 0 4px; }
.strip svg { display: block; width: 100%; height: 58px; background: var(--quiet); border-radius: 6px; }
.strip div { display: flex; font-size: 12.5px; color: var(--soft); margin-top: 3px; }
.strip span { overflow: hidden; white-space: nowrap; text-overflow: ellipsis; padding-right: 6px; }
.passages { list-style: none; margin: 0; padding: 0; display: grid; gap: 12px; }
.passages li { background: var(--card); border: 1px solid var(--line); border-left: 4px solid var(--c); border-radius: 8px; padding: 11px 16px 12px; }
.facts { display: flex; flex-wrap: wrap; gap: 2px 14px; align-items: center; font-size: 13.5px; color: var(--soft); margin-bottom: 5px; }
.facts b { color: var(--c); }
.meter { display: inline-block; width: 74px; height: 7px; border-radius: 4px; background: var(--quiet); overflow: hidden; vertical-align: 1px; margin-right: 7px; }
.meter i { display: block; height: 100%; background: var(--c); }
.quote { font-family: Charter, "Bitstream Charter", Cambria, Georgia, "Noto Serif", serif; font-size: 17px; line-height: 1.55; overflow-wrap: anywhere; }
a { color: var(--accent); text-decoration: none; }
a:hover { text-decoration: underline; }
.facts a { margin-left: auto; }
details { margin-top: 12px; }
summary { cursor: pointer; color: var(--accent); font-size: 15px; margin-bottom: 10px; }
.whole { display: grid; grid-template-columns: 46px minmax(0, 1fr); gap: 10px; height: 78vh; min-height: 320px; }
.whole > svg { width: 46px; height: 100%; background: var(--quiet); border-radius: 6px; display: block; }
.scroll { overflow: auto; background: var(--card); border: 1px solid var(--line); border-radius: 8px; height: 100%; }
.scroll h4 { position: sticky; top: 0; margin: 0; padding: 6px 16px; font-size: 14px; background: var(--card); border-bottom: 1px solid var(--line);
  border-left: 4px solid var(--c); color: var(--c); z-index: 1; }
.scroll pre { margin: 0; padding: 12px 16px 18px; border-left: 4px solid var(--c); white-space: pre-wrap; overflow-wrap: anywhere;
  font: 13.5px/1.5 ui-monospace, "Cascadia Mono", "DejaVu Sans Mono", Menlo, monospace; }
.scroll mark { scroll-margin: 80px; }
@media (max-width: 900px) { .page { grid-template-columns: minmax(0, 1fr); padding: 18px 16px 40px; } nav { position: static; max-height: 42vh; margin-bottom: 22px; } }
@media print { .row { display: block !important; break-before: page; } nav { display: none; } .whole { height: auto; } .scroll { overflow: visible; height: auto; } }
)css";

}  // namespace dsacore::cli
