"""Summary: counts and sums by column and class, and what a table says of them."""

import csv
import io
import math

import numpy as np
import pytest
from matplotlib.figure import Figure

from consilience import Categorical, Noise, Numeric, Schema
from consilience.aggregators.base import ENSEMBLES
from consilience.errors import ContributionRejected, SettingsError
from consilience.evaluation.table_one import ALL, TableOne, compare
from consilience.statistics.summary import NumberSummary, Summary
from consilience.statistics.total import Total
from sums import DELTA

COLUMNS = [
    Numeric("age", 0, 100),
    Numeric("pressure", 50, 250, missing="indicator"),
    Numeric("crp", 0.1, 500, transform="log"),
    Categorical("ward", ("a", "b", "c"), missing="indicator", unseen="ignore"),
    Numeric("bmi", 10, 60, cuts=(20, 25, 30), missing="indicator"),
]
SCHEMA = Schema(COLUMNS, "ill", classes=("no", "yes"))
NUMBERS = Schema(COLUMNS, "days", label_bound=30.0)


def people(n, seed=0, older=0.0):
    draw = np.random.default_rng(seed)
    age = np.clip(draw.normal(55 + older, 15, n), 0, 100)
    pressure = draw.normal(140, 20, n)
    pressure[draw.random(n) < 0.1] = math.nan
    bmi = np.clip(draw.normal(27, 5, n), 10, 60)
    bmi[draw.random(n) < 0.2] = math.nan
    return {
        "age": age,
        "pressure": pressure,
        "crp": np.exp(draw.normal(2, 1, n)).clip(0.1, 500),
        "ward": np.array(["a", "b", "c", "elsewhere", None], object)[draw.integers(0, 5, n)],
        "bmi": bmi,
        "ill": np.where(draw.random(n) < 0.3 + 0.006 * (age - 50), "yes", "no"),
        "days": np.clip(draw.normal(8, 5, n), -30, 30),
    }


def summary(table, epsilon=math.inf, seed=0, schema=SCHEMA, **more):
    kind = Summary if schema.classes else NumberSummary
    delta = 0.0 if math.isinf(epsilon) else DELTA
    learner = kind(epsilon=epsilon, delta=delta, schema=schema, noise=Noise(seed=seed), **more)
    kept = [*(column.name for column in schema.columns), schema.label]
    return learner.fit({name: table[name] for name in kept})


def found(members, schema=SCHEMA):
    """Return all measures of the total by column, what and group."""
    table = TableOne.of(Total().combine(members), schema)
    return {
        (row.column, row.what, group): one
        for row in table.rows
        for group, one in zip(table.groups, row.measures, strict=True)
    }


def truths(table):
    """Return what the table would say of all records, computed without any of its code."""
    told = {}
    for group in ("no", "yes", ALL):
        of = np.ones(len(table["age"]), bool) if group == ALL else table["ill"] == group
        told["", "records", group] = of.sum()
        for name, scale in (("age", 100), ("pressure", 200)):
            values = table[name][of & ~np.isnan(table[name])]
            told[name, "mean", group] = values.mean()
            told[name, "standard deviation", group] = values.std()
            assert scale > values.std()
            for what, share in (("1st quartile", 0.25), ("median", 0.5), ("3rd quartile", 0.75)):
                told[name, what, group] = np.quantile(values, share, method="inverted_cdf")
        told["pressure", "missing", group] = np.isnan(table["pressure"][of]).mean()
        told["crp", "geometric mean", group] = np.exp(np.log(table["crp"][of]).mean())
        told["crp", "geometric standard deviation", group] = np.exp(np.log(table["crp"][of]).std())
        ward = table["ward"][of]
        known = np.isin(ward, ["a", "b", "c"])
        told["ward", "missing", group] = 1 - known.mean()
        told["ward", "b", group] = (ward[known] == "b").mean()
        bmi = table["bmi"][of]
        told["bmi", "missing", group] = np.isnan(bmi).mean()
        told["bmi", "20 to below 25", group] = ((bmi >= 20) & (bmi < 25)).sum() / (
            ~np.isnan(bmi)
        ).sum()
    return told


