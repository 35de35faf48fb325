"""Measure what one wrong site of four does to a release, with and without the hub's checks.

    CONSILIENCE_DATA=FOLDER python benchmarks/poisoning.py [--repeats N]

Four sites and a hub with few public records learn to tell two kinds of trees of Covertype apart.
The fourth site signs what it likes. Writes benchmarks/poisoning.md. Noise is not seeded, because no
hub would take such contributions: numbers vary within the stated errors.
"""

import argparse
import json
import os
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from consilience import Budget, Ledger, Study
from consilience.aggregators.outliers import find_far, find_heavy
from consilience.errors import ConsilienceError
from consilience.evaluation import baselines
from consilience.files.contribution import Contribution, rebuild
from consilience.files.sealed import Sealed, SigningKey
from consilience.privacy.accounting import events_to_json
from consilience.study.collect import Publication, collect
from consilience.study.withholding import Candidate
from consilience.tables.public import Public

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(Path(__file__).parent))

from pages import write_page  # noqa: E402

DATA = Path(os.environ.get("CONSILIENCE_DATA", ROOT / "data"))
N_SITES, N_RECORDS, N_PUBLIC, N_TEST = 4, 3_000, 30, 4_000
EPSILON = 2.0
WRONG = N_SITES - 1
COLUMNS = {  # the ranges that the data set's own description states
    "Elevation": (1800, 3900),
    "Aspect": (0, 360),
    "Slope": (0, 66),
    "Horizontal_Distance_To_Hydrology": (0, 1400),
    "Vertical_Distance_To_Hydrology": (-180, 600),
    "Horizontal_Distance_To_Roadways": (0, 7200),
    "Hillshade_9am": (0, 255),
    "Hillshade_Noon": (0, 255),
    "Hillshade_3pm": (0, 255),
    "Horizontal_Distance_To_Fire_Points": (0, 7200),
}
KINDS = (1, 2)  # spruce or fir, and lodgepole pine
LINEAR = (
    'neighbours = "replace-one"',
    'name = "PrivateLogisticRegression"\nregularization = 1e-4',
)
FOREST = 'neighbours = "add-remove"', 'name = "PrivateForestClassifier"'
METHODS = {  # title: privacy, learner, aggregator
    "Average": (*LINEAR, 'name = "Average"'),
    "Average, robust (median)": (*LINEAR, 'name = "Average"\nrobust = "median"'),
    "votes of linear models": (*LINEAR, 'name = "WeightedVote"'),
    "votes of forests": (*FOREST, 'name = "WeightedVote"'),
    "PublicBlend": (*LINEAR, 'name = "PublicBlend"'),
    "FeatureMethod": (*LINEAR, 'name = "FeatureMethod"'),
    "SiteBoosting": (*LINEAR, 'name = "SiteBoosting"'),
}


def make_study(method, sha256="0" * 64):
    """Return a study of connections by one method."""
    privacy, learner, aggregator = METHODS[method]
    columns = ",\n".join(
        f'{{kind = "numeric", name = "{name}", low = {low}.0, high = {high}.0}}'
        for name, (low, high) in COLUMNS.items()
    )
    files = "\n".join(
        f'[{part}]\nfile = "{part}.csv"\nsha256 = "{sha256}"' for part in ("public", "test")
    )
    return Study.from_text(f"""
[study]
name = "poisoning"
[privacy]
{privacy}
epsilon_min = 0.1
epsilon_max = 10.0
[schema]
label = "kind"
classes = [0, 1]
columns = [{columns}]
[learner]
{learner}
[aggregator]
{aggregator}
{files}
""")


def read_tables(seed):
    """Return the tables of the sites, the public records and the test records."""
    table = pd.read_parquet(DATA / "covertype.parquet", columns=[*COLUMNS, "Cover_Type"])
    table = table[table.Cover_Type.isin(KINDS)]
    sizes = [N_RECORDS] * N_SITES + [N_PUBLIC, N_TEST]
    order = np.random.default_rng(seed).permutation(len(table))[: sum(sizes)]
    parts = np.split(order, np.cumsum(sizes)[:-1])
    return [
        {name: table[name].to_numpy(float)[part] for name in COLUMNS}
        | {"kind": (table.Cover_Type == KINDS[0]).to_numpy(int)[part]}
        for part in parts
    ]


