"""What a file promises, in words that a lawyer or a data officer can read: text and HTML from the same sentences.

Everything on the page is recomputed from the file; nothing is copied from a claim that was not
checked.
"""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from consilience.files.contribution import Contribution
from consilience.files.release import Release
from consilience.privacy.guarantee import Guarantee, Neighbours, Unit

UNITS = {
    Unit.RECORD: "one record",
    Unit.PERSON: "one person, with all records of that person that were used",
    Unit.SITE: "one whole site, with all its records",
}
RELATIONS = {
    Neighbours.REPLACE_ONE: "replaced by any other (how many there are is not hidden)",
    Neighbours.ADD_REMOVE: "there or not (how many there are is hidden too)",
    Neighbours.NULL_ONE: "there or replaced by an empty one",
}


@dataclass(frozen=True)
class Page:
    """A title and sections, each of paragraphs and rows of (name, value)."""

    title: str
    sections: Sequence[tuple[str, Sequence[str], Sequence[tuple[str, str]]]]

    def as_text(self, width: int = 88) -> str:
        """Return the page for a terminal or an e-mail."""
        return "\n".join(self._lines(width)).rstrip() + "\n"

    def _lines(self, width: int) -> Iterator[str]:
        yield self.title
        yield "=" * len(self.title)
        for heading, paragraphs, rows in self.sections:
            yield f"\n{heading}\n{'-' * len(heading)}"
            for paragraph in paragraphs:
                yield textwrap.fill(paragraph, width) + "\n"
            longest = max((len(name) for name, _ in rows), default=0)
            for name, value in rows:
                indent = " " * (longest + 2)
                yield textwrap.fill(f"{name:<{longest}}  {value}", width, subsequent_indent=indent)

    def as_html(self) -> str:
        """Return the page as one self-contained HTML file."""
        body = [f"<h1>{html.escape(self.title)}</h1>"]
        for heading, paragraphs, rows in self.sections:
            body.append(f"<section><h2>{html.escape(heading)}</h2>")
            body += [f"<p>{html.escape(paragraph)}</p>" for paragraph in paragraphs]
            if rows:
                cells = (
                    f"<tr><th scope=row>{html.escape(a)}</th><td>{html.escape(b)}</td></tr>"
                    for a, b in rows
                )
                body.append(f"<table>{''.join(cells)}</table>")
            body.append("</section>")
        return (
            "<!doctype html><html lang=en><head><meta charset=utf-8>"
            '<meta name=viewport content="width=device-width,initial-scale=1">'
            f"<title>{html.escape(self.title)}</title><style>{_STYLE}</style></head><body>{''.join(body)}</body></html>"
        )


_STYLE = (
    ":root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;max-width:46rem;"
    "margin:2rem auto;padding:0 1rem}h1{font-size:1.5rem}h2{font-size:1.1rem;margin-top:2rem}"
    "table{border-collapse:collapse;width:100%}th,td{text-align:left;vertical-align:top;"
    "padding:.35rem .75rem .35rem 0;border-bottom:1px solid #8884;overflow-wrap:anywhere}th{"
    "font-weight:600;white-space:nowrap}@media print{body{margin:0}}"
)


def meaning(guarantee: Guarantee, *, against: str) -> list[str]:
    """Say what a guarantee means, without the word 'anonymous'."""
    if not guarantee.holds:
        return [f"There is no guarantee: {guarantee.void_reason}."]
    unit, relation = UNITS[guarantee.unit], RELATIONS[guarantee.neighbours]
    if math.isinf(guarantee.epsilon):
        return [f"No noise was added: nothing is promised to {unit} against {against}."]
    factor = math.exp(min(guarantee.epsilon, 700.0))
    most = f"{factor:.3g}" if factor < 1e6 else f"{factor:.1e}"
    sentences = [
        f"Whatever {against} may compute from it, its probability changes by a factor of at most "
        f"{most} (e to the power epsilon = {guarantee.epsilon:.6g}) if {unit} is {relation}."
    ]
    # A bet that is even beforehand: what the file can do to it.
    odds = factor / (1 + factor)
    bet = (
        f"whether {unit} was used"
        if guarantee.neighbours is Neighbours.ADD_REMOVE
        else "which of two it was"
    )
    sentences.append(
        f"For example, someone who would guess rightly in 50 of 100 cases {bet}, could with its "
        f"help guess rightly in at most {100 * odds:.1f} of 100."
    )
    if guarantee.delta > 0:
        sentences.append(
            "This may fail, in a way that is not bounded, with a probability of at most "
            f"{guarantee.delta:g}."
        )
    return sentences


