"""What a file promises, in words that a lawyer or a data officer can read, as text and as HTML.

Everything on the page is recomputed from the file. No claim is repeated that was not checked.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from consilience.aggregators.registry import AGGREGATORS
from consilience.display.html import card, section
from consilience.errors import ConsilienceError
from consilience.evaluation.baselines import compare_rows
from consilience.evaluation.measures import AUC, STATED
from consilience.files.contribution import Contribution
from consilience.files.release import Release, is_known_method
from consilience.privacy.guarantee import Guarantee, Neighbours, Unit, show_bound
from consilience.text import (
    PAGE_WIDTH,
    Quoted,
    collapse,
    count_columns,
    fill,
    quote,
    screen_width,
)

UNITS = {
    Unit.RECORD: "one record",
    Unit.PERSON: "one person, with all of that person's records that were used",
    Unit.SITE: "one whole site, with all its records",
}
RELATIONS = {
    Neighbours.REPLACE_ONE: "replaced by any other (how many there are is not hidden)",
    Neighbours.ADD_REMOVE: "added or removed (how many there are is hidden too)",
    Neighbours.NULL_ONE: "replaced by an empty one",
}
PROTECTED = {  # the same in the middle of a sentence
    Unit.RECORD: "one record",
    Unit.PERSON: "the data of one person",
    Unit.SITE: "the data of one site",
}
READERS = "anyone who sees this file"
LONGEST_NAME = 30  # of a row whose value stands beside it
# A heading, paragraphs, and rows of (name, value).
Section = tuple[str, Sequence[str], Sequence[tuple[str, str]]]


@dataclass(frozen=True)
class Page:
    """A title and sections, each of paragraphs and rows of (name, value), in printable text.

    Every line of text that is `Quoted` begins with a bar, which no line of ours does.
    """

    title: str
    sections: Sequence[Section]

    def __post_init__(self) -> None:
        object.__setattr__(self, "title", collapse(self.title))
        sections = [
            (
                collapse(heading),
                [_clean(paragraph) for paragraph in paragraphs],
                [(_clean(name), _clean(value)) for name, value in rows],
            )
            for heading, paragraphs, rows in self.sections
        ]
        object.__setattr__(self, "sections", sections)

    def as_text(self, width: int = PAGE_WIDTH) -> str:
        """Return the page for an e-mail or a file; the same for every reader."""
        return "\n".join(self._lines(width)).rstrip() + "\n"

    def on_screen(self) -> str:
        """Return the page for this terminal, which breaks no line of it again."""
        return self.as_text(screen_width())

    def _lines(self, width: int) -> Iterator[str]:
        yield self.title
        yield "=" * len(self.title)
        for heading, paragraphs, rows in self.sections:
            yield f"\n{heading}\n{'-' * len(heading)}"
            for paragraph in paragraphs:
                yield fill(paragraph, width, _bar(paragraph)) + "\n"
            widths = [count_columns(name) for name, _ in rows]
            most = min(LONGEST_NAME, 3 * width // 8)
            longest = max((columns for columns in widths if columns <= most), default=4)
            indent = " " * (longest + 2)
            for (name, value), columns in zip(rows, widths, strict=True):
                bar = _bar(name, value)
                if columns > longest:
                    yield fill(name, width, bar)
                    yield fill(value, width, bar + indent)
                else:
                    begin = name + " " * (longest + 2 - columns)
                    yield fill(value, width, bar + begin, bar + indent)

    def as_card(self, chart: str = "") -> str:
        """Return the page as notebooks show it, with a chart if there is one."""
        return card(self.title, *self.sections, chart=chart)

    def _repr_html_(self) -> str:
        return self.as_card()

    def as_html(self) -> str:
        """Return the page as one self-contained HTML file."""
        body = [f"<h1>{html.escape(self.title)}</h1>", *map(section, self.sections)]
        return (
            "<!doctype html><html lang=en><head><meta charset=utf-8>"
            '<meta name=viewport content="width=device-width,initial-scale=1">'
            f"<title>{html.escape(self.title)}</title><style>{_STYLE}</style></head>"
            f"<body><main>{''.join(body)}</main></body></html>"
        )


def _clean(text: str) -> str:
    return Quoted(collapse(text)) if isinstance(text, Quoted) else collapse(text)


def _bar(*texts: str) -> str:
    return "| " if any(isinstance(text, Quoted) for text in texts) else ""


# The colours of the dashboard and of the demo's report.
_STYLE = (
    ":root{color-scheme:light dark;--paper:#f6f7f9;--card:#fff;--ink:#1c2430;--line:#dde2e8}"
    "@media(prefers-color-scheme:dark){:root{--paper:#12161c;--card:#1a2029;--ink:#e6eaf0;"
    "--line:#2e3743}}body{font:16px/1.55 system-ui,sans-serif;color:var(--ink);background:"
    "var(--paper);max-width:50rem;margin:2rem auto;padding:0 1rem}main{background:var(--card);"
    "border:1px solid var(--line);border-radius:8px;padding:1rem 1.4rem 1.6rem}"
    "h1{font-size:1.6rem;line-height:1.25}h2{font-size:1.15rem;margin-top:2rem}"
    "table{border-collapse:collapse;width:100%}th,td{text-align:left;vertical-align:top;"
    "padding:.35rem .75rem .35rem 0;border-bottom:1px solid var(--line);overflow-wrap:anywhere}"
    "th{font-weight:600}blockquote{margin:1rem 0}blockquote,tr.quoted th{border-left:3px solid "
    "#888;padding-left:.75rem;overflow-wrap:anywhere}"
    "@media print{body{margin:0;background:none}main{border:0;padding:0}}"
)


def meaning(guarantee: Guarantee, *, against: str) -> list[str]:
    """Say what a guarantee means, without the word 'anonymous'."""
    if not guarantee.holds:
        return [f"There is no guarantee: {guarantee.void_reason}."]
    unit, relation = PROTECTED[guarantee.unit], RELATIONS[guarantee.neighbours]
    if math.isinf(guarantee.epsilon):
        return [f"No noise was added: {unit} has no protection against {against}."]
    # Rounded up, for these are bounds; beyond a million only the power of ten matters.
    factor = math.exp(min(guarantee.epsilon, 700.0)) * (1 + 2**-50)
    power = math.ceil(guarantee.epsilon / math.log(10))
    most = _rounded_up(factor) if factor < 1e6 else f"10 to the power {power:,}"
    odds = min(1.0, guarantee.best_guess * (1 + 2**-48))
    apart = f", up to a probability of {show_bound(guarantee.delta)}" if guarantee.delta > 0 else ""
    question = (
        f"whether {unit} was used"
        if guarantee.neighbours is Neighbours.ADD_REMOVE
        else f"which of two versions of {unit} was used"
    )
    sentences = [
        f"Anything that {against} could compute from it would be at most {most} times more likely, "
        f"or less likely{apart}, if {unit} were {relation}. This factor is e to the power "
        f"epsilon = {show_bound(guarantee.epsilon)}.",
        f"For example, someone who could only guess {question} would be right in 50 of 100 cases "
        f"without it, and in at most {math.ceil(1000 * odds) / 10:.1f} of 100 with its help.",
    ]
    if guarantee.delta > 0:
        sentences.append(
            f"With a probability of at most {show_bound(guarantee.delta)} this protection may fail "
            "entirely."
        )
    return sentences


def _rounded_up(value: float) -> str:
    """Return a number of at least 1 with three digits or more, never below its value."""
    places = max(0, 2 - math.floor(math.log10(value)))
    return f"{math.ceil(value * 10**places) / 10**places:.{places}f}"


def _guarantee_rows(guarantee: Guarantee, *, checked: bool) -> list[tuple[str, str]]:
    """Return what is guaranteed; only what a contribution assumes is checked without its study."""
    epsilon = "infinite" if math.isinf(guarantee.epsilon) else show_bound(guarantee.epsilon)
    return [
        ("epsilon", epsilon),
        ("delta", show_bound(guarantee.delta)),
        ("protects", UNITS[guarantee.unit]),
        ("neighbours", str(guarantee.neighbours)),
        *(
            ("assumes", each) if checked else ("assumes, as the signer states", Quoted(each))
            for each in guarantee.assumptions
        ),
    ]


def _size_row(size: int | None, learner: Any) -> tuple[str, str]:
    """Say which number the file states, in the learner's own words."""
    return "size", "not stated" if size is None else f"{size:,}: {learner.describe_size()}"


