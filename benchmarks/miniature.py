"""Try a benchmark in seconds: made-up tables in the form of the real ones, and small sizes.

``python benchmarks/miniature.py NAME FOLDER`` runs the script of that name as it is, with the
settings of `SMALL`, and writes its page into the folder. Its numbers mean nothing; the tests run
every script so, because nobody would otherwise notice that one is broken. Without a name the
process reads such lines as JSON, runs each in a fork of its own and prints how it ended: what
all scripts import is imported once.
"""

import importlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import TextIO

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

SERVICES = ("http", "smtp", "private", "ftp_data")
KDD_RATES = (
    "serror_rate srv_serror_rate rerror_rate srv_rerror_rate same_srv_rate diff_srv_rate "
    "srv_diff_host_rate dst_host_same_srv_rate dst_host_diff_srv_rate dst_host_same_src_port_rate "
    "dst_host_srv_diff_host_rate dst_host_serror_rate dst_host_srv_serror_rate "
    "dst_host_rerror_rate dst_host_srv_rerror_rate"
).split()
KDD_COUNTS = (
    "duration src_bytes dst_bytes land wrong_fragment urgent hot num_failed_logins logged_in "
    "num_compromised root_shell su_attempted num_root num_file_creations num_shells "
    "num_access_files num_outbound_cmds is_host_login is_guest_login count srv_count "
    "dst_host_count dst_host_srv_count"
).split()
COVERTYPE = (
    "Elevation Aspect Slope Horizontal_Distance_To_Hydrology Vertical_Distance_To_Hydrology "
    "Horizontal_Distance_To_Roadways Hillshade_9am Hillshade_Noon Hillshade_3pm "
    "Horizontal_Distance_To_Fire_Points"
).split()
ADULT = {
    "workclass": ("Private", "State-gov"),
    "education": ("Bachelors", "HS-grad"),
    "marital_status": ("Never-married", "Divorced"),
    "occupation": ("Sales", "Tech-support"),
    "relationship": ("Husband", "Own-child"),
    "race": ("White", "Black"),
    "sex": ("Female", "Male"),
    "native_country": ("United-States", "Mexico"),
}


# Arguments of a script, and the constants of its module that say how much it does; a slice takes a
# part of the constant.
SMALL: dict[str, tuple[list[str], dict[str, object]]] = {
    "accuracy": (["--quick", "--problem", "adult", "--runs", "2"], {"find_peer": lambda _: None}),
    "adaptation": (
        ["--quick"],
        {
            "MEASURED": 2,
            "EPSILONS": (1.0,),
            "ADULT": (60,) * 4,
            "SMALL": (30,) * 4,
            "CREDIT": (60,) * 4,
            "forests.N_TRAIN": 600,
            "experiments.datasets.load": lambda name: made_up(name, 300),
        },
    ),
    "aggregation": (["--quick"], {"SIZES": [20] * 10, "SCALE": 10, "JOBS": 1}),
    "backends": (
        ["--miniature", "--repeats", "1", "--out", "{out}"],
        {"RUNS": (("loky", False),)},
    ),
    "defaults": (
        [],
        {
            "NAMES": ("mnist37", "adult", "covertype", "credit", "kdd"),
            "SIZES": (60, 120),
            "RUNS": {120: 2},
            "EPSILONS": (1.0,),
            "GRID": (1e-3, 1e-1),
            "TREES": (2,),
            "DEPTHS": (1, 2),
            "N_PUBLIC": 100,
            "forests.N_TRAIN": 600,
        },
    ),
    "distillation": (
        [],
        {"RUNS": (2, 1), "QUERIES": (30, 100), "SIZES": {"HAR": 20, "KDD": (20,)}},
    ),
    "end_to_end": ([], {"N_SITES": 40, "N_AUXILIARY": 500}),
    "fit_time": ([], {"SIZES": (120, 400), "REPEATS": (2, 2), "SITE": 40, "FIRST": (1, 0, 0)}),
    "forest_calibration": (
        ["--quick"],
        {"forests.N_TRAIN": 600, "N_KDD": 600, "SIZES": (100, 200), "EPSILONS": (0.1, 2.0)},
    ),
    "forest_sites": (
        ["--quick"],
        {
            "forests.N_TRAIN": 2_000,
            "forests.HEIGHTS": (3, 4),
            "SETTINGS": slice(1, None, 7),  # five and ten sites, equal and uneven
            "N_PUBLIC": 100,
            "GROUPS": ((5, 10, 15, 20, 25),),
            "PARTIES": (2, 3),
        },
    ),
    "forest_speed": (
        ["--quick"],
        {
            "forests.N_TRAIN": 600,
            "find_peer": lambda _: None,
            "SIZES": (1_000, 2_000),
            "LEAST": 1_000,
            "TIMES": 1,
            "DEPTHS": (3, 4, 5),
            "ROWS": 10_000,
        },
    ),
    "forests": (
        ["--quick"],
        {
            "N_TRAIN": 600,
            "HEIGHTS": (3, 4),
            "find_peer": lambda _: None,
        },
    ),
    "hub_load": (
        [
            "--contributions",
            "6",
            "--at-once",
            "2",
            "--repeats",
            "1",
            "--megabytes",
            "1",
            "--out",
            "{out}",
        ],
        {},
    ),
    "large_site": (["--records", "20000", "--only", "logistic", "forest", "--out", "{out}"], {}),
    "many_members": ([], {"NUMBERS": (10, 30, 40), "TIMES": 1, "N_TRAINED": 20, "N_PUBLIC": 100}),
    "many_sites": (
        [],
        {"SITES": (40, 20), "SAMPLE": 5, "REPEATS": 1, "first_calls": lambda: ((1, 1), (1, 1))},
    ),
    "peers": (
        ["--quick"],
        {
            "forests.N_TRAIN": 600,
            "N_DIGITS": 600,
            "N_LAND": 600,
            "RIDGES": (1e-4, 1e-2),
            "TIMED": 1,
            "find_peer": lambda *_: None,
        },
    ),
    "poisoning": (
        ["--repeats", "2"],
        {
            "N_RECORDS": 60,
            "N_PUBLIC": 20,
            "N_TEST": 60,
            "N_FRESH": 60,
            "FEW": (40,),
            "FEW_REPEATS": 1,
            "SEARCHED": 2,
            "HONEST": (2.0,),
            "HONEST_REPEATS": 1,
        },
    ),
    "joining": (
        ["--divisions", "2", "mnist-public", "credit-public"],
        {"SCALE": 20, "N_TEST": 300, "ADAPTED": 2, "forests.N_TRAIN": 600},
    ),
    "kinds": (["--divisions", "2"], {"SIZE": 60, "N_TEST": 300, "forests.N_TRAIN": 600}),
    "shared_noise": ([], {"SITES": 3, "SHARES": 2, "TREES": 20, "KEYHOLDERS": 1, "REPEATS": 1}),
    "site_level": (
        ["--divisions", "2"],
        {
            "SITES": {"KDD": 20},
            "N_PUBLIC": {"KDD": 40},
            "N_TEST": 100,
            "DRAWS": 1,
            "EPSILONS": (1.0, 10.0),
            "distillation.SIZES": {"HAR": 20, "KDD": (20,)},
        },
    ),
    "public_alone": (["--quick"], {"PUBLIC": (30,), "N_RECORDS": 60, "forests.N_TRAIN": 600}),
    "planning": (["--quick"], {"DATA": Path("none"), "REPEATS": (2, 2)}),
}


