"""A study in words: what it demands and promises, and the request that a data officer approves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from consilience.files.certificate import RELATIONS, UNITS, Page, meaning
from consilience.privacy.guarantee import Guarantee, Neighbours, Unit
from consilience.study.study import Study


def of_study(study: Study) -> Page:
    """Return a study in words."""
    low, high = study.epsilon_range
    columns = [(column.name, column._expects) for column in study.schema.columns]
    trust = (
        "Sites hand the hub exact learners: nothing is promised against the hub. What it "
        "publishes hides whole sites."
        if study.trusted
        else "The hub is not trusted: what a site hands over is private before it leaves the site."
    )
    label = study.schema.classes
    return Page(
        f"Study {study.name}",
        [
            ("Purpose", [study.purpose or "Not stated."], []),
            (
                "Privacy",
                [trust],
                [
                    *(
                        [("protects, by the release", UNITS[Unit.SITE])]
                        if study.trusted
                        else [
                            ("epsilon of a site", f"from {low:g} to {high:g}, chosen by the site"),
                            ("delta", f"{study.delta:g}"),
                            (
                                "protects",
                                UNITS[Unit.RECORD if study.schema.person is None else Unit.PERSON],
                            ),
                            (
                                "neighbours",
                                f"{study.neighbours}: {RELATIONS[Neighbours(study.neighbours)]}",
                            ),
                        ]
                    ),
                    ("sites needed", str(study.min_sites)),
                ],
            ),
            (
                "What is learned",
                [],
                [
                    (
                        "label",
                        f"{study.schema.label}: "
                        f"{', '.join(map(str, label)) if label else 'a number'}",
                    ),
                    ("learner", _with(study.learner, study.learner_settings)),
                    ("aggregator", _with(study.aggregator, study.aggregator_settings)),
                ],
            ),
            ("Columns that are read", [], columns),
            ("Digest", [], [("sha256", study.digest)]),
        ],
    )


def _with(name: str, settings: Mapping[str, Any]) -> str:
    said = ", ".join(f"{setting} = {value}" for setting, value in settings.items())
    return f"{name} with {said}" if said else name


def of_training(
    study: Study, *, site: str, dataset: str, epsilon: float, facts: dict[str, Any]
) -> Page:
    """Return the page that a data officer files before a training is approved."""
    who = "the hub, and whoever sees what it publishes" if not study.trusted else "the hub"
    unit = Unit.RECORD if study.schema.person is None else Unit.PERSON
    promise = Guarantee(
        epsilon=math.inf if study.trusted else epsilon,
        delta=0.0 if study.trusted else study.delta,
        unit=unit,
        neighbours=Neighbours(study.neighbours),
    )
    cost = [
        ("charged to", f"data set {dataset!r} of this site's ledger, before anything is computed")
    ]
    if not study.trusted:
        cost += [
            ("left before", facts["left_before"]),
            ("this training", facts["cost"]),
            ("left after", facts["left_after"]),
        ]
    leaves = [("learner", study.learner), ("numbers", facts["numbers"])]
    size = "not stated" if study.neighbours == "add-remove" else "their exact number is in the file"
    leaves += [
        ("number of records", size),
        ("names", f"the site's name ({site}), the data set's name, the key"),
    ]
    plain = "In plain words: the hub will see this site's exact model. It is trusted not to try to learn from it about "
    return Page(
        f"Request to train for study {study.name} at {site}",
        [
            (
                "What is asked",
                [study.purpose or "The study states no purpose."],
                [("study digest", study.digest)],
            ),
            ("What will leave this site", ["One signed file, and nothing else:"], leaves),
            (
                "What will not leave",
                [
                    "Records, counts, errors, logs. Nothing is sent before someone runs 'site "
                    "submit'."
                ],
                [],
            ),
            (
                "What is promised",
                [
                    *meaning(promise, against=who),
                    *([plain + "anyone's records."] if study.trusted else []),
                ],
                [],
            ),
            ("What it costs", [], cost),
            (
                "Approval",
                ["Approved by: ______________________________   Date: ______________"],
                [("software", f"consilience {facts['software']}")],
            ),
        ],
    )
