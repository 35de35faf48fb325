import pyarrow as pa
import pytest

from consilience.tables.inference import (
    distinct_texts,
    infer_column,
    number_bounds,
    read_public,
)
from consilience.tables.schema import Categorical, Numeric


def column(*values):
    return pa.chunked_array([pa.array(values)])


@pytest.mark.parametrize(
    ("values", "bounds"),
    [
        ((3, 1, None), (1.0, 3.0)),
        ((" 1.5", "", "-2"), (-2.0, 1.5)),
        (("1", "x"), None),
        ((None, None), (0.0, 0.0)),
    ],
)
def test_bounds_are_those_of_the_numbers_if_all_are_numbers(values, bounds):
    assert number_bounds(column(*values)) == bounds


def test_categories_are_the_different_texts_without_missing_ones():
    assert distinct_texts(column("b", " a", None, "", "b")) == ["a", "b"]


def test_a_column_is_declared_by_its_values_and_a_constant_says_nothing():
    assert infer_column("x", column(1, 3)) == Numeric("x", 1, 3, missing="middle")
    assert infer_column("x", column("u", "v")) == Categorical("x", ("u", "v"), missing="ignore")
    assert infer_column("x", column(2, 2)) is None


def test_public_records_are_encoded_by_their_own_bounds():
    X, y = read_public({"a": [0, 5, 10], "b": ["u", "v", None], "ill": ["no", "yes", "no"]}, "ill")
    assert X.shape == (3, 3)
    assert y.tolist() == [0, 1, 0]
    assert (X[:, 0] * 2**0.5).tolist() == pytest.approx([-1, 0, 1])