def run(name: str, folder: Path, load_only: bool = False) -> None:
    """Run one script in miniature, or only load it; all it writes goes into `folder`."""
    tables = folder / "data"
    write_tables(tables)
    os.environ |= {"CONSILIENCE_DATA": str(tables), "TMPDIR": str(folder)}
    (folder / "benchmarks").mkdir()
    arguments, constants = SMALL[name]
    sys.path.insert(0, str(Path(__file__).parent))
    for (
        constant,
        value,
    ) in constants.items():  # those of other scripts, "forests.N_TRAIN", come first
        module, _, attribute = constant.rpartition(".")
        script = importlib.import_module(module or name)
        if not hasattr(script, attribute):
            raise SystemExit(f"{module or name}.py has no {attribute}: correct SMALL.")
        if isinstance(value, slice):
            value = getattr(script, attribute)[value]
        setattr(script, attribute, value)
    script = importlib.import_module(name)
    if load_only:
        sys.exit(0)
    for place, target in (("ROOT", folder), ("HERE", folder)):
        if hasattr(script, place):
            setattr(script, place, target)
    out = str(folder / "benchmarks" / f"{name}.md")
    sys.argv = [name, *(argument.format(out=out) for argument in arguments)]
    sys.exit(script.main())


def made_up(name: str, n_records: int) -> object:
    """Return one of the experiments' tables in its form, with records of no meaning."""
    from experiments.datasets import made_up

    return made_up(name, n_records)