def test_without_noise_the_table_is_that_of_the_pooled_records():
    tables = [people(400, seed) for seed in range(3)]
    pooled = {name: np.concatenate([each[name] for each in tables]) for name in tables[0]}
    table = found([summary(each) for each in tables])
    for key, truth in truths(pooled).items():
        one = table[key]
        if "quartile" in key[1] or key[1] == "median":  # known up to its bin
            assert one.low <= truth <= one.high, key
            assert one.high - one.low <= 200 / 16 + 1e-9
        else:
            assert one.value == pytest.approx(truth, rel=1e-4), key
            assert one.high - one.low < 1e-3 * max(abs(truth), 1), key


@pytest.mark.parametrize("neighbours", ["replace-one", "add-remove"])
@pytest.mark.statistical
def test_intervals_cover_the_exact_numbers_as_often_as_they_say(neighbours):
    """95 % intervals of 100 totals; of 100 fewer than 81 hits have a chance below 1e-8 each."""
    tables = [people(500, seed) for seed in range(3)]
    pooled = {name: np.concatenate([each[name] for each in tables]) for name in tables[0]}
    told, hits = truths(pooled), dict.fromkeys(truths(pooled), 0)
    exact = [summary(each) for each in tables]
    noisy = summary(tables[0], 2.0, neighbours=neighbours)
    sigma = np.sqrt(noisy.noise_variance()) / noisy.grain
    draw = np.random.default_rng(1)
    size = None if neighbours == "add-remove" else 500
    for _ in range(100):
        members = []
        for one in exact:  # the noise of the plan, without fitting anew
            noise = draw.normal(size=one.length) * sigma
            member = summary(tables[0], 2.0, neighbours=neighbours) if not members else members[0]
            member = _with_total(member, one.total_ + np.rint(noise).astype(np.int64), size)
            members.append(member)
        table = found(members)
        for key, truth in told.items():
            slack = 1e-4 * abs(truth)
            hits[key] += table[key].low - slack <= truth <= table[key].high + slack
    assert min(hits.values()) >= 81, {key: n for key, n in hits.items() if n < 81}
    assert np.mean(list(hits.values())) < 99.7  # and intervals are not far too wide


def _with_total(member, total, size):
    made = Summary(**member.get_params())
    vars(made).update(vars(member))
    made.restore_state({"total": total})
    if size is not None:
        made.public_size_ = size
    return made


def test_a_number_as_label_is_one_more_column():
    table = people(800, 3)
    numbers = found([summary(table, schema=NUMBERS)], NUMBERS)
    assert numbers["days", "mean", ALL].value == pytest.approx(table["days"].mean(), rel=1e-3)
    assert numbers["age", "mean", ALL].value == pytest.approx(table["age"].mean(), rel=1e-3)
    model = Total().combine([summary(table, schema=NUMBERS)])
    X = NUMBERS.encode_features(table)
    assert model.predict(X) == pytest.approx(np.full(800, table["days"].mean()), rel=1e-3)


def test_where_all_is_noise_intervals_are_everything():
    table = found([summary(people(20), 0.01, seed=4)])
    age = table["age", "mean", "yes"]
    assert (age.low, age.high) == (0, 100)
    ward = table["ward", "a", "yes"]
    assert (ward.low, ward.high) == (0, 1)
    assert all(math.isfinite(one.value) for one in table.values())
    assert all(one.low <= one.value <= one.high for one in table.values())


def test_every_record_counts_alike_whatever_the_noise_of_its_site():
    few, many = summary(people(500, 1), 0.1), summary(people(500, 2), 3.0)
    joined = Total().combine([few, many])
    assert joined.weights == pytest.approx([0.5, 0.5])
    assert joined.size == 1000
    total = Total()
    total.max_weight = 0.4
    assert "max_weight" in total.problem_with(Summary, {})


def test_as_a_model_it_answers_what_is_most_frequent():
    model = Total().combine([summary(people(500, 1))])
    X = SCHEMA.encode_features(people(30, 2))
    assert set(model.predict(X)) == {"no"}
    shares = model.predict_proba(X)
    assert shares[0] == pytest.approx([(people(500, 1)["ill"] == "no").mean(), shares[0, 1]])