def encode(study, table):
    """Return public records as the hub reads them."""
    rows = study.schema.encode(table)
    return Public(rows.X, np.asarray(rows.y).astype(int))


def train(study, tables, folder, epsilon=EPSILON):
    """Return one honest contribution of each site, and the keys that sign."""
    made, keys = [], []
    for number, table in enumerate(tables):
        ledger = Ledger(folder / f"{study.learner}-{number}-{epsilon:g}.ledger")
        ledger.allow("site", Budget(epsilon=1e4))
        keys.append(SigningKey.generate())
        sender = {"site": f"site {number}", "signing": keys[-1], "dataset": "site"}
        made.append(study.train(table, ledger, epsilon=epsilon, **sender))
    return made, keys


# ------------------------------------------------------------------ what the fourth site signs


def flip(tensors, scale):
    """Return a model that says the opposite, `scale` times as loudly."""
    if "coef" in tensors:
        return {name: one * -scale for name, one in tensors.items()}
    counts = tensors["counts"][..., ::-1].astype(float) * scale
    counts = np.clip(counts, -(2.0**59), 2.0**59).astype(np.int64)
    return {**tensors, "counts": np.ascontiguousarray(counts)}


def loud(contribution, is_seen):
    return flip(contribution.sealed.tensors, 1000.0), {}


def huge(contribution, is_seen):
    tensors = contribution.sealed.tensors
    if "coef" in tensors:
        return {name: -np.sign(one) * 1e308 for name, one in tensors.items()}, {}
    return flip(tensors, 1e300), {}


def many(contribution, is_seen, size=2**59):
    """Claim many records, with the events that so many would have."""
    tensors, facts = flip(contribution.sealed.tensors, 1.0), {"size": size}
    if "size" in tensors:
        tensors["size"] = np.array(size)
        return tensors, facts
    learner = rebuild({**contribution.sealed.facts, "size": size}, contribution.sealed.tensors)
    shapes = {name: one.shape for name, one in tensors.items()}
    return tensors, {**facts, "events": events_to_json(learner.implied(shapes).events)}


def precise(contribution, is_seen):
    """Claim hardly any noise."""
    events = json.loads(contribution.sealed.facts["events"])
    tensors = flip(contribution.sealed.tensors, 1.0)
    if "coef" in tensors:
        events[0]["strong_convexity"] = 1e300
    else:
        events[0]["parts"][-1]["scale"] = 1e-300
        tensors["variance"] = np.array(0.0)
    return tensors, {"events": json.dumps(events, sort_keys=True, separators=(",", ":"))}


def allowed(contribution, is_seen):
    """Say the opposite as loudly as the hub accepts."""
    tensors = contribution.sealed.tensors
    if "coef" not in tensors:
        return flip(tensors, 1.0), {}
    shapes = {name: one.shape for name, one in tensors.items()}
    bounds = contribution.learner.implied(shapes).bounds
    scale = min(bounds[name].norm / np.linalg.norm(one) for name, one in tensors.items())
    return flip(tensors, 0.99 * scale), {}


def unseen(contribution, is_seen):
    """Say the opposite as loudly as raises no alert, knowing what all others handed in."""
    tensors = contribution.sealed.tensors
    if "coef" not in tensors:
        return flip(tensors, 1.0), {}
    low, high = 1e-3, 1e6
    while high > 1.01 * low:
        middle = np.sqrt(low * high)
        learner = rebuild(contribution.sealed.facts, flip(tensors, middle))
        low, high = (low, middle) if is_seen(learner) else (middle, high)
    return flip(tensors, low), {}


def sparse(contribution, is_seen):
    """Change one number alone: the largest coefficient, or one tree of a forest."""
    tensors = {name: one.copy() for name, one in contribution.sealed.tensors.items()}
    if "coef" not in tensors:
        tensors["counts"][0] = tensors["counts"][0, ..., ::-1]
        return tensors, {}
    coef = tensors["coef"]
    bound = contribution.learner.implied({name: one.shape for name, one in tensors.items()}).bounds
    largest = np.unravel_index(np.argmax(np.abs(coef)), coef.shape)
    coef[largest] = -np.sign(coef[largest]) * (0.99 * bound["coef"].norm - np.linalg.norm(coef))
    return tensors, {}