def write_tables(folder: Path) -> None:
    """Write made-up tables in the form of the real ones."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for name, table in (
        ("mnist", _mnist(random, 3000)),
        ("covertype", _covertype(random, 1500)),
        ("har", _har(random, 900)),
        ("kdd99", _kdd(random, 6000)),
        ("adult", _adult(random, 900)),
        ("credit_default", _credit(random, 3000)),
    ):
        pq.write_table(table, folder / f"{name}.parquet")


def _split(random, n, *names):
    """Return which part each record is in, about two thirds in the first."""
    chosen = (random.random(n) > 0.67).astype(int) * (len(names) - 1)
    return pd.Categorical.from_codes(chosen, list(names))


def _mnist(random, n):
    label = random.choice(10, n).astype(np.uint8)
    label[: n // 2] = random.choice([3, 7], n // 2)
    pixels = random.integers(0, 60, (n, 784)) + 120 * ((np.arange(784) // 78) == label[:, None])
    rows = [row.astype(np.uint8).tobytes() for row in pixels]
    split = pa.array(_split(random, n, "train", "test"))
    columns = [pa.array(rows, pa.binary(784)), pa.array(label), split]
    return pa.table(columns, names=["pixels", "label", "split"])


def _covertype(random, n):
    kind = random.integers(1, 8, n).astype(np.uint8)
    kind[: n // 2] = random.integers(1, 3, n // 2)
    found = {name: random.integers(0, 250, n) + 9 * kind for name in COVERTYPE}
    found |= {f"Wilderness_Area{i}": random.integers(0, 2, n) for i in range(1, 5)}
    found |= {f"Soil_Type{i}": random.integers(0, 2, n) for i in range(1, 41)}
    return pa.table({**found, "Cover_Type": kind})


def _har(random, n):
    activity = random.integers(1, 7, n).astype(np.int8)
    found = {
        "subject": random.integers(1, 31, n).astype(np.int8),
        "activity": activity,
        "activity_name": pd.Categorical(activity.astype(str)),
        "split": _split(random, n, "train", "test"),
        "recording": np.zeros(n, np.int16),
        "window": np.arange(n, dtype=np.int16),
        "jerk_exact": np.ones(n, bool),
    }
    for i in range(561):
        found[f"feature {i}"] = np.float32(random.normal(size=n) + (i % 6 == activity - 1))
    return pa.Table.from_pandas(pd.DataFrame(found), preserve_index=False)


def _kdd(random, n):
    attack = random.random(n) < 0.5
    found = {name: random.integers(0, 2, n) for name in KDD_COUNTS}
    found |= {name: np.clip(random.random(n) / 2 + attack / 2, 0, 1) for name in KDD_RATES}
    found["protocol_type"] = pd.Categorical(random.choice(["icmp", "tcp", "udp"], n))
    found["service"] = pd.Categorical(random.choice(SERVICES, n))
    found["flag"] = pd.Categorical(random.choice(["SF", "S0", "REJ"], n))
    found["label"] = pd.Categorical(np.where(attack, "smurf", "normal"))
    found["split"] = _split(random, n, "train_10pct", "test_corrected")
    return pa.Table.from_pandas(pd.DataFrame(found), preserve_index=False)


def _adult(random, n):
    rich = random.random(n) < 0.3
    found = {name: pd.Categorical(random.choice(values, n)) for name, values in ADULT.items()}
    found |= {
        "age": random.integers(17, 90, n),
        "fnlwgt": random.integers(10_000, 90_000, n),
        "education_num": np.clip(random.integers(1, 12, n) + 4 * rich, 1, 16),
        "capital_gain": rich * random.integers(0, 9000, n),
        "capital_loss": random.integers(0, 900, n),
        "hours_per_week": random.integers(1, 99, n),
        "income": pd.Categorical(np.where(rich, ">50K", "<=50K")),
        "split": _split(random, n, "train", "test"),
    }
    return pa.Table.from_pandas(pd.DataFrame(found), preserve_index=False)


def _credit(random, n):
    late = random.random(n) < 0.3
    found = {"ID": np.arange(n), "LIMIT_BAL": random.integers(10_000, 500_000, n)}
    found |= {name: random.integers(1, 4, n) for name in ("SEX", "EDUCATION", "MARRIAGE")}
    found["AGE"] = random.integers(21, 70, n)
    found |= {f"PAY_{i}": random.integers(-1, 2, n) + late for i in (0, 2, 3, 4, 5, 6)}
    found |= {f"BILL_AMT{i}": random.integers(-100, 90_000, n) for i in range(1, 7)}
    found |= {f"PAY_AMT{i}": random.integers(0, 9_000, n) for i in range(1, 7)}
    return pa.table({**found, "default_next_month": late.astype(np.int8)})


def fork_for_each(lines: TextIO) -> None:
    """Run a script for each line: as JSON its name, a folder and whether only to load it."""
    import matplotlib.pyplot  # noqa: F401
    import sklearn.linear_model  # noqa: F401

    import consilience

    for name in consilience.__all__:
        getattr(consilience, name)
    for line in lines:
        name, folder, load_only = json.loads(line)
        sys.stdout.flush()
        if (child := os.fork()) == 0:
            signal.alarm(600)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            with open(Path(folder) / "said", "w") as said:
                os.dup2(said.fileno(), 1)
                os.dup2(said.fileno(), 2)
                run(name, Path(folder), load_only)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    if sys.argv[1:]:
        run(sys.argv[1], Path(sys.argv[2]))
    else:
        fork_for_each(sys.stdin)
