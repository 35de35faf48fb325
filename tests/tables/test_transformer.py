"""A schema as a step of a pipeline."""

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.pipeline import make_pipeline

from consilience import Noise, PrivateLogisticRegression
from consilience.errors import SchemaMismatch
from consilience.tables.schema import Categorical, Numeric, Schema

SCHEMA = Schema(
    [Numeric("age", 0, 100, cuts=5), Categorical("sex", ("f", "m"))], "ill", classes=("no", "yes")
)


def frame(n=4000):
    age = Noise(seed=1).open().uniform(n) * 100
    sex = np.where(np.arange(n) % 2, "f", "m")
    return pd.DataFrame(
        {"note": "x", "age": age, "sex": sex, "ill": np.where(age > 60, "yes", "no")}
    )


def test_a_pipeline_takes_a_frame_and_learns_a_step():
    table = frame()
    learner = PrivateLogisticRegression(epsilon=2.0, delta=1e-6, classes=SCHEMA.classes)
    pipeline = clone(make_pipeline(SCHEMA.transformer(), learner))
    pipeline.fit(table, table["ill"])
    assert pipeline.score(table, table["ill"]) > 0.9
    names = pipeline[:-1].get_feature_names_out().tolist()
    assert names == list(SCHEMA.feature_names)


def test_nothing_is_learned_from_records():
    table = frame(10)
    blank = SCHEMA.transformer()
    assert np.array_equal(blank.transform(table), SCHEMA.encode_features(table))
    other = SCHEMA.transformer().fit(frame(50))
    assert np.array_equal(other.transform(table), blank.transform(table))


def test_a_table_that_does_not_fit_is_refused_without_its_values():
    table = frame(3).assign(sex=["f", "SECRET", "m"])
    with pytest.raises(SchemaMismatch) as refused:
        SCHEMA.transformer().transform(table)
    assert "SECRET" not in str(refused.value)