def quiet(contribution, is_seen):
    return flip(contribution.sealed.tensors, 1.0), {}


def searched(contribution, is_seen):
    """Look for the worst model that a hub publishes, knowing all others and the test records."""
    tensors = contribution.sealed.tensors
    if "coef" not in tensors:
        return flip(tensors, 1.0), {}
    random = np.random.default_rng(0)
    best, most = tensors, is_seen.worth(tensors)
    length = np.linalg.norm(tensors["coef"]) / np.sqrt(tensors["coef"].size)
    step = 0.3
    for _ in range(SEARCHED):
        scale = step * length * random.choice([0.2, 1.0, 3.0])
        tried = {name: one + scale * random.normal(size=one.shape) for name, one in best.items()}
        found = is_seen.worth(tried)
        better = found > most
        best, most = (tried, found) if better else (best, most)
        step = step * 1.3 if better else max(0.97 * step, 1e-3)
    return best, {}


ATTACKS = {
    "coefficients × −1000, honest n": loud,
    "n = 2⁵⁹, sign flipped": many,
    "coefficients of 1e308": huge,
    "lying events, sign flipped": precise,
    "sign flipped, as large as accepted": allowed,
    "one coefficient, as large as accepted": sparse,
    "sign flipped, as large as raises no alert": unseen,
    "sign flipped, honest length": quiet,
    "the worst that is published, by search": searched,
}
SEARCHED = 40  # models that are tried
HONEST = (2.0, 0.5, 0.1)  # budgets at which releases of honest sites are judged
HONEST_REPEATS = 12


def forge(contribution, key, attack, is_seen):
    """Return the file that the fourth site signs, and its learner as if nobody had checked it."""
    tensors, changes = attack(contribution, is_seen)
    facts = {k: v for k, v in contribution.sealed.facts.items() if k not in ("key", "tensors")}
    sealed = Sealed.seal("contribution", facts | changes, tensors, key)
    try:
        learner = rebuild(sealed.facts, sealed.tensors)
    except ConsilienceError:
        learner = None
    return sealed.to_bytes(), learner


# ------------------------------------------------------------------ what comes of it


def error_of(ensemble, test):
    return float(np.mean(np.asarray(ensemble.predict(test.X)) != test.y))


def combine_unchecked(study, learners, public, test):
    """Return the error of whatever the aggregator makes; NaN if it fails."""
    try:
        with np.errstate(all="ignore"):
            return error_of(study.build_aggregator().combine(learners, public), test)
    except Exception:
        return np.nan


@dataclass
class Knowledge:
    """All that the fourth site could know: the others' files, the records and what the hub does."""

    study: Study
    others: list
    own: Contribution
    key: SigningKey
    hub: SigningKey
    records: tuple

    def __call__(self, learner):
        """Tell whether a learner raises an alert."""
        members = [one.learner for one in self.others]
        return WRONG in find_far([*members, learner], *self.records)

    def worth(self, tensors):
        """Return the error of the release with such numbers, -1 if it is not published."""
        facts = {k: v for k, v in self.own.sealed.facts.items() if k not in ("key", "tensors")}
        body = Sealed.seal("contribution", facts, tensors, self.key).to_bytes()
        try:
            accepted = self.study.accept(Contribution.load(body))
        except ConsilienceError:
            return -1.0
        every = [*self.others, accepted]
        error, withheld, _ = publish(self.study, every, *self.records, self.hub)
        return -1.0 if withheld else error


def judge(study, contributions, public, test, key):
    """Return a release, what the hub asks before it publishes it, and whom it names."""
    release = collect(study, contributions, public=public, test=test, publication=Publication(key))
    learners, names = [one.learner for one in contributions], study.schema.feature_names
    places = find_far(learners, public, test, names=names)
    far = {contributions[place].site: text for place, text in places.items()}
    places_of_heavy = find_heavy(release.ensemble)
    heavy = {contributions[place].site: text for place, text in places_of_heavy.items()}
    candidate = Candidate(study, release, contributions, far, heavy, None, public, test)
    return release, candidate, places


