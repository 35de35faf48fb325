"""What a schema declares, and settings that cannot work."""

import json
import math
import time
import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consilience.errors import SettingsError
from consilience.tables.groups import cap_records, split_sites
from consilience.tables.reading import read_table
from consilience.tables.schema import Categorical, Numeric, Schema
from consilience.tables.values import spell, spell_all
from tabular import SCHEMA

BAD_SETTINGS = {
    "no bounds": (lambda: Numeric("age"), "low"),
    "one bound": (lambda: Numeric("age", low=0), "high"),
    "bounds as None": (lambda: Numeric("age", None, None), "low"),
    "bounds as text": (lambda: Numeric("age", "0", "1"), "low"),
    "NaN bound": (lambda: Numeric("age", 0, math.nan), "high"),
    "infinite bound": (lambda: Numeric("age", -math.inf, 0), "low"),
    "equal bounds": (lambda: Numeric("age", 1, 1), "high"),
    "bounds the wrong way round": (lambda: Numeric("age", 2, 1), "high"),
    "bounds that the transform merges": (
        lambda: Numeric("age", 1e300, 1.00000000000001e300, transform="log1p"),
        "high",
    ),
    "missing outside the bounds": (lambda: Numeric("age", 0, 1, missing=2), "missing"),
    "missing misspelt": (lambda: Numeric("age", 0, 1, missing="mean"), "missing"),
    "unknown transform": (lambda: Numeric("age", 0, 1, transform="root"), "transform"),
    "logarithm of zero": (lambda: Numeric("age", 0, 1, transform="log"), "positive"),
    "one bin": (lambda: Numeric("age", 0, 1, cuts=1), "cuts"),
    "too many bins": (lambda: Numeric("age", 0, 1, cuts=101), "cuts"),
    "no cuts": (lambda: Numeric("age", 0, 1, cuts=()), "cuts"),
    "cuts as a fraction": (lambda: Numeric("age", 0, 1, cuts=2.5), "cuts"),
    "cuts as a truth value": (lambda: Numeric("age", 0, 1, cuts=True), "cuts"),
    "cuts as text": (lambda: Numeric("age", 0, 1, cuts="0.5"), "cuts"),
    "cuts in no order": (lambda: Numeric("age", 0, 1, cuts=(0.5, 0.2)), "ascending"),
    "a cut at a bound": (lambda: Numeric("age", 0, 1, cuts=(0.5, 1)), "ascending"),
    "a cut that is no number": (lambda: Numeric("age", 0, 1, cuts=(0.5, "x")), "ascending"),
    "bins within rounding": (lambda: Numeric("age", 1, 1 + 1e-14, cuts=50), "fewer"),
    "no categories": (lambda: Categorical("sex"), "categories"),
    "categories twice": (lambda: Categorical("sex", (1, "1.0")), "categories"),
    "categories as one text": (lambda: Categorical("sex", "fm"), "categories"),
    "blank category": (lambda: Categorical("sex", ("f", " ")), "declare"),
    "categorical missing": (lambda: Categorical("sex", ("f",), missing="middle"), "missing"),
    "categorical unseen": (lambda: Categorical("sex", ("f",), unseen="drop"), "unseen"),
    "no columns": (lambda: Schema([], "y", classes=(0, 1)), "columns"),
    "columns twice": (
        lambda: Schema([Numeric("a", 0, 1), Numeric("a", 0, 2)], "y", classes=(0, 1)),
        "columns",
    ),
    "label among columns": (lambda: Schema([Numeric("y", 0, 1)], "y", classes=(0, 1)), "label"),
    "nameless column": (lambda: Schema([Numeric("", 0, 1)], "y", classes=(0, 1)), "name"),
    "one class": (lambda: Schema([Numeric("a", 0, 1)], "y", classes=("only",)), "classes"),
    "classes twice": (lambda: Schema([Numeric("a", 0, 1)], "y", classes=(1, "1")), "classes"),
    "no classes and no bound": (lambda: Schema([Numeric("a", 0, 1)], "y"), "classes"),
    "classes and bound": (
        lambda: Schema([Numeric("a", 0, 1)], "y", classes=(0, 1), label_bound=1),
        "label_bound",
    ),
    "bound of zero": (lambda: Schema([Numeric("a", 0, 1)], "y", label_bound=0), "label_bound"),
    "unknown class undeclared": (
        lambda: Schema([Numeric("a", 0, 1)], "y", classes=(0, 1), unknown_label=2),
        "unknown",
    ),
    "unknown label too big": (
        lambda: Schema([Numeric("a", 0, 1)], "y", label_bound=1, unknown_label=2),
        "unknown",
    ),
    "person without limit": (
        lambda: Schema([Numeric("a", 0, 1)], "y", classes=(0, 1), person="p"),
        "max_records",
    ),
    "limit without person": (
        lambda: Schema([Numeric("a", 0, 1)], "y", classes=(0, 1), max_records_per_person=1),
        "person",
    ),
    "norm of zero": (lambda: Schema([Numeric("a", 0, 1)], "y", classes=(0, 1), norm=0), "norm"),
    "norm without end": (
        lambda: Schema([Numeric("a", 0, 1)], "y", classes=(0, 1), norm=math.inf),
        "norm",
    ),
    "unknown scale": (
        lambda: Schema([Numeric("a", 0, 1)], "y", classes=(0, 1), scale="z-score"),
        "scale",
    ),
    "unknown key": (lambda: Schema.from_dict(SCHEMA.to_dict() | {"lable": "y"}), "lable"),
    "absent key": (
        lambda: Schema.from_dict(
            {"columns": [{"kind": "numeric", "name": "a", "low": 0, "high": 1}]}
        ),
        "label",
    ),
    "unknown kind": (
        lambda: Schema.from_dict({"columns": [{"kind": "date", "name": "a"}], "label": "y"}),
        "kind",
    ),
    "column without bounds": (
        lambda: Schema.from_dict({"columns": [{"kind": "numeric", "name": "a"}]}),
        "low",
    ),
    "limit of zero": (lambda: cap_records([1], 0, [0.5]), "limit"),
    "too few draws": (lambda: cap_records([1, 2], 1, [0.5]), "priority"),
    "draws not numbers": (lambda: cap_records([1], 1, [math.nan]), "priority"),
    "no draws": (lambda: split_sites(3, 2), "priority"),
    "no sites": (lambda: split_sites(3, 0, [0.1, 0.2, 0.3]), "sites"),
    "too few site ids": (lambda: split_sites(3, ["a", "b"]), "sites"),
    "not a table": (lambda: read_table(3), "int"),
    "no such file": (lambda: read_table("nowhere/to/be/found.csv"), "found.csv"),
}


