"""Draw the pictures of the documentation: ``python docs/pictures.py`` writes docs/pictures/*.svg.

They are as wide as a phone, follow the page from light to dark, and have text that can be read
aloud. tests/test_docs.py compares the files with what this script draws.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from consilience.privacy.accounting import L2Laplace
from consilience.privacy.guarantee import Neighbours, Unit

FOLDER = Path(__file__).with_name("pictures")
WIDTH = 380
LINE = 15  # from one line of text to the next
# A picture that stands in a page takes the page's colours; one that is opened alone has its own.
STYLE = """
.pic{--i:#1d2733;--q:#5c6a79;--p:#fff;--a:#1f5fa8;--b:#b4540a;--t:#e8f0fa;--l:#c4ced9}
@media(prefers-color-scheme:dark){.pic{--i:#e3e8ee;--q:#a9b4c0;--p:#1e2129;--a:#86b8f2;--b:#f0a35e;
--t:#2a3648;--l:#4a5563}}
[data-md-color-scheme=default] .pic{--i:#1d2733;--q:#5c6a79;--p:#fff;--a:#1f5fa8;--b:#b4540a;
--t:#e8f0fa;--l:#c4ced9}
[data-md-color-scheme=slate] .pic{--i:#e3e8ee;--q:#a9b4c0;--p:#1e2129;--a:#86b8f2;--b:#f0a35e;
--t:#2a3648;--l:#4a5563}
.pic{font:12px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;display:block;width:100%;
max-width:500px;margin:1em 0}
.pic text{fill:var(--i);stroke:none}
.pic .quiet{fill:var(--q)}
.pic .strong{font-weight:600}
.pic .small{font-size:11.5px}
.pic .one{fill:var(--a);stroke:var(--a)}
.pic .other{fill:var(--b);stroke:var(--b)}
.pic text.one,.pic text.other{stroke:none}
.pic text.one{fill:var(--a)} .pic text.other{fill:var(--b)}
.pic .hill{fill-opacity:.22;stroke-width:1.5}
.pic.pic{max-width:500px}
.pic .axis{stroke:var(--l);fill:none}
.pic .ask{fill:var(--p);stroke:var(--q)}
.pic .say{fill:var(--t);stroke:var(--a)}
.pic .way{stroke:var(--q);fill:none;stroke-width:1.2}
.pic .tip{fill:var(--q)}
""".replace("\n", "")


def picture(height: float, title: str, words: str, parts: Sequence[str]) -> str:
    """Return a whole picture; `words` say what it shows to those who do not see it."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="pic" role="img" '
        f'viewBox="0 0 {WIDTH} {height:g}" aria-label="{escape(f"{title}. {words}")}">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>{''.join(parts)}</svg>\n"
    )


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """Return one line of text."""
    at = "" if anchor == "start" else f' text-anchor="{anchor}"'
    kind = f' class="{kind}"' if kind else ""
    return f'<text x="{x:g}" y="{y:g}"{kind}{at}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str, radius: float = 4) -> str:
    """Return a box with round corners."""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" '
        f'class="{kind}"/>'
    )


def arrow(*points: tuple[float, float]) -> str:
    """Return a line through points, with a tip at its end."""
    (x0, y0), (x, y) = points[-2:]
    along = math.atan2(y - y0, x - x0)
    tip = " ".join(
        f"{x - 7 * math.cos(along + turn):.1f},{y - 7 * math.sin(along + turn):.1f}"
        for turn in (0.45, -0.45)
    )
    line = " ".join(f"{a:g},{b:g}" for a, b in points)
    return (
        f'<polyline points="{line}" class="way"/><polygon points="{x:g},{y:g} {tip}" class="tip"/>'
    )


# ------------------------------------------------------------------ what epsilon means

LOW, HIGH, TABLES = 94.0, 107.0, (100, 101)
STEPS = 130  # so that a step begins at each whole number


def draw_epsilon() -> str:
    """Draw a count with noise for two neighbouring tables, at three epsilons."""
    parts, y = [], 16.0
    parts.append(text(0, y, "How many patients are ill? The answer, with noise:", "strong"))
    parts.append(text(0, y + 18, "■ the table as it is: 100 are ill", "one"))
    parts.append(text(0, y + 34, "■ had one patient more been ill: 101", "other"))
    y += 50
    for epsilon in (0.1, 1.0, 5.0):
        parts += _panel(epsilon, y)
        y += 136
    words = (
        "Each hill shows how likely each answer is. At epsilon 0.1 the two hills are nearly one, "
        "at 1 they overlap, and at 5 they are apart."
    )
    return picture(y, "What epsilon means", words, parts)


def _panel(epsilon: float, top: float) -> Iterator[str]:
    odds = math.exp(epsilon)
    shown = f"{odds:.2f}" if odds < 2 else f"{odds:.1f}" if odds < 10 else f"{odds:.0f}"
    yield text(0, top + 12, f"ε = {epsilon:g}", "strong")
    yield text(WIDTH, top + 12, f"odds 1 : 1 become at most {shown} : 1", "quiet", "end")
    bottom = top + 108
    who = {"unit": Unit.RECORD, "neighbours": Neighbours.REPLACE_ONE}
    scale = L2Laplace(sensitivity=1.0, scale=1.0 / epsilon, **who).scale
    places = [LOW + (HIGH - LOW) * step / STEPS for step in range(STEPS + 1)]
    for count, kind in zip(TABLES, ("one", "other"), strict=True):
        # The law of the noise, as `l2_laplace` draws it; each panel is as high as its hill.
        tops = (bottom - 84 * math.exp(-abs(place - count) / scale) for place in places)
        points = [f"{_across(x):.1f},{y:.1f}" for x, y in zip(places, tops, strict=True)]
        ends = f"{_across(HIGH):.1f},{bottom:g} {_across(LOW):.1f},{bottom:g}"
        yield f'<polygon points="{" ".join(points)} {ends}" class="hill {kind}"/>'
    yield f'<line x1="0" x2="{WIDTH}" y1="{bottom:g}" y2="{bottom:g}" class="axis"/>'
    for mark in range(95, 107, 2):
        yield text(_across(mark), bottom + 14, str(mark), "quiet", "middle")


def _across(value: float) -> float:
    return float(WIDTH * (value - LOW) / (HIGH - LOW))


# ------------------------------------------------------------------ units and neighbours

RECORDS = (("Ada", "61"), ("Ada", "62"), ("Ben", "47"), ("Cem", "83"), ("Dee", "35"))
ROW = 20


def _table(x: float, top: float, rows: Sequence[tuple[str, str, str]]) -> Iterator[str]:
    """Yield a small table: what is in a row and how it is marked."""
    yield text(x + 8, top + 10, "person", "quiet")
    yield text(x + 84, top + 10, "age", "quiet")
    for place, (person, age, kind) in enumerate(rows):
        y = top + 16 + ROW * place
        yield box(x, y, 124, ROW - 3, kind, 3)
        yield text(x + 8, y + 13, person)
        yield text(x + 84, y + 13, age)


def draw_neighbours() -> str:
    """Draw the two kinds of neighbouring tables."""
    parts = []
    table = [(*row, "ask") for row in RECORDS[1:]]
    changed = [(*row, "ask") for row in RECORDS[1:]]
    changed[1] = ("Eva", "70", "say")
    marked = [row if place != 1 else (*row[:2], "say") for place, row in enumerate(table)]
    for place, (name, other, words) in enumerate(
        (
            ("replace-one", changed, "one record is another: 4 and 4 records"),
            ("add-remove", [table[0], *table[2:]], "one record is missing: 4 and 3 records"),
        )
    ):
        top = 14 + 144 * place
        parts.append(text(0, top, name, "strong"))
        parts.append(text(WIDTH, top, words, "quiet", "end"))
        parts += [*_table(20, top + 12, marked), *_table(236, top + 12, other)]
        parts.append(arrow((156, top + 70), (224, top + 70)))
        parts.append(arrow((224, top + 70), (156, top + 70)))
    words = (
        "Under replace-one the record of Ben is that of Eva in the neighbouring table; under "
        "add-remove it is missing there."
    )
    return picture(290, "Neighbouring tables", words, parts)


def draw_units() -> str:
    """Draw what the three units hide in one table."""
    parts = []
    for place, (unit, first, last, words) in enumerate(
        (
            ("record", 0, 1, "one row"),
            ("person", 0, 2, "all rows of Ada"),
            ("site", 0, 5, "the whole table"),
        )
    ):
        x = 130 * place
        parts.append(text(x, 12, f"per {unit}", "strong"))
        parts.append(text(x, 27, words, "quiet"))
        for row, (person, age) in enumerate(RECORDS):
            y = 36 + ROW * row
            parts.append(box(x, y, 116, ROW - 3, "say" if first <= row < last else "ask", 3))
            parts.append(text(x + 8, y + 13, person))
            parts.append(text(x + 80, y + 13, age))
    words = (
        "Per record, one row is hidden; per person, both rows of Ada; per site, the whole table."
    )
    return picture(36 + ROW * len(RECORDS) + 4, "Units", words, parts)


# ------------------------------------------------------------------ how to choose

ASK, SAY, GAP = 186, 168, 14  # widths of questions and answers, and the space below each
Step = tuple[str, Sequence[str]]  # a question, and what follows from "yes"
CHART: Sequence[tuple[str, Sequence[Step], Sequence[str]]] = (
    (
        "1. Whose difference is hidden?",
        (
            (
                "Must it stay hidden that a whole organisation has certain records?",
                ("VoteTally, or", "SoftLabelDistillation"),
            ),
            (
                "Can one person have several records?",
                ("person and", "max_records_per_person", "in [schema]"),
            ),
            ("Is the number of records itself a secret?", ("neighbours =", '"add-remove"')),
        ),
        ("Nothing to set: one record,", "replace-one"),
    ),
    (
        "2. Where is the noise drawn?",
        (
            (
                "Are there at least four sites, and a party that will not work together with the "
                "hub?",
                ('hub = "blind"', "and a [statistic]"),
            ),
            ("Does everybody trust the hub with exact models?", ('hub = "trusted"',)),
        ),
        ('hub = "untrusted"',),
    ),
    (
        "3. What do sites hand over?",
        (
            ("Is the label a number?", ("MomentsRegressor", "or PrivateRidge")),
            (
                "Does the outcome hang on relations between columns that nobody can name, and has "
                "each site thousands of records?",
                ("PrivateForestClassifier", "and WeightedVote"),
            ),
            (
                "Should each site have a private model of its own?",
                ("PrivateLogisticRegression", "and Average"),
            ),
            ("Are there a few hundred labelled public records?", ("GradientStep",)),
        ),
        ("Moments",),
    ),
    (
        "4. Which epsilon?",
        (
            (
                "Do sites share the noise, or has each of them thousands of records?",
                ("0.25 to 1", "delta = 1e-6"),
            ),
            ("Has each of them a few hundred?", ("2 to 4", "delta = 1e-6")),
        ),
        ("Find more sites or", "more public records"),
    ),
    (
        "5. Try it: consilience simulate",
        (
            (
                "Is the adapted release better than a site's own exact model?",
                ("Run the study",),
            ),
        ),
        ("Change 2 to 4,", "or do not join"),
    ),
)


def draw_chart() -> str:
    """Draw how to choose, as questions that are answered from top to bottom."""
    parts: list[str] = []
    y = 0.0
    for title, steps, otherwise in CHART:
        parts.append(text(0, y + 14, title, "strong"))
        y += 24
        for question, answer in steps:
            shown = textwrap.wrap(question, 27)
            height = max(len(shown), len(answer)) * LINE + 14
            parts += _labelled(0, y, ASK, height, "ask", shown)
            parts += _labelled(WIDTH - SAY, y, SAY, height, "say", answer)
            middle = y + height / 2
            parts.append(arrow((ASK, middle), (WIDTH - SAY, middle)))
            parts.append(text(ASK + 3, middle - 4, "yes", "quiet"))
            parts.append(arrow((ASK / 2, y + height), (ASK / 2, y + height + GAP + 6)))
            parts.append(text(ASK / 2 + 6, y + height + 14, "no", "quiet"))
            y += height + GAP + 6
        height = len(otherwise) * LINE + 14
        parts += _labelled(0, y, ASK, height, "say", otherwise)
        y += height + 22
    said = []
    for title, steps, otherwise in CHART:
        said.append(f"{title}.")
        said += [f"{question} Yes: {' '.join(answer)}." for question, answer in steps]
        said.append(f"No: {' '.join(otherwise)}.")
    words = " ".join(said)
    return picture(y - 10, "How to choose", words, parts)


def _labelled(
    x: float, y: float, width: float, height: float, kind: str, lines: Sequence[str]
) -> Iterator[str]:
    yield box(x, y, width, height, kind)
    first = y + (height - LINE * len(lines)) / 2 + 11
    for place, line in enumerate(lines):
        yield text(x + 8, first + LINE * place, line, "small")


PICTURES: Mapping[str, Callable[[], str]] = {
    "epsilon": draw_epsilon,
    "neighbours": draw_neighbours,
    "units": draw_units,
    "choosing": draw_chart,
}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw(), encoding="utf-8")