def publish(study, contributions, public, test, key):
    """Return the error of a release, whether the hub withholds it and names the fourth site."""
    release, candidate, named = judge(study, contributions, public, test, key)
    withheld = bool(candidate.find_reasons())
    return error_of(release.ensemble, test), withheld, WRONG in named


def run(seed, folder):
    """Return rows of one repeat."""
    *sites, public_table, test_table = read_tables(seed)
    rows, trained = [], {}
    hub = SigningKey.generate()
    for method in METHODS:
        study = make_study(method)
        public, test = encode(study, public_table), encode(study, test_table)
        if study.learner not in trained:
            trained[study.learner] = train(study, sites, folder)
        made, keys = trained[study.learner]
        # One training serves all methods; each study is named in its own signed copies.
        made = [restamp(one, study, key) for one, key in zip(made, keys, strict=True)]
        honest, withheld, named = publish(study, made, public, test, hub)
        rows.append((method, "none", honest, honest, withheld, False, named))
        members = [one.learner for one in made[:WRONG]]

        knows = Knowledge(study, made[:WRONG], made[WRONG], keys[WRONG], hub, (public, test))
        for title, attack in ATTACKS.items():
            body, learner = forge(made[WRONG], keys[WRONG], attack, knows)
            before = combine_unchecked(study, [*members, learner], public, test)
            accepted = list(made[:WRONG])
            try:
                accepted.append(study.accept(Contribution.load(body)))
            except ConsilienceError:
                pass
            after, withheld, named = publish(study, accepted, public, test, hub)
            refused = len(accepted) < N_SITES
            rows.append((method, title, before, after, withheld, refused, named))
    columns = ["method", "attack", "before", "after", "withheld", "refused", "named"]
    return pd.DataFrame(rows, columns=columns).assign(seed=seed)


def restamp(contribution, study, key):
    facts = {k: v for k, v in contribution.sealed.facts.items() if k not in ("key", "tensors")}
    sealed = Sealed.seal(
        "contribution", facts | {"study": study.reference}, contribution.sealed.tensors, key
    )
    return replace(contribution, sealed=sealed)


def describe(table):
    """Return the rows of the page: means over repeats."""
    lines = []
    honest = table[table.attack == "none"].set_index(["method", "seed"]).before
    for method in METHODS:
        mine = table[table.method == method]
        own = honest[method]
        error = own.std(ddof=1) / np.sqrt(len(own)) if len(own) > 1 else np.nan
        lines.append(
            f"| {method} | none | {own.mean():.3f} ± {error:.3f} | "
            f"{own.mean():.3f} | | "
            f"{'published' if not mine[mine.attack == 'none'].withheld.any() else 'withheld'} |"
        )
        for attack in ATTACKS:
            rows = mine[mine.attack == attack].set_index("seed")
            shown = rows[~rows.withheld]
            failed = rows.before.isna().mean()
            before = "no release" if failed == 1 else f"{rows.before.mean():.3f}"
            after, rise = "—", "—"
            if len(shown):
                after = f"{shown.after.mean():.3f}"
                rise = f"{(shown.after - own[shown.index]).mean():+.3f}"
            what = [
                f"refused at the door in {rows.refused.sum()} of {len(rows)}"
                if rows.refused.any()
                else "accepted",
                f"withheld in {rows.withheld.sum()} of {len(rows)}" if rows.withheld.any() else "",
                f"named in {rows.named.sum()} of {len(rows)}" if rows.named.any() else "",
            ]
            lines.append(
                f"| {method} | {attack} | {before} | {after} | {rise} | "
                f"{'; '.join(filter(None, what))} |"
            )
    return lines


