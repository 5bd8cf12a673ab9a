"""The look of a page, its rules for the browser, and the few lines of script that start drawing."""

from __future__ import annotations

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; font-src data:"
)
"""The Content-Security-Policy: only what the file itself holds; nothing is loaded or sent."""

STYLE = """
.spdl { font: 14px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  color-scheme: light; --ink: #222; --paper: #fff; --soft: #555; --line: #999; --faint: #eee;
  --share: #cfe3f1; --mark: #fdebe0; --verdict: #d55e00; --good: #009e73; }
@media screen and (prefers-color-scheme: dark) {
  .spdl { color-scheme: dark; --ink: #ddd; --paper: #1c1c1c; --soft: #aaa; --line: #777;
    --faint: #333; --share: #24475e; --mark: #4a3020; --verdict: #e08030; }
  .spdl #charts { filter: invert(.89) hue-rotate(180deg); }
}
body.spdl { max-width: 1400px; margin: 1em auto; padding: 0 1em; }
.spdl h1 { font-size: 1.3em; } .spdl h2 { font-size: 1.05em; margin: 1.4em 0 .3em; }
.spdl p { margin: .35em 0; max-width: 75em; overflow-wrap: anywhere; }
.spdl p.said { display: flex; gap: .6em; } .spdl p b { flex: none; min-width: 5.5em; }
.spdl p.verdict, .spdl p.action { font-size: 1.1em; }
.spdl p.verdict { border-left: 4px solid var(--verdict); padding-left: .6em; }
.spdl p.action { border-left: 4px solid var(--good); padding-left: .6em; }
.spdl p.heading { font-size: 1.2em; margin-top: 1.2em; border-top: 1px solid var(--line); }
.spdl p.note { color: var(--soft); }
.spdl .scroll { overflow-x: auto; }
.spdl table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
.spdl th, .spdl td { padding: .2em .35em; text-align: right; }
.spdl th, .spdl td { border-bottom: 1px solid var(--faint); }
.spdl th { font-weight: 600; border-bottom-color: var(--line); white-space: nowrap; }
.spdl th[title]:not([title=""]) { cursor: help; text-decoration: underline dotted var(--line); }
.spdl th.text, .spdl td.text { text-align: left; overflow-wrap: anywhere; }
.spdl td.short { white-space: nowrap; }
.spdl td.percent { position: relative; min-width: 4em; }
.spdl td.percent i { position: absolute; left: 0; top: 15%; bottom: 15%; background: var(--share); }
.spdl td.percent span { position: relative; }
.spdl tr.marked { background: var(--mark); }
@media print { .spdl .scroll { overflow: visible; } }
"""
"""Light, or dark where the reader's system is. The charts are drawn once, for light, and turned: in
dark their white becomes the paper's gray, and their hues stay."""

# The attribute says when everything was drawn, in milliseconds after the page began to load.
DRAW = """
(async () => {
  const packed = (id) => document.getElementById(id);
  const unpack = async (id) => {
    const bytes = Uint8Array.from(atob(packed(id).textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  };
  const done = () => requestAnimationFrame(() => setTimeout(() => {
    document.documentElement.dataset.drawn = performance.now().toFixed(0);
  }));
  if (!packed("spdl-charts")) return done();
  if (typeof DecompressionStream === "undefined") {
    packed("charts").textContent = "This browser is too old to draw the charts: it needs " +
      "DecompressionStream (Chromium 80, Firefox 113, Safari 16.4).";
    return done();
  }
  const script = document.createElement("script");
  script.textContent = await unpack("spdl-script");
  document.head.append(script);
  await Bokeh.embed.embed_item(JSON.parse(await unpack("spdl-charts")), "charts");
  done();
})();
"""
