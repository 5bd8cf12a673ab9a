"""The look of a page, its rules for the browser, and the few lines of script that start drawing."""

from __future__ import annotations

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; font-src data:"
)
"""The Content-Security-Policy: only what the file itself holds; nothing is loaded or sent."""

STYLE = """
.spdl { font: 14px/1.45 system-ui, sans-serif; color: #222; background: #fff; }
body.spdl { max-width: 1400px; margin: 1em auto; padding: 0 1em; }
.spdl h1 { font-size: 1.3em; } .spdl h2 { font-size: 1.05em; margin: 1.4em 0 .3em; }
.spdl p { margin: .35em 0; max-width: 75em; overflow-wrap: anywhere; }
.spdl p.said { display: flex; gap: .6em; } .spdl p b { flex: none; min-width: 5.5em; }
.spdl p.verdict, .spdl p.action { font-size: 1.1em; }
.spdl p.verdict { border-left: 4px solid #d55e00; padding-left: .6em; }
.spdl p.action, .spdl p.good { border-left: 4px solid #009e73; padding-left: .6em; }
.spdl p.bad { border-left: 4px solid #b2182b; padding-left: .6em; }
.spdl p.heading { font-size: 1.2em; margin-top: 1.2em; border-top: 1px solid #999; }
.spdl p.note { color: #555; }
.spdl .scroll { overflow-x: auto; }
.spdl table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
.spdl th, .spdl td { padding: .2em .35em; text-align: right; border-bottom: 1px solid #eee; }
.spdl th { font-weight: 600; border-bottom-color: #999; white-space: nowrap; }
.spdl th[title]:not([title=""]) { cursor: help; text-decoration: underline dotted #999; }
.spdl th.text, .spdl td.text { text-align: left; overflow-wrap: anywhere; }
.spdl td.short { white-space: nowrap; }
.spdl td.percent { position: relative; min-width: 4em; }
.spdl td.percent i { position: absolute; left: 0; top: 15%; bottom: 15%; background: #cfe3f1; }
.spdl td.percent span { position: relative; }
.spdl tr.marked { background: #fdebe0; }
@media print { .spdl .scroll { overflow: visible; } }
"""

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
