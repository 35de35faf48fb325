"""Run a command in this process, as a shell would."""

import pyarrow.csv
import pytest

import studies
from consilience.cli.app import main


@pytest.fixture
def run(capsys):
    def run(*arguments):
        with pytest.raises(SystemExit) as leaving:
            main(list(map(str, arguments)))
        printed = capsys.readouterr()
        return leaving.value.code or 0, printed.out, printed.err

    return run


@pytest.fixture
def records(tmp_path):
    """Two numbers, a category, a hospital, and a label that follows from the numbers."""
    path = tmp_path / "records.csv"
    lines = [
        f"{i % 17},{i % 11},{'uv'[i % 2]},h{i % 3},{'yes' if i % 17 + i % 11 > 13 else 'no'}"
        for i in range(400)
    ]
    path.write_text("a,b,c,hospital,ill\n" + "\n".join(lines) + "\n")
    return path


@pytest.fixture
def study_file(tmp_path):
    """A study, and a table for it, in one folder."""
    path = tmp_path / "study.toml"
    path.write_text(studies.study_text(settings="regularization = 0.05"))
    pyarrow.csv.write_csv(studies.table(400), tmp_path / "table.csv")
    return path