def _axes_rows(contribution: Contribution) -> list[tuple[str, str]]:
    """Say along which axes a model was trained, and what these cost."""
    learner = contribution.learner
    if learner.projection is None:
        return []
    rows = [("trained along", learner.projection.describe())]
    cost = learner.projection.cost(learner.epsilon, learner.delta)
    if cost is not None:
        delta = f", delta = {show_bound(cost[1])}" if cost[1] else ""
        said = f"epsilon = {show_bound(cost[0])}{delta} of what the file promises"
        rows.append(("cost of the axes", said))
    return rows


def _tuning_rows(contribution: Contribution) -> list[tuple[str, str]]:
    """Say which settings were chosen among which candidates, and what that cost."""
    learner = contribution.learner
    tuning = learner.tuning
    if tuning is None:
        return []
    best = tuning.candidates[learner.best_index_]
    return [
        ("chosen among", Quoted(tuning.describe_candidates())),
        ("chosen", Quoted(", ".join(f"{name} = {one}" for name, one in best.items()))),
        ("how it was chosen", tuning.describe()),
        ("cost of the choice", tuning.describe_cost()),
    ]


def of_contribution(contribution: Contribution) -> Page:
    """Return the certificate of a contribution."""
    facts = contribution.sealed.facts
    receipt = facts.get("receipt")
    entry = "none: exact, for a trusted hub"
    if contribution.is_masked:
        entry = "none: noise only"
    if receipt is not None:
        entry = f"{receipt['entry']}, with the hash {receipt['hash']}, as the site states"
    size = facts.get("size")
    tensors = ", ".join(f"{name} {tuple(form['shape'])}" for name, form in facts["tensors"].items())
    chosen = contribution.learner.describe_choices(facts["n_features"], size)
    contents = [
        ("learner", str(facts["learner"])),
        *([] if chosen is None else [("chosen by rule", chosen)]),
        *_axes_rows(contribution),
        *_tuning_rows(contribution),
        ("numbers", tensors),
        _size_row(size, contribution.learner),
        ("made", f"{facts['created']}, as the site states"),
        ("software", f"consilience {facts['software']}, as the site states"),
    ]
    checks = [
        ("study digest", _name(contribution.study["digest"])),
        ("file digest", contribution.digest),
        ("signed by key", contribution.sealed.key),
        ("number", str(contribution.sequence)),
        ("ledger entry", entry),
    ]
    return Page(
        f"Contribution of {quote(contribution.site, 100)} to {_name(contribution.study['name'])}",
        [
            *_promised(contribution),
            ("What is in it", [_HOLDS_MASKED if contribution.is_masked else _HOLDS], contents),
            (
                "How to check it",
                [
                    "The signature, the digests and the guarantee of this file were checked, and "
                    "all of them hold.",
                    "Anyone can repeat this offline with: consilience contribution verify FILE",
                ],
                checks,
            ),
        ],
    )


