import pyarrow as pa
import pytest

from consilience.errors import SettingsError
from consilience.tables.inference import (
    FEW,
    distinct_texts,
    infer_column,
    list_categories,
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


@pytest.mark.parametrize(
    ("texts", "problem"),
    [
        ([f"P{i}" for i in range(FEW + 1)], "different text in most rows"),
        ([f"P{i}" for i in range(60)] + ["P0"] * 50, "different text in most rows"),
        ([f"2024-05-{1 + i % 28:02}" for i in range(500)], "holds dates"),
        (["2024-05-31T12:00:00", None] * 40, "holds dates"),
        ([str(i % 60) + "a" for i in range(500)], "more than 50 different values"),
    ],
)
def test_texts_that_are_no_categories_are_refused_with_what_to_drop(texts, problem):
    with pytest.raises(SettingsError, match=problem) as refused:
        list_categories("who", column(*texts), most=50)
    assert "--drop who" in str(refused.value)


@pytest.mark.parametrize(
    "texts",
    [
        [f"P{i}" for i in range(FEW)],  # a small table
        [f"ward {i % 40}" for i in range(200)],
        ["2024-05-31", "unknown"] * 40,  # not all are dates
        ["2024-13-31", "2024-05-32"] * 40,
    ],
)
def test_texts_that_recur_are_categories(texts):
    assert list_categories("where", column(*texts)) == sorted(set(texts))


def test_a_public_table_with_an_identifier_is_read_once_it_is_left_out():
    table = {"who": [f"P{i}" for i in range(90)], "age": range(90), "ill": [0, 1, 1] * 30}
    table = {name: list(values) for name, values in table.items()}
    with pytest.raises(SettingsError, match="--drop who"):
        read_public(table, "ill")
    assert read_public(table, "ill", drop=["who"])[0].shape == (90, 1)
