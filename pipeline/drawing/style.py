# ruff: noqa: E501 (CSS)
"""One style for every page and picture, light and dark: colours and charts, then the page around them."""

THEME = """\
:root {
  --paper: #ffffff; --ink: #1c2127; --soft: #59626d; --hair: #dfe3e8; --wash: #f6f7f9;
  --blue: #0b62a4; --rust: #c14a09; --green: #0b7a57; --plum: #7d4a99; --gone: #fbe6d6; --alarm: #b3261e; --shade: #c4cad1;
}
.chart { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, "Liberation Sans", sans-serif; font-size: 12px; }
.chart text { fill: var(--ink); font-variant-numeric: tabular-nums; }
.chart .title { font-size: 13.5px; font-weight: 600; }
.chart .tick { fill: var(--soft); }
.chart .grid { stroke: var(--hair); fill: none; }
.chart .axis { stroke: var(--soft); fill: none; }
.chart .level { stroke: var(--soft); stroke-dasharray: 4 3; fill: none; }
.chart .band { fill: var(--gone); }
.chart .blue { --tone: var(--blue); }
.chart .rust { --tone: var(--rust); }
.chart .green { --tone: var(--green); }
.chart .plum { --tone: var(--plum); }
.chart .ink { --tone: var(--ink); }
.chart .fill { fill: var(--tone); }
.chart .ring { fill: var(--paper); stroke: var(--tone); stroke-width: 1.6; }
.chart .line { fill: none; stroke: var(--tone); stroke-width: 1.6; stroke-linejoin: round; }
.chart .dashed { stroke-dasharray: 5 3; }
.chart .whisker { fill: none; stroke: var(--tone); stroke-width: 1.4; }
.chart .whisker.strong { stroke-width: 2.4; }
.chart .strokes { fill: none; stroke: var(--tone); stroke-width: 1.2; opacity: 0.45; }
.chart .halo { fill: none; stroke: #ffffff; stroke-width: 3.6; }
.chart .chosen { fill: none; stroke: #c14a09; stroke-width: 2; }
"""

