"""One HTML page that needs nothing but itself: no network, legible on light and dark, wide and narrow."""

from collections.abc import Mapping
from html import escape
from typing import Any

import msgspec

STYLE = """
:root { color-scheme: light dark; --back:#fcfcfb; --card:#ffffff; --ink:#1d2125; --soft:#5c6670; --rule:#dfe3e6; --red:#c62828;
  --c0:#1565c0; --c1:#c2620a; --c2:#2e7d4f; --c3:#8e3bb0; --c4:#007c89; --c5:#a3394d; --fire:176,48,176; }
@media (prefers-color-scheme: dark) { :root { --back:#14171a; --card:#1c2024; --ink:#e6e9ec; --soft:#9aa5af; --rule:#333a41;
  --red:#ff6b60; --c0:#6cb1ff; --c1:#ffab5c; --c2:#6fd39a; --c3:#d79bff; --c4:#5fd0dd; --c5:#ff92a5; --fire:214,96,214; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1160px; padding: 1.5rem 1.2rem 5rem; background: var(--back); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.6rem; margin: 0; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
p { margin: .4rem 0; } .soft, .none, small { color: var(--soft); } .note { max-width: 46rem; color: var(--soft); }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(136px, 1fr)); gap: .7rem; margin: 1.2rem 0; }
.tile, figure, .card { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; }
.tile { padding: .6rem .8rem; }
.tile b { display: block; font-size: 1.3rem; line-height: 1.3; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: .85rem; }
.many, .few { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 340px), 1fr)); gap: .9rem; }
.few { grid-template-columns: repeat(auto-fill, minmax(min(100%, 480px), 1fr)); }
figure { margin: 0; padding: .7rem .8rem .5rem; } figcaption { margin-bottom: .2rem; }
svg { display: block; width: 100%; height: auto; overflow: visible; font-size: 13.5px; }
.few svg { font-size: 11px; }
svg text { fill: var(--soft); font-family: inherit; } svg .grid { stroke: var(--rule); stroke-width: 1; }
svg .axis { stroke: var(--soft); stroke-width: 1; }
svg polyline { fill: none; stroke-width: 2; stroke-linejoin: round; } svg polyline.thin { stroke-width: 1; opacity: .45; }
svg polyline.dashed { stroke-dasharray: 6 4; } svg .band { opacity: .18; } svg .pale { opacity: .35; }
svg .mark { stroke: var(--soft); stroke-dasharray: 3 4; } svg text.mark { stroke: none; }
svg line.threshold { stroke: var(--red); stroke-width: 2; } svg text.threshold { fill: var(--red); font-weight: 600; }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1rem; margin: .3rem 0 0; font-size: .85rem; color: var(--soft); }
.legend b { color: var(--ink); font-weight: 600; font-variant-numeric: tabular-nums; }
.legend i { display: inline-block; width: 1.1rem; height: 3px; margin-right: .4rem; vertical-align: middle; border-radius: 2px; }
.legend i.dots { width: 8px; height: 8px; border-radius: 50%; }
.legend i.dashed { background: none; height: 0; border-radius: 0; border-top: 3px dashed currentColor; }
.legend i.band { height: 10px; opacity: .3; }
.scroll { overflow-x: auto; margin-bottom: .9rem; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .9rem .3rem 0; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; } th:first-child, td:first-child { text-align: left; }
.card { padding: .8rem 1rem; margin: .7rem 0; }
.strip { white-space: pre-wrap; overflow-wrap: anywhere; line-height: 2; margin: .2rem 0; font-size: 1.02rem; }
.t { border-radius: 3px; padding: 2px 0; } .t:hover { outline: 2px solid var(--c0); }
.given { border-bottom: 2px solid var(--soft); }
.h1 { background: rgba(var(--fire), .16); } .h2 { background: rgba(var(--fire), .26); }
.h3 { background: rgba(var(--fire), .36); } .h4 { background: rgba(var(--fire), .52); }
.key span { padding: 1px 8px; border-radius: 3px; margin-right: .5rem; white-space: nowrap; }
#tip { position: fixed; display: none; white-space: pre; pointer-events: none; background: var(--ink); color: var(--back);
  padding: .4rem .6rem; border-radius: 6px; font: 13px/1.45 ui-monospace, "DejaVu Sans Mono", monospace; z-index: 2; }
details { margin: .5rem 0; } summary { cursor: pointer; font-weight: 600; }
pre { overflow-x: auto; font: 13px/1.45 ui-monospace, "DejaVu Sans Mono", monospace; }
"""
PALETTE = "\n".join(
    f"svg .s{i} {{ stroke: {c}; }} svg .f{i} {{ fill: {c}; }} .k{i} {{ background: {c}; color: {c}; }}"
    for i, c in enumerate(f"var(--c{i})" for i in range(6))
)
# shows what a token carries beside the pointer, inside the window
SCRIPT = """
const tip = document.getElementById("tip");
document.addEventListener("pointerover", event => {
  const token = event.target.closest(".t");
  tip.style.display = token ? "block" : "none";
  if (!token) return;
  tip.textContent = token.dataset.tip;
  const box = token.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(box.left, innerWidth - tip.offsetWidth - 8)) + "px";
  const below = box.bottom + 6;
  tip.style.top = (below + tip.offsetHeight < innerHeight ? below : box.top - tip.offsetHeight - 6) + "px";
});
"""


def page(title: str, body: str) -> str:
    fits = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f'<meta charset="utf-8">{fits}<title>{escape(title)}</title>'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{STYLE}{PALETTE}</style></head>\n'
        f'<body>\n{body}\n<div id="tip"></div><script>{SCRIPT}</script></body></html>\n'
    )


def section(title: str, *parts: str) -> str:
    held = "\n".join(filter(None, parts))
    return f"<section><h2>{escape(title)}</h2>\n{held}</section>\n" if held else ""


def side_by_side(figures: list[str], size: str = "many") -> str:
    """Figures in rows: "many" small ones, or "few" larger ones."""
    return f'<div class="{size}">{"".join(figures)}</div>' if figures else ""


def tiles(facts: Mapping[str, str]) -> str:
    cells = "".join(f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for name, value in facts.items())
    return f'<div class="tiles">{cells}</div>'


def table(head: list[str], rows: list[list[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def folded(title: str, tree: Any) -> str:
    """Nested data under a heading that opens."""
    text = escape(msgspec.json.format(msgspec.json.encode(tree), indent=2).decode())
    return f"<details><summary>{escape(title)}</summary><pre>{text}</pre></details>"