@pytest.mark.parametrize(("call", "named"), BAD_SETTINGS.values(), ids=BAD_SETTINGS)
def test_a_wrong_setting_is_refused_by_name(call, named):
    with pytest.raises(SettingsError) as caught:
        call()
    message = str(caught.value)
    assert named in message
    assert "No record was read." in message


def test_missing_bounds_say_what_to_write_and_why_they_are_not_read_off_the_data():
    with pytest.raises(
        SettingsError, match=r"Numeric\('age', low=\.\.\., high=\.\.\.\).*would leak"
    ):
        Numeric("age")


names = st.text(min_size=1, max_size=6)
numerics = st.builds(
    lambda name, low, width, missing, transform: Numeric(
        name, low, low + width, missing, transform
    ),
    *(names, st.integers(-1000, 1000), st.integers(1, 1000)),
    *(st.sampled_from(["error", "middle", "indicator"]), st.sampled_from([None, "log1p"])),
)
texts = st.text("abcxyzäß é", min_size=1, max_size=5).map(str.strip).filter(bool)
categoricals = st.builds(
    Categorical, names, st.lists(texts, min_size=1, max_size=4, unique=True).map(tuple)
)
schemas = st.builds(
    lambda columns, classes, norm: Schema(columns, "the label itself", classes=classes, norm=norm),
    st.lists(numerics | categoricals, min_size=1, max_size=4, unique_by=lambda column: column.name),
    st.lists(texts | st.integers(-5, 5), min_size=2, max_size=4, unique_by=str),
    st.floats(0.1, 10),
)