PAGE = """\
@media screen and (prefers-color-scheme: dark) {
  :root {
    color-scheme: dark;
    --paper: #14171b; --ink: #e4e7eb; --soft: #a2abb6; --hair: #333a43; --wash: #1c2026;
    --blue: #6bb3ec; --rust: #f0924f; --green: #4cc39a; --plum: #c39add; --gone: #3d2a1d; --alarm: #ff8a80; --shade: #4a535e;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0 auto; padding: 2.6rem 1.5rem 4rem; max-width: 64rem; background: var(--paper); color: var(--ink);
  font: 1.04rem/1.58 Charter, "Bitstream Charter", "Iowan Old Style", "Source Serif 4", Cambria, Georgia, "Liberation Serif", serif;
  overflow-wrap: break-word;
}
h1 { font-size: 1.15rem; font-weight: 600; letter-spacing: 0.02em; color: var(--soft); margin: 0 0 0.9rem; }
h2 { font-size: 1.38rem; line-height: 1.25; margin: 0 0 0.5rem; }
p { margin: 0 0 0.8rem; max-width: 43rem; }
section { margin-top: 3rem; padding-top: 1.5rem; border-top: 1px solid var(--hair); }
.lead { font-size: 1.55rem; line-height: 1.36; margin-bottom: 0.9rem; text-wrap: pretty; max-width: 50rem; }
.outcome { font-size: 1.12rem; }
.fine { font-size: 0.9rem; line-height: 1.5; color: var(--soft); }
.readings { margin: 1.1rem 0 0; padding: 0; list-style: none; max-width: 46rem; }
.readings li { margin: 0 0 0.45rem; padding-left: 1.1rem; position: relative; }
.readings li::before { content: "–"; position: absolute; left: 0; color: var(--soft); }
.alarm { border: 2px solid var(--alarm); padding: 0.9rem 1.1rem; margin: 1.4rem 0; }
.alarm p:last-child, .alarm ul { margin-bottom: 0; }
.alarm strong { color: var(--alarm); }
.scroll {
  overflow-x: auto; margin: 1.2rem 0 0.6rem;
  background: /* a shade at the end behind which there is more */
    linear-gradient(to right, var(--paper) 40%, transparent) 0 0 / 2.4rem 100% no-repeat local,
    linear-gradient(to left, var(--paper) 40%, transparent) 100% 0 / 2.4rem 100% no-repeat local,
    linear-gradient(to right, var(--shade), transparent) 0 0 / 1rem 100% no-repeat scroll,
    linear-gradient(to left, var(--shade), transparent) 100% 0 / 1rem 100% no-repeat scroll;
}
table, dl, .params, .panels { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, "Liberation Sans", sans-serif; }
table { border-collapse: collapse; font-size: 0.9rem; line-height: 1.35; font-variant-numeric: tabular-nums; min-width: 100%; }
th, td { padding: 0.5rem 0.6rem; text-align: right; vertical-align: baseline; white-space: nowrap; border-bottom: 1px solid var(--hair); }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
th:last-child, td:last-child { padding-right: 0; }
thead th { font-weight: 600; color: var(--soft); vertical-align: bottom; border-bottom: 1px solid var(--soft); }
tbody th { font-weight: 600; }
table.few { min-width: 0; }
.few th + th, .few td + td { padding-left: 3rem; }
td.main { font-weight: 600; }
td.words { white-space: normal; min-width: 18rem; text-align: left; }
tbody th .sub { white-space: normal; max-width: 13rem; }
.sub { display: block; font-weight: 400; color: var(--soft); font-size: 0.82rem; }
dl.protocol { display: grid; grid-template-columns: repeat(auto-fill, minmax(10.5rem, 1fr)); gap: 0.7rem 1.4rem; margin: 0.9rem 0 0; font-size: 0.86rem; line-height: 1.35; }
dl.protocol dt { color: var(--soft); }
dl.protocol dd { margin: 0; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
dl.protocol .long { grid-column: span 2; }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 24rem), 1fr)); gap: 2rem 2.6rem; margin: 1.5rem 0 0; align-items: start; }
.panels svg { width: 100%; max-width: 34rem; height: auto; display: block; }
.params { columns: 15.5rem; column-gap: 2.4rem; font-size: 0.84rem; line-height: 1.5; margin-top: 1.2rem; }
.params div { break-inside: avoid; margin-bottom: 1.1rem; }
.params table { font-size: inherit; line-height: inherit; width: 100%; table-layout: auto; }
.params caption { text-align: left; font-weight: 600; padding-bottom: 0.15rem; }
.params td { padding: 0.13rem 0; border-bottom: 1px solid var(--hair); white-space: normal; }
.params td:first-child { color: var(--soft); padding-right: 1rem; white-space: nowrap; }
.params td:last-child { overflow-wrap: anywhere; }
.params .inner td:first-child { padding-left: 1rem; }
.params .idle td { opacity: 0.62; }
footer { margin-top: 3rem; }
@media (max-width: 40rem) {
  body { padding: 1.4rem 1rem 3rem; font-size: 1rem; }
  .lead { font-size: 1.28rem; }
  section { margin-top: 2.2rem; padding-top: 1.1rem; }
  table { font-size: 0.82rem; }
  th, td { padding: 0.45rem 0.35rem; }
  thead th, thead .sub { white-space: normal; }
  td.words { min-width: 13rem; }
  .scroll th:first-child, .scroll td:first-child { position: sticky; left: 0; background: var(--paper); padding-right: 0.6rem; }
}
@media print {
  @page { margin: 16mm 15mm; }
  html { font-size: 9.2pt; }
  body { padding: 0; max-width: none; }
  p, .lead, .readings { max-width: none; }
  .lead { font-size: 1.5rem; }
  h2, .fine { break-after: avoid; break-inside: avoid; }
  section { margin-top: 1.6rem; padding-top: 0.9rem; }
  table { font-size: 8pt; }
  th, td { padding: 0.3rem 0.4rem; }
  .sub { font-size: 7pt; white-space: normal; }
  .scroll { overflow: visible; background: none; }
  .panels { grid-template-columns: 1fr 1fr; gap: 1rem 1.6rem; }
  .panels svg, tr, .readings li, .alarm, dl.protocol div, #parameters { break-inside: avoid; }
  .params { columns: 3; font-size: 7.5pt; }
}
"""