_HOLDS = (
    "A fitted learner and the facts below. It holds no record, and nothing else that was computed "
    "from records without noise, except where a row here says so."
)
_HOLDS_MASKED = (
    "A sum with a share of noise, under one pad for each pad holder, and the facts below. Nobody "
    "can read it alone; only the total of a batch can be opened."
)


def _promised(contribution: Contribution) -> list[Section]:
    """Say what a contribution promises; of a masked one, also if everybody else colludes."""
    if not contribution.has_records:
        return [("What it promises", ["It holds a share of noise, and no record."], [])]
    sections: list[Section] = [
        ("What it promises", meaning(contribution.guarantee, against=READERS), []),
        ("Guarantee", [], _guarantee_rows(contribution.guarantee, checked=True)),
    ]
    if contribution.alone is not None:
        said = (
            "If the hub and all keyholders work together, or the hub and all other sites, this "
            "site's own share of the noise is all that hides its records."
        )
        against = "everybody else, together,"
        sections.append(
            (
                "If everybody else colludes",
                [said, *meaning(contribution.alone, against=against)],
                _guarantee_rows(contribution.alone, checked=True),
            )
        )
    return sections


def of_release(release: Release) -> Page:
    """Return the certificate of a release."""
    facts = release.sealed.facts
    checks = [
        ("aggregator", _describe_aggregator(facts["aggregator"])),
        ("made", f"{facts['created']}, as the signer states"),
        ("software", f"consilience {facts['software']}, as the signer states"),
        ("study digest", _name(release.study["digest"])),
        ("file digest", release.digest),
        ("signed by key", release.sealed.key),
    ]
    return Page(
        f"Release {release.sequence} of {_name(release.study['name'])}",
        [
            ("What it promises", meaning(release.guarantee, against=READERS), []),
            ("Guarantee", [], _guarantee_rows(release.guarantee, checked=False)),
            (
                "Whose contributions it is made of, as the signer states",
                [
                    "A site's epsilon is to count everything that the site ever submitted to this "
                    "study, including contributions that were superseded or withdrawn: what was "
                    "handed out once cannot be taken back."
                ],
                _source_rows(release),
            ),
            *_quality_sections(facts["quality"], facts["aggregator"]),
            (
                "How to check it",
                ["Anyone can repeat the checks offline with: consilience release verify FILE"],
                checks,
            ),
        ],
    )


