"""What notebooks show: escaped, without scripts, and without a warning."""

import inspect
import math
import re
import warnings
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from sklearn.pipeline import make_pipeline

import consilience as cs
from consilience.aggregators.pooling import PooledCounts, PrivateLeafCounts, Structure
from consilience.aggregators.registry import ENSEMBLES
from consilience.display.html import MOST_BARS, bars, card
from consilience.learners.registry import LEARNERS
from consilience.tables.transformer import SchemaTransformer
from consilience.text import Quoted

FIXTURES = Path(__file__).parents[1] / "fixtures" / "version-0.1"
SCHEMA = cs.Schema([cs.Numeric("age", 0, 100)], "ill", classes=("no", "<b>yes</b>"))
TABLE = {"age": [15.0, 35.0, 65.0, 85.0] * 250, "ill": ["no", "no", "<b>yes</b>", "no"] * 250}


def shown(found):
    """Return what a notebook shows, with every warning an error, checked for safety."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        page = found._repr_html_()
    assert "<script" not in page
    assert not re.search(r"\son\w+=|javascript:|https?://|url\(", page)
    assert "<b>" not in page
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(svg)
        assert not re.search("#[0-9a-f]{3}", svg)  # the colours are the page's own
    return page


def members(kind=cs.PrivateLogisticRegression, **settings):
    made = [kind(epsilon=1.0, schema=SCHEMA, **settings).fit(TABLE) for _ in range(2)]
    return made


def test_a_card_escapes_everything_and_sets_off_the_words_of_others():
    page = card("<i>", ("<u>", ["<p>", Quoted("<q>")], [("<a>", "<b>"), (Quoted("c"), "d")]))
    assert not re.search("<(i|u|q|a|b)>", page)
    assert "<blockquote>&lt;q&gt;</blockquote>" in page
    assert page.count("class=quoted") == 1


def test_bars_are_as_long_as_their_numbers_and_the_largest_are_drawn():
    chart = bars([("a", 2.0), ("<b>", -1.0), ("c", math.nan)], "Two & two")
    root = ElementTree.fromstring(chart[chart.index("<svg") :])
    widths = [float(one.get("width")[:-1]) for one in root.iter("rect")]
    assert widths == pytest.approx([36.0, 18.0])
    assert "Two &amp; two" in chart
    assert f"the {MOST_BARS} largest of 40" in bars([(str(i), i) for i in range(40)], "many")
    assert bars([], "none") == ""


def test_a_guarantee_shows_what_can_be_guessed_and_what_it_assumes():
    stated = cs.Guarantee(
        epsilon=1.0, delta=0.0, unit="person", neighbours="replace-one", assumptions=("<b>x</b>",)
    )
    page = shown(stated)
    assert "one person" in page
    assert "&lt;b&gt;x&lt;/b&gt;" in page
    assert "73.1" in page
    assert stated.best_guess == pytest.approx(math.e / (1 + math.e))
    assert "seeded" in shown(
        cs.Guarantee.void("seeded noise", unit="record", neighbours="replace-one")
    )
    shown(cs.Guarantee(epsilon=math.inf, delta=0.0, unit="record", neighbours="replace-one"))


def test_a_ledger_shows_what_is_spent_of_each_data_set(tmp_path):
    ledger = cs.Ledger(tmp_path / "books.ledger")
    assert repr(ledger) == f"Ledger({str(tmp_path / 'books.ledger')!r})"
    assert "No data set" in shown(ledger)
    ledger.allow("ward <b>", cs.Budget(epsilon=4.0))
    ledger.allow("other", cs.Budget(rho=0.5))
    cs.PrivateLogisticRegression(epsilon=1.0, schema=SCHEMA).fit(
        TABLE, ledger=ledger, dataset="ward <b>"
    )
    page = shown(ledger)
    assert "epsilon 4" in page
    assert "epsilon 3" in page
    assert ">25<" in page
    assert ledger.balance("ward <b>").share_spent == pytest.approx(0.25)


@pytest.mark.parametrize("kind", LEARNERS.values())
def test_no_learner_warns_when_it_is_shown(kind):
    needed = [
        name
        for name, one in inspect.signature(kind).parameters.items()
        if one.default is inspect.Parameter.empty
    ]
    learner = kind(**dict.fromkeys(needed, 1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kind.__name__ in learner._repr_html_()


def test_a_pipeline_and_a_fitted_learner_are_shown_without_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps = make_pipeline(
            SchemaTransformer(SCHEMA), cs.PublicPCA(1), cs.PrivateLinearSVC(epsilon=1)
        )
        assert "PrivateLinearSVC" in steps._repr_html_()
        members()[0]._repr_html_()


def test_files_are_shown_as_their_certificates():
    for kind, name in ((cs.Contribution, "contributions"), (cs.Release, "releases")):
        file = sorted((FIXTURES / name).rglob("*.safetensors"))[0]
        found = kind.load(file)
        page = shown(found)
        assert "What it promises" in page
        assert found.digest in page
        assert repr(found).startswith(f"{kind.__name__}(")
        assert len(repr(found)) < 300
    assert "Weight of each site" in page


def test_every_kind_of_ensemble_is_shown():
    made = [
        cs.Average().combine(members()),
        cs.WeightedVote("equal").combine(members()),
        cs.Total().combine(members(cs.LabelTables, delta=1e-6)),
        cs.Total().combine(members(cs.Summary, delta=1e-6)),
    ]
    start = cs.start_from((SCHEMA.encode_features(TABLE), np.array(TABLE["ill"])))
    made.append(cs.Total().combine(members(cs.Score, delta=1e-6, model=start)))
    structure = Structure.random(
        cs.Bins.of(SCHEMA), list(SCHEMA.classes), n_trees=3, max_depth=2, random_state=0
    )
    X = SCHEMA.encode_features(TABLE)
    counts = [
        PrivateLeafCounts(epsilon=1.0, structure=structure).fit(X, TABLE["ill"]) for _ in range(2)
    ]
    made.append(PooledCounts().combine(counts))
    assert {one.kind for one in made} >= {
        name for name, kind in ENSEMBLES.items() if kind.__module__.startswith("consilience.")
    }
    for one in made:
        page = shown(one)
        assert "&lt;b&gt;yes" in page
        assert "Weight of each member" in page
