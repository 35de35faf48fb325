"""Looking at pages in Chromium: do they fit, can they be read, is somebody kept out?"""

from pathlib import Path
from typing import Any

from axe_playwright_python.sync_playwright import Axe

# Every visible text against the first opaque colour behind it, by the formula of WCAG 2; a large
# text needs less.
CONTRAST = """
() => {
  const parse = c => { const m = c.match(/[\\d.]+/g).map(Number);
    return m.length < 4 ? [...m, 1] : m; };
  const linear = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = c => { const [r, g, b] = c.map(linear);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const behind = e => { for (; e; e = e.parentElement) {
    const c = parse(getComputedStyle(e).backgroundColor);
    if (c[3] === 1) return c; } return [255, 255, 255, 1]; };
  const found = [];
  for (const e of document.querySelectorAll('body *')) {
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    const box = e.getBoundingClientRect();
    if (!own || box.width < 2 || box.height < 2) continue;
    if (e.closest('.unseen, .skip, title, desc')) continue;
    const s = getComputedStyle(e);
    const ink = parse(e instanceof SVGElement ? s.fill : s.color);
    const [a, b] = [light(ink.slice(0, 3)), light(behind(e).slice(0, 3))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const size = parseFloat(s.fontSize), text = e.textContent.trim().slice(0, 40);
    const large = size >= 24 || (size >= 18.66 && s.fontWeight >= 700);
    if (ratio < (large ? 3 : 4.5)) found.push([e.tagName, text, ratio.toFixed(2)]);
  }
  return found;
}
"""


def check_page(page: Any, folder: Path, name: str) -> None:
    """Look at a page on a dark phone and a light screen, for people who look, and with axe."""
    for width, scheme in ((360, "dark"), (1280, "light")):
        page.set_viewport_size({"width": width, "height": 800})
        page.emulate_media(color_scheme=scheme)
        room = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert page.evaluate(room) <= 0, f"{name} scrolls sideways at {width}"
        page.screenshot(path=folder / f"{name}-{width}-{scheme}.png", full_page=True)
        faint = page.evaluate(CONTRAST)
        assert faint == [], (name, width, scheme, faint)
    require_accessible(page, name)


def require_accessible(page: Any, name: str) -> None:
    """Let axe, which knows the rules of WCAG, look for barriers that keep people out."""
    found = Axe().run(page).response["violations"]
    serious = [
        (each["id"], each["help"], [node["html"][:120] for node in each["nodes"]])
        for each in found
        if each["impact"] in ("serious", "critical")
    ]
    assert serious == [], (name, serious)