PAGE = (
    "# One wrong site of four\n\n"
    "Made by `python benchmarks/poisoning.py`; do not edit, run it again. Covertype, spruce or "
    "pine from {columns} measurements: {sites} sites of {records:,} records, epsilon = "
    "{epsilon:g}, {public} labelled public records, {test:,} test records, {repeats} repeats. "
    "Errors are means "
    "over repeats; a model of the public records alone errs by {alone:.3f}. The fourth site signs "
    "a model that says the opposite of its own.\n\n"
    '"Before" combines whatever arrives, as if no hub had checked it. "Published" is what a hub '
    "publishes by itself: a contribution that its settings and its size rule out is refused "
    "at the door, so that three sites remain; a release is withheld if its test records show it "
    "to be worse than public records alone, or than guessing, or than without a site that is "
    'unlike the others ("named"), or by more than .025 than without any one site. "Rise" compares '
    "published releases with those of four honest sites, repeat by repeat.\n\n"
    "| method | attack | before | published | rise | the hub |\n"
    "|---|---|---|---|---|---|\n"
    "{rows}\n"
    "\n"
    "What the door cannot see is a model that is wrong and otherwise like any other: the last five "
    "attacks of each method. As large as noise and regularisation allow, all of it or one "
    "coefficient alone, the site is named, and the release is withheld wherever it suffers. At an "
    "honest length it is one against three, which costs little; of linear models the test records "
    "then show that no likely noise makes them of such records, so that the site is named as well. "
    "The last attack knows all other models, the test records and the hub's rules, and searches "
    "{searched} models for the one with which the published release errs most. It stays below "
    "every alert; what it costs is bounded because the hub leaves out each site in turn.\n\n"
    "Honest releases can be withheld by the same rule where noise alone makes a site cost that "
    "much: {honest}.\n\n"
    '`robust = "median"` needs no test records and is not turned by any size (column "before"), '
    "but of four noisy members it takes the middle of two: honest sites lose by it. It is not the "
    "default.\n\n"
    "Honest studies are not touched: no check changes a number, and a cap on weights "
    "(`max_weight`) applies only where a study sets one. The three honest sites alone err as "
    "the column says where the fourth was refused, which is the price of being one site "
    "fewer.\n"
)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    baselines.MOST_COMPARED = 0  # other aggregators are not compared here, which takes longest
    with tempfile.TemporaryDirectory() as folder:
        parts = []
        for seed in range(repeats):
            place = Path(folder) / str(seed)
            place.mkdir()
            parts.append(run(seed, place))
            print(f"repeat {seed + 1} of {repeats}", flush=True)
        table = pd.concat(parts)
        alone = np.mean([error_alone(seed) for seed in range(repeats)])
        honest = count_withheld(folder)
    facts = {
        "searched": SEARCHED,
        "honest": honest,
        "columns": len(COLUMNS),
        "sites": N_SITES,
        "records": N_RECORDS,
        "epsilon": EPSILON,
        "public": N_PUBLIC,
        "test": N_TEST,
        "repeats": repeats,
        "alone": alone,
        "rows": "\n".join(describe(table)),
    }
    write_page(ROOT / "benchmarks" / "poisoning.md", PAGE.format(**facts))
    worst = table[(table.attack != "none") & ~table.withheld]
    print(worst.groupby(["method", "attack"]).after.mean())


def count_withheld(folder):
    """Say how many averages of honest sites are withheld because one of them costs too much."""
    parts = []
    for epsilon in HONEST:
        count, study, hub = 0, make_study("Average"), SigningKey.generate()
        for seed in range(HONEST_REPEATS):
            *sites, public_table, test_table = read_tables(1000 + seed)
            place = Path(tempfile.mkdtemp(dir=folder))
            made, _ = train(study, sites, place, epsilon)
            records = encode(study, public_table), encode(study, test_table)
            reasons = judge(study, made, *records, hub)[1].find_reasons()
            count += any(reason.startswith("Without") for reason in reasons)
        parts.append(f"{count} of {HONEST_REPEATS} at epsilon = {epsilon:g}")
    return ", ".join(parts)


def error_alone(seed):
    """Return the error of a model of the public records alone."""
    *_, public_table, test_table = read_tables(seed)
    study = make_study("Average")
    learner = study.build(EPSILON).set_params(epsilon=np.inf)
    model = baselines.public_only(learner, encode(study, public_table))
    return error_of(model, encode(study, test_table))


if __name__ == "__main__":
    sys.exit(main())