@settings(deadline=None)
@given(schemas, st.randoms(use_true_random=False))
def test_a_schema_survives_plain_values_and_its_digest_ignores_their_order(schema, random):
    facts = json.loads(json.dumps(schema.to_dict()))
    shuffled = {key: facts[key] for key in random.sample(list(facts), len(facts))}
    shuffled["columns"] = [
        {key: c[key] for key in random.sample(list(c), len(c))} for c in facts["columns"]
    ]
    assert Schema.from_dict(shuffled) == schema
    assert Schema.from_dict(shuffled).digest == schema.digest


def test_a_schema_reads_from_toml_and_its_digest_is_fixed():
    facts = tomllib.loads("""
        label = "ill"
        classes = [0, 1]
        columns = [
          {kind = "numeric", name = "age", low = 0, high = 120, missing = "middle"},
          {kind = "categorical", name = "sex", categories = ["f", "m"]},
        ]
    """)
    schema = Schema.from_dict(facts)
    assert schema == Schema(
        [Numeric("age", -0.0, 120.0, "middle"), Categorical("sex", ["f", "m"])],
        "ill",
        classes=[0, 1],
    )
    # A changed digest orphans every contribution made under the old one: change it on purpose or
    # not at all.
    assert schema.digest == "fc02122b300f088e7108a60661513ca3851ab586608c1576d0513620db54a3f5"


def test_every_fact_is_in_the_digest():
    base = {
        "columns": [Numeric("a", 0, 1), Categorical("b", ("x", "y"))],
        "label": "y",
        "classes": (0, 1),
    }
    variants = [
        {},
        {"columns": base["columns"][:1]},
        {"columns": base["columns"][::-1]},
        {"columns": [Numeric("a", 0, 1, transform="log1p"), base["columns"][1]]},
        {"columns": [Numeric("a", 0, 1, missing=0.5), base["columns"][1]]},
        {"columns": [Numeric("a", 0, 1, missing_values=("?",)), base["columns"][1]]},
        {"columns": [base["columns"][0], Categorical("b", ("y", "x"))]},
        {"columns": [base["columns"][0], Categorical("b", ("x", "y"), unseen="ignore")]},
        *(
            {"label": "z"},
            {"classes": (1, 0)},
            {"classes": None, "label_bound": 1},
            {"unknown_label": 1},
        ),
        *(
            {"person": "p", "max_records_per_person": 2},
            {"person": "p", "max_records_per_person": 3},
        ),
        *({"norm": 0.5}, {"scale": "clip"}),
    ]
    digests = [Schema(**(base | variant)).digest for variant in variants]
    assert len(set(digests)) == len(variants)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.text(max_size=3) | st.integers(-9, 9) | st.sampled_from([1.0, 0.5, True, "1.0", ""])
    )
)
def test_values_are_spelled_together_as_they_are_one_by_one(values):
    def outcome(spell_values):
        try:
            return spell_values()
        except SettingsError as problem:
            return str(problem)

    together = outcome(lambda: spell_all(values, "categories"))
    one_by_one = outcome(lambda: tuple(spell(value) for value in values))
    assert together == one_by_one or "free of repetition" in together


def test_a_schema_is_declared_in_time_that_grows_with_its_length():
    began = time.process_time()
    names = [f"category {i}" for i in range(60_000)]
    columns = [Numeric(f"b{i}", 0, 1) for i in range(20_000)]
    Schema([Categorical("a", names), *columns], label="y", classes=["no", "yes"])
    assert time.process_time() - began < 3.0
