"""Everything that is wrong with a study file is listed together, in the words of the file."""

import pytest

from consilience.study.study import Study, check
from studies import study_text


def problems_of(tmp_path, text):
    (tmp_path / "study.toml").write_text(text)
    return check(tmp_path / "study.toml")


def test_all_problems_of_columns_and_settings_are_listed_together(tmp_path):
    columns = """
[schema]
norm = -1
colour = 3
person = "id"
[[schema.columns]]
kind = "numeric"
name = "age"
low = nan
[[schema.columns]]
kind = "categorical"
name = "sex"
[[schema.columns]]
name = "x"
[[schema.columns]]
kind = "numeric"
name = "y"
low = 3
high = 1
[[schema.columns]]
kind = "numeric"
[learner]
"""
    text = study_text()
    text = text[: text.index("[schema]")] + columns + text.partition("[learner]")[2]
    found = problems_of(tmp_path, text.replace('"heart-risk"', '"Heart Risk"'))
    said = [
        "[[schema.columns]] 'age' needs low and high",
        "[[schema.columns]] 'sex' needs categories = [...]",
        "[[schema.columns]] 'x' needs kind",
        "[[schema.columns]] 'y': high of 'y' cannot be 1.0: it must be above low=3",
        "the 5. [[schema.columns]] needs a name",
        "[schema] needs label",
        "[schema] needs classes = [...], or label_bound",
        "[schema] max_records_per_person is missing: it must be a whole number",
        "[schema] norm cannot be -1",
        "[schema] has no setting “colour”",
        "the name 'Heart Risk' must be",
    ]
    assert len(found) == len(said)
    assert all(problem.startswith(part) for problem, part in zip(found, said, strict=True))
    assert not any("Numeric(" in problem for problem in found)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("classes = [0, 1]", "classes = [0]", "[schema] classes cannot be ['0']"),
        ("classes = [0, 1]", "label_bound = -1", "[schema] label_bound cannot be -1"),
        ("classes = [0, 1]", "classes = [0, 1]\nlabel_bound = 1", "[schema] label_bound cannot"),
        ('name = "sex"', 'name = "age"', "[schema]: columns, label and person cannot be ['age']"),
        ("classes = [0, 1]", "classes = 7", "[schema]"),
    ],
)
def test_a_schema_that_is_refused_says_why(tmp_path, old, new, said):
    text = study_text().replace(old, new)
    assert any(problem.startswith(said) for problem in problems_of(tmp_path, text))


def test_a_new_study_states_no_bound_that_nobody_chose(tmp_path):
    from consilience.study.draft import Draft

    (tmp_path / "t.csv").write_text("age,ill\n31,1\n")
    text = Draft(name="heart", label="ill", file="study.toml").write(tmp_path / "t.csv")
    assert "nan" not in text
    assert "# low = ...   # FILL IN" in text
    found = problems_of(tmp_path, text)
    assert any("'age' needs low and high" in problem for problem in found)
    filled = text.replace("# low = ... ", "low = 0 ").replace("# high = ...", "high = 120")
    filled = filled.replace("classes = []", "classes = [0, 1]")
    assert not any("schema" in problem for problem in problems_of(tmp_path, filled))
    assert Study.from_text(study_text()).name == "heart-risk"