def _guarantee_rows(guarantee: Guarantee) -> list[tuple[str, str]]:
    epsilon = "infinite" if math.isinf(guarantee.epsilon) else f"{guarantee.epsilon:.6g}"
    rows = [
        ("epsilon", epsilon),
        ("delta", f"{guarantee.delta:g}"),
        ("protects", UNITS[guarantee.unit]),
    ]
    rows.append(("neighbours", str(guarantee.neighbours)))
    return rows + [("assumes", assumption) for assumption in guarantee.assumptions]


def of_contribution(contribution: Contribution) -> Page:
    """Return the certificate of a contribution."""
    facts = contribution.sealed.facts
    receipt = facts.get("receipt") or {}
    tensors = ", ".join(f"{name} {tuple(form['shape'])}" for name, form in facts["tensors"].items())
    holds = "This file was read, its signature, its digests and its guarantee were checked, and all of them hold."
    return Page(
        f"Contribution of {contribution.site} to {contribution.study['name']}",
        [
            (
                "What it promises",
                meaning(contribution.guarantee, against="anyone who sees this file"),
                [],
            ),
            ("Guarantee", [], _guarantee_rows(contribution.guarantee)),
            (
                "What is in it",
                [
                    "A fitted learner and the facts below. No record, and nothing else that was "
                    "computed from records without noise, except where a row here says so."
                ],
                [
                    ("learner", str(facts["learner"])),
                    ("numbers", tensors),
                    (
                        "records",
                        "not stated"
                        if facts.get("size") is None
                        else f"{facts['size']:,} (public by the study)",
                    ),
                    ("made", str(facts["created"])),
                    ("software", f"consilience {facts['software']}"),
                ],
            ),
            (
                "How to check it",
                [
                    holds,
                    "Anyone can repeat this offline with: consilience contribution verify FILE",
                ],
                [
                    ("study digest", contribution.study["digest"]),
                    ("file digest", contribution.digest),
                    ("signed by key", contribution.sealed.key),
                    ("number", str(contribution.sequence)),
                    ("ledger entry", str(receipt.get("entry", "none: exact, for a trusted hub"))),
                    ("ledger hash", str(receipt.get("hash", "none"))),
                ],
            ),
        ],
    )


def of_release(release: Release) -> Page:
    """Return the certificate of a release."""
    facts = release.sealed.facts
    sites = []
    for row, source in zip(facts["sources"], release.sources, strict=True):
        promised = (
            "nothing against the hub"
            if math.isinf(source.guarantee.epsilon)
            else _short(source.guarantee)
        )
        reason = f" ({row['reason']})" if row["reason"] else ""
        sites.append(
            (source.site, f"weight {row['weight']:.3f}{reason}; in total promised {promised}")
        )
    whole = [
        "A site's number is the sum of everything the site ever submitted to this study, "
        "superseded and withdrawn contributions included: what was handed out once cannot be "
        "taken back."
    ]
    quality = [_measured(row) for row in facts["quality"]]
    return Page(
        f"Release {release.sequence} of {release.study['name']}",
        [
            (
                "What it promises",
                meaning(release.guarantee, against="anyone who sees this file"),
                [],
            ),
            ("Guarantee", [], _guarantee_rows(release.guarantee)),
            ("Whose contributions it is made of", whole, sites),
            *(
                [("How good it is, on the study's public test records", [], quality)]
                if quality
                else []
            ),
            (
                "How to check it",
                ["Anyone can repeat the checks offline with: consilience release verify FILE"],
                [
                    ("aggregator", str(facts["aggregator"]["name"])),
                    ("made", str(facts["created"])),
                    ("software", f"consilience {facts['software']}"),
                    ("study digest", release.study["digest"]),
                    ("file digest", release.digest),
                    ("signed by key", release.sealed.key),
                ],
            ),
        ],
    )


def _measured(row: Mapping[str, Any]) -> tuple[str, str]:
    """Return a row of a release's quality in words."""
    parts = []
    for name in ("error", "auc", "rmse", "r2"):
        found = row.get(name)
        if isinstance(found, Mapping) and {"value", "low", "high"} <= set(found):
            numbers = f"{found['value']:.3f} ({found['low']:.3f} to {found['high']:.3f})"
            parts.append(f"{name if name == 'error' else name.upper()} {numbers}")
    return str(row.get("method")), ", ".join(parts)


def _short(guarantee: Guarantee) -> str:
    delta = f", delta = {guarantee.delta:g}" if guarantee.delta else ""
    return f"epsilon = {guarantee.epsilon:.4g}{delta} per {guarantee.unit}"