def test_text_html_and_csv_say_the_same_and_each_column_is_drawn():
    made = TableOne.of(Total().combine([summary(people(500), 1.0)]), SCHEMA, title="First <table>")
    text, page, rows = made.as_text(), made.as_html(), list(csv.reader(io.StringIO(made.as_csv())))
    for word in ("age", "median", "geometric mean", "missing", "20 to below 25", ALL):
        assert word in text
        assert word in page
    assert "First &lt;table&gt;" in page
    assert rows[0] == ["column", "what", "group", "value", "low", "high"]
    assert len(rows) == 1 + 3 * len(made.rows)
    titles = [axes.get_title() for axes in made.plot(ax=Figure())]
    assert titles == ["age", "pressure", "crp", "ward", "bmi"]


@pytest.mark.statistical
def test_a_site_is_told_of_differences_and_of_none_where_there_are_none():
    """Of 60 alike sites 1 % are told of any, at a probability below 1e-6 more than seven."""
    alarms = 0
    for seed in range(60):
        first, other = people(300, 2 * seed), people(300, 2 * seed + 1)
        total = Total().combine([summary(first, 1.0, seed), summary(other, 1.0, seed + 1000)])
        own = summary(first)
        found = compare(own.finish(own.summed()), total, SCHEMA)
        assert found.n_compared > 60
        alarms += bool(found.differences)
    assert alarms <= 7
    odd = people(1500, 1, older=12)
    members = [summary(people(1500, seed), 2.0, seed) for seed in range(2, 6)]
    own = summary(odd)
    total = Total().combine([*members, summary(odd, 2.0, 9)])
    differences = compare(own.finish(own.summed()), total, SCHEMA).differences
    means = {(each.column, each.group) for each in differences if each.what == "mean"}
    assert ("age", ALL) in means
    assert {each.column for each in differences} <= {"age", "records"}
    (mean,) = [each for each in differences if each.what == "mean" and each.group == ALL]
    assert mean.own == pytest.approx(odd["age"].mean(), rel=1e-3)
    assert "here" in mean.row[1]


def test_a_schema_that_shortens_records_is_refused():
    short = Schema(COLUMNS, "ill", classes=("no", "yes"), scale="clip")
    with pytest.raises(SettingsError, match="shortens"):
        summary(people(10), schema=short)
    wide = Schema(COLUMNS, "ill", classes=("no", "yes"), scale="clip", norm=3.0)
    table = people(300)
    one = found([summary(table, schema=wide)], wide)["age", "mean", ALL]
    assert one.value == pytest.approx(table["age"].mean(), rel=1e-3)


@pytest.mark.parametrize(
    "columns",
    [
        None,
        [],
        [[[], [], []]],
        [[[[0, 1.0]], [0], []]],
        [[[[0, 1.0]], [0, math.inf], []]],
        [[[[0, 1.0]], [], [2]]],
        [[[[0, 1.0]], [], [0, 0]]],
        [[[[0, 1.0]], [0.5, 1.0], []]],
        "abc",
    ],
)
def test_columns_that_are_none_are_refused(columns):
    with pytest.raises(SettingsError, match="columns"):
        Summary(epsilon=1.0, delta=DELTA, classes=[0, 1], columns=columns).fit([[0.0], [1]], [0, 1])


@pytest.mark.parametrize("schema", [SCHEMA, NUMBERS])
def test_a_released_summary_comes_back_and_a_forged_one_does_not(schema):
    made = Total().combine([summary(people(300), 1.0, schema=schema)])
    facts, tensors = made.to_parts(None)
    facts["classes"] = None if made.classes is None else made.classes.tolist()
    kind = ENSEMBLES["summary"]
    again = kind.from_parts(facts, tensors, made.guarantee, made.weights, None)
    assert TableOne.of(again, schema).as_csv() == TableOne.of(made, schema).as_csv()
    for changed, numbers in (
        ({"columns": facts["columns"][:-1]}, tensors),
        ({"columns": [[[[99, 0.0]], [], []]]}, tensors),
        ({}, {**tensors, "values": tensors["values"][:-1]}),
        ({}, {**tensors, "variance": -tensors["variance"]}),
        ({}, {**tensors, "size": np.zeros(1)}),
        ({}, {**tensors, "more": tensors["size"]}),
    ):
        with pytest.raises(ContributionRejected):
            kind.from_parts({**facts, **changed}, numbers, made.guarantee, made.weights, None)
    with pytest.raises(SettingsError, match="no summary"):
        TableOne.of(object(), schema)
