"""A small study and tables for it, shared by the tests of everything that speaks of studies."""

import hashlib

import numpy as np
import pyarrow as pa
import pyarrow.csv

from consilience import Noise
from consilience.files.contribution import Contribution, rebuild
from consilience.files.sealed import Sealed
from consilience.privacy.accounting import events_to_json, total
from consilience.statistics.vote_tally import pack_rows
from consilience.study.records import file_digest
from consilience.study.study import Study
from consilience.tables.public import Public

COLUMNS = """
[[schema.columns]]
kind = "numeric"
name = "age"
low = 18
high = 100
[[schema.columns]]
kind = "categorical"
name = "sex"
categories = ["f", "m"]
[[schema.columns]]
kind = "numeric"
name = "pressure"
low = 50
high = 250
"""


def study_text(
    learner="PrivateLogisticRegression", aggregator="Average", *, more="", privacy="", settings=""
):
    neighbours = (
        "add-remove"
        if any(kind in learner for kind in ("Tree", "Forest", "Boost"))
        else "replace-one"
    )
    return f"""
[study]
name = "heart-risk"
purpose = "Who needs a second visit?"
[privacy]
neighbours = "{neighbours}"
epsilon_min = 0.1
epsilon_max = 3.0
{privacy}
[schema]
label = "ill"
classes = [0, 1]
{COLUMNS}
[learner]
name = "{learner}"
{settings}
[aggregator]
name = "{aggregator}"
{more}
"""


PUBLIC_PART = f'[public]\nfile = "public.csv"\nsha256 = "{"a" * 64}"\n'
TRUSTED = 'hub = "trusted"'
# Studies that version 0.1 accepted and later ones refuse, with what they say; hubs and sites may
# still have them.
ACCEPTED_ONCE = {
    "noise on an untrusted hub": (study_text(more="epsilon = 1.0"), "needs hub"),
    "infinite epsilon": (study_text(more="epsilon = inf", privacy=TRUSTED), "draws no noise"),
    "infinite epsilon of labels": (
        study_text(aggregator="SoftLabelDistillation", more="epsilon = inf", privacy=TRUSTED)
        + PUBLIC_PART,
        "draws no noise",
    ),
    "exact average at a trusted hub": (study_text(privacy=TRUSTED), "draws no noise"),
    "votes at a trusted hub": (
        study_text(aggregator="WeightedVote", privacy=TRUSTED),
        "draws no noise",
    ),
    "votes on numbers": (
        study_text("PrivateRidge", "WeightedVote").replace("classes = [0, 1]", "label_bound = 3.0"),
        "combines classifiers",
    ),
    "distilled numbers": (
        study_text(
            "PrivateRidge", "VoteDistillation", more="epsilon = 1.0", privacy=TRUSTED
        ).replace("classes = [0, 1]", "label_bound = 3.0")
        + PUBLIC_PART,
        "combines classifiers",
    ),
}


def study(*args, **settings):
    return Study.from_text(study_text(*args, **settings))


def table(n, seed=0):
    source = Noise(seed=seed).open()
    age, sex = 18 + 72 * source.uniform(n), source.words(n) % 2
    pressure = 130 + 20 * source.normal(n)
    ill = (age - 50) / 30 + (pressure - 130) / 30 + 0.5 * source.normal(n) > 0
    return pa.table(
        {
            "age": age,
            "sex": np.where(sex == 1, "f", "m"),
            "pressure": pressure,
            "ill": ill.astype(np.int64),
        }
    )


def public_rows():
    """Return public records of the usual study as the setting that votes are asked by."""
    schema = study().schema
    rows = pack_rows(Public(schema.encode(table(60, seed=97)).X), schema.norm)
    return f'records = "{rows}"'


def records_parts(folder):
    """Write public and test records into a folder; return the parts of a study that name them."""
    parts = ""
    for seed, part in enumerate(("public", "test"), start=98):
        path = folder / f"{part}.csv"
        pyarrow.csv.write_csv(table(200, seed=seed), path)
        parts += f'[{part}]\nfile = "{part}.csv"\nsha256 = "{file_digest(path)}"\n'
    return parts


def overstate(contribution, key, size=2**31 - 1):
    """Return one of as many records as a hub accepts, all of which have the same answer."""
    sealed = contribution.sealed
    tensors = {name: np.array(one) for name, one in sealed.tensors.items()}
    facts = {k: v for k, v in sealed.facts.items() if k not in ("key", "tensors")} | {"size": size}
    if "counts" in tensors:
        counts = np.zeros_like(tensors["counts"])
        counts[..., 1] = size // (counts.size // 2)
        counts.flat[1] += size - counts.sum()
        tensors |= {"counts": counts, "size": np.array(size, tensors["size"].dtype)}
    else:
        tensors |= {"coef": tensors["coef"] * 1e-6, "intercept": tensors["intercept"] * 0 + 0.01}
        shapes = {name: one.shape for name, one in tensors.items()}
        events = rebuild(facts, tensors).implied(shapes).events
        cost, text = total(events), events_to_json(events)
        assumptions = facts["guarantee"]["assumptions"]
        facts |= {"events": text, "guarantee": cost.as_dict() | {"assumptions": assumptions}}
        hashed = hashlib.sha256(text.encode()).hexdigest()
        epsilon = max(cost.epsilon, facts["receipt"]["epsilon"])
        facts["receipt"] = facts["receipt"] | {"events_hash": hashed, "epsilon": epsilon}
    return Contribution.load(Sealed.seal("contribution", facts, tensors, key).to_bytes())


def statistic_text(name="Moments", settings="", more="", privacy="delta = 1e-6"):
    """Return the usual study with a statistic in place of its two parts."""
    text = study_text(privacy=privacy)
    head = text[: text.index("[learner]")]
    return f'{head}[statistic]\nname = "{name}"\n{settings}\n{more}'


def as_number(text):
    """Return a study whose label is a number in place of a class."""
    return text.replace("classes = [0, 1]", "label_bound = 3.0")


def blind_text(
    keyholders, *, statistic="Moments", shares=2, spare=1, min_sites=3, settings="", more=""
):
    """Return the usual study with a blind hub and these keyholders."""
    privacy = f'delta = 1e-6\nhub = "blind"\nmin_sites = {min_sites}'
    text = study_text(privacy=privacy)
    head = text[: text.index("[learner]")]
    keys = ", ".join(f'"{key}"' for key in keyholders)
    return (
        f'{head}[statistic]\nname = "{statistic}"\n{settings}\n{more}\n'
        f"[blind]\nshares = {shares}\nspare = {spare}\nkeyholders = [{keys}]\n"
    )
