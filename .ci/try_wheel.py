"""What `make wheel` runs in a clean environment: every module, and a study from nothing to answers.

Two sites and a coordinator work in a shared folder with the installed command, as people type it.
"""

import csv
import importlib
import json
import pkgutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import consilience

NOT_INSTALLED = ("consilience.adapters.flower",)  # has an environment of its own
COMMAND = Path(sysconfig.get_path("scripts")) / "consilience"
DECLARED = ("--number", "age:0:100", "--category", "sex:f,m", "--classes", "no,yes")


def run(folder: Path, *arguments: str) -> str:
    """Run the installed command in a folder; stop if it fails."""
    done = subprocess.run(  # noqa: S603
        [COMMAND, *arguments], cwd=folder, capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        sys.exit(f"consilience {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def collaborate(folder: Path) -> None:
    """Design a study, train and submit at two sites, release, fetch and predict."""
    patients = [(i % 100, "fm"[i % 2], "yes" if i % 100 > 50 else "no") for i in range(1000)]
    lines = [f"{age},{sex},{ill}" for age, sex, ill in patients]
    for table in ("north", "south", "new"):
        (folder / f"{table}.csv").write_text("\n".join(["age,sex,ill", *lines]) + "\n")
    (folder / "shared").mkdir()
    written = ("--out", "shared/study.toml", "--purpose", "who falls ill", "--name", "trial")
    run(folder, "study", "new", "north.csv", "--label", "ill", *DECLARED, *written)
    for name in ("north", "south"):
        site = ("--folder", f"at-{name}")
        run(folder, "site", "init", "--name", name, "--dataset", "ward", "--epsilon", "3", *site)
        run(folder, "site", "join", "shared", *site)
        train = ("site", "train", "trial", f"{name}.csv", "--epsilon", "3", "--json", *site)
        shown = json.loads(run(folder, *train, "--dry-run"))["digest"]
        trained = json.loads(run(folder, *train, "--approved", shown))
        if not 2.99 < trained["guarantee"]["epsilon"] <= 3.0:
            sys.exit(f"The installed package states {trained['guarantee']}.")
        run(folder, "site", "submit", "trial", *site)
    run(folder, "release", "make", "shared", "--key", "coordinator.pem")
    run(folder, "site", "fetch", "trial", "--folder", "at-north")
    release = "at-north/studies/trial/release-0001.safetensors"
    run(folder, "release", "predict", release, "at-north", "new.csv", "--out", "answers.csv")
    with (folder / "answers.csv").open(newline="") as file:
        answers = [row["prediction"] for row in csv.DictReader(file)]
    right = sum(answer == ill for answer, (*_, ill) in zip(answers, patients, strict=True))
    if right < 800:  # noise makes so many wrong in less than one of a million runs
        sys.exit(f"Of 1,000 answers {right} were right.")


for module in pkgutil.walk_packages(consilience.__path__, "consilience."):
    if module.name not in NOT_INSTALLED:
        importlib.import_module(module.name)
for name in consilience.__all__:
    getattr(consilience, name)
with tempfile.TemporaryDirectory() as place:
    collaborate(Path(place))