def _name(text: str) -> str:
    """Return a study's name or digest, in quotation marks if it has not the form of one."""
    return text if _NAME.fullmatch(text) else quote(text, 100)


_NAME = re.compile("[0-9a-z-]{1,64}")


def _describe_aggregator(facts: Mapping[str, Any]) -> str:
    """Return the aggregator's own description, or only its name where it is not known here."""
    settings = {name: value for name, value in facts.items() if name != "name"}
    try:
        words = AGGREGATORS[facts["name"]](**settings).describe()
    except (KeyError, TypeError, ValueError, ConsilienceError):
        return quote(facts["name"], 100)
    return f"{words.title}. {words.weighing}"


def _source_rows(release: Release) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for fact, source in zip(release.sealed.facts["sources"], release.sources, strict=True):
        promised = (
            "nothing against the hub"
            if math.isinf(source.guarantee.epsilon)
            else _short(source.guarantee)
        )
        reason = f" ({source.reason})" if source.reason else ""
        rows.append(
            (Quoted(source.site[:100]), f"weight {fact['weight']:.3f}{reason}; promised {promised}")
        )
    return rows


def _quality_sections(
    rows: Sequence[Mapping[str, Any]], aggregator: Mapping[str, Any]
) -> list[Section]:
    """Return what was measured and whether joining helped, by the rule of `evaluation.compare`."""
    if not rows:
        return []
    joining = compare_rows(rows)
    if joining is None:
        verdict = "The release was not compared with the alternatives record by record."
    else:
        verdict = (
            f"Compared record by record, joining {joining.answer}: the release's "
            f"{joining.measure.title} is {joining.comparison}."
        )
    said = [verdict]
    ranked = compare_rows(rows, AUC.name)
    if joining is not None and (caution := joining.caution(has_auc=ranked is not None)):
        said.append(caution)
        if ranked is not None:
            said.append(
                f"By AUC, joining {ranked.answer}: the release's AUC is {ranked.comparison}."
            )
    measured = [_measured_row(row, aggregator) for row in rows]
    return [(_MEASURED, said, measured)]


_MEASURED = "How good it is, as the signer states, on the study's public test records"


def _measured_row(row: Mapping[str, Any], aggregator: Mapping[str, Any]) -> tuple[str, str]:
    parts = []
    for metric in STATED:
        if metric.name in row:
            measure = row[metric.name]
            numbers = f"{measure['value']:.3f} ({measure['low']:.3f} to {measure['high']:.3f})"
            parts.append(f"{metric.title} {numbers}")
    method = str(row.get("method"))
    try:
        known = is_known_method(method, aggregator)
    except (TypeError, ValueError, ConsilienceError):  # settings of an aggregator not known here
        known = False
    return method if known else Quoted(method), ", ".join(parts)


def _short(guarantee: Guarantee) -> str:
    delta = f", delta = {show_bound(guarantee.delta)}" if guarantee.delta else ""
    return f"epsilon = {show_bound(guarantee.epsilon, 4)}{delta} per {guarantee.unit}"
