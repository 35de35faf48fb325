"""Measure what one wrong site of four does to a release, with and without the hub's checks.

    CONSILIENCE_DATA=FOLDER python benchmarks/poisoning.py [--repeats N] [--pages NAME ...]

Four sites and a hub with few public records learn to tell two kinds of trees of Covertype apart.
The fourth site signs what it likes. Writes benchmarks/poisoning.md, and poisoning_more.md with
totals, a trusted hub and few test records. Noise is not seeded, because no
hub would take such contributions: numbers vary within the stated errors.
"""

import argparse
import json
import os
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pandas as pd

from consilience import Budget, Ledger, Study
from consilience.aggregators.outliers import find_far, find_heavy
from consilience.errors import ConsilienceError
from consilience.evaluation import baselines
from consilience.files.contribution import Contribution, rebuild
from consilience.files.release import Release
from consilience.files.sealed import Sealed, SigningKey
from consilience.privacy.accounting import events_to_json
from consilience.privacy.spending import Account
from consilience.study.collect import Publication, collect
from consilience.study.withholding import Candidate, allowed_rise
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
    '[learner]\nname = "PrivateLogisticRegression"\nregularization = 1e-4',
)
FOREST = 'neighbours = "add-remove"', '[learner]\nname = "PrivateForestClassifier"'
# At a trusted hub, whose noise is once for each record: with this ridge it costs little.
TRUSTED = (
    'neighbours = "replace-one"\nhub = "trusted"',
    '[learner]\nname = "PrivateLogisticRegression"\nregularization = 1e-3',
    f'[aggregator]\nname = "Average"\nweights = "equal"\nepsilon = {EPSILON}\ndelta = 1e-6',
)
METHODS = {  # title: privacy, learner, aggregator
    "Average": (*LINEAR, '[aggregator]\nname = "Average"'),
    "Average, robust (median)": (*LINEAR, '[aggregator]\nname = "Average"\nrobust = "median"'),
    "votes of linear models": (*LINEAR, '[aggregator]\nname = "WeightedVote"'),
    "votes of forests": (*FOREST, '[aggregator]\nname = "WeightedVote"'),
    "PublicBlend": (*LINEAR, '[aggregator]\nname = "PublicBlend"'),
    "FeatureMethod": (*LINEAR, '[aggregator]\nname = "FeatureMethod"'),
    "SiteBoosting": (*LINEAR, '[aggregator]\nname = "SiteBoosting"'),
    "Total of Moments": (
        'neighbours = "replace-one"\ndelta = 1e-6',
        '[statistic]\nname = "Moments"',
        "",
    ),
    "Average, trusted hub, first release": TRUSTED,
    "Average, trusted hub, later release": TRUSTED,
}
MORE = ("Total of Moments", *(method for method in METHODS if "trusted" in method))
LATER = "Average, trusted hub, later release"  # the others had one before the fourth site came


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
{learner}
{aggregator}
{files}
""")


def read_tables(seed, n_test=N_TEST, n_fresh=0):
    """Return the tables of the sites, the public records, the test records and any further ones."""
    table = pd.read_parquet(DATA / "covertype.parquet", columns=[*COLUMNS, "Cover_Type"])
    table = table[table.Cover_Type.isin(KINDS)]
    sizes = [N_RECORDS] * N_SITES + [N_PUBLIC, n_test] + [n_fresh] * bool(n_fresh)
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
        ledger.allow("site", Budget(epsilon=1e4, delta=0.1, neighbours=study.neighbours))
        keys.append(SigningKey.generate())
        sender = {"site": f"site {number}", "signing": keys[-1], "dataset": "site"}
        made.append(study.train(table, ledger, epsilon=epsilon, **sender))
    return made, keys


# ------------------------------------------------------------------ what the fourth site signs


def find_part(tensors):
    """Return the name of the numbers that a liar changes, and which of them; none of trees."""
    if "coef" in tensors:
        return "coef", slice(None)
    if "total" in tensors:  # products of columns, and then those with the label
        columns = len(COLUMNS) + 1
        return "total", slice(columns * (columns + 1) // 2, None)
    return None, None


def change(tensors, change_part):
    """Return the tensors with other numbers in the part that a liar changes."""
    name, part = find_part(tensors)
    changed = np.array(tensors[name], dtype=np.float64)
    changed[part] = change_part(changed[part])
    if tensors[name].dtype == np.int64:
        changed = np.clip(changed, -(2.0**62), 2.0**62).astype(np.int64)
    return {**tensors, name: changed}


def flip(tensors, scale):
    """Return a model that says the opposite, `scale` times as loudly."""
    if "coef" in tensors:
        return {name: one * -scale for name, one in tensors.items()}
    if "total" in tensors:
        return change(tensors, lambda one: one * -scale)
    counts = tensors["counts"][..., ::-1].astype(float) * scale
    counts = np.clip(counts, -(2.0**59), 2.0**59).astype(np.int64)
    return {**tensors, "counts": np.ascontiguousarray(counts)}


def find_scale(is_allowed):
    """Return the largest scale that is allowed, within 1 %."""
    low, high = 1e-3, 1e6
    while high > 1.01 * low:
        middle = np.sqrt(low * high)
        low, high = (middle, high) if is_allowed(middle) else (low, middle)
    return low


def loud(contribution, knows):
    return flip(contribution.sealed.tensors, 1000.0), {}


def huge(contribution, knows):
    tensors = contribution.sealed.tensors
    if "coef" in tensors:
        return {name: -np.sign(one) * 1e308 for name, one in tensors.items()}, {}
    return flip(tensors, 1e300), {}


def many(contribution, knows, size=2**59):
    """Claim many records, with the events that so many would have."""
    tensors, facts = flip(contribution.sealed.tensors, 1.0), {"size": size}
    if "size" in tensors:
        tensors["size"] = np.array(size)
        return tensors, facts
    if "total" in tensors:  # its noise does not depend on their number
        return tensors, facts
    learner = rebuild({**contribution.sealed.facts, "size": size}, contribution.sealed.tensors)
    shapes = {name: one.shape for name, one in tensors.items()}
    return tensors, {**facts, "events": events_to_json(learner.implied(shapes).events)}


def precise(contribution, knows):
    """Claim hardly any noise."""
    events = json.loads(contribution.sealed.facts["events"])
    tensors = flip(contribution.sealed.tensors, 1.0)
    if not events:  # exact, for a trusted hub
        return tensors, {"events": '[{"kind": "gaussian", "sigma": 1e-300}]'}
    if "coef" in tensors:
        events[0]["strong_convexity"] = 1e300
    elif "total" in tensors:
        events[0]["sigma"] = 1e-300
    else:
        events[0]["parts"][-1]["scale"] = 1e-300
        tensors["variance"] = np.array(0.0)
    return tensors, {"events": json.dumps(events, sort_keys=True, separators=(",", ":"))}


def allowed(contribution, knows):
    """Say the opposite as loudly as the hub accepts."""
    tensors = contribution.sealed.tensors
    if find_part(tensors)[0] is None:
        return flip(tensors, 1.0), {}
    return flip(tensors, find_scale(lambda scale: knows.accept(flip(tensors, scale)))), {}


def unseen(contribution, knows):
    """Say the opposite as loudly as raises no alert, knowing what all others handed in."""
    tensors = contribution.sealed.tensors
    if find_part(tensors)[0] is None:
        return flip(tensors, 1.0), {}

    def is_unseen(scale):
        accepted = knows.accept(flip(tensors, scale))
        return accepted is not None and not knows.sees(accepted.learner)

    return flip(tensors, find_scale(is_unseen)), {}


def sparse(contribution, knows):
    """Change one number alone: the largest one, or one tree of a forest."""
    tensors = {name: one.copy() for name, one in contribution.sealed.tensors.items()}
    name, _ = find_part(tensors)
    if name is None:
        tensors["counts"][0] = tensors["counts"][0, ..., ::-1]
        return tensors, {}

    def spoil(scale):
        def spoil_part(values):
            flat = values.copy().reshape(-1)
            largest = np.argmax(np.abs(flat))
            flat[largest] *= -scale
            return flat.reshape(values.shape)

        return change(tensors, spoil_part)

    return spoil(find_scale(lambda scale: knows.accept(spoil(scale)))), {}


def quiet(contribution, knows):
    return flip(contribution.sealed.tensors, 1.0), {}


def searched(contribution, knows):
    """Look for the worst model that a hub publishes, knowing all others and the test records."""
    tensors = contribution.sealed.tensors
    name, part = find_part(tensors)
    if name is None:
        return flip(tensors, 1.0), {}
    random = np.random.default_rng(0)
    best, most = tensors, knows.worth(tensors, -1.0)
    values = np.asarray(tensors[name], dtype=np.float64)[part]
    length = np.linalg.norm(values) / np.sqrt(values.size)
    step = 0.3
    for _ in range(SEARCHED):
        scale = step * length * random.choice([0.2, 1.0, 3.0])
        tried = change(best, lambda one, scale=scale: one + scale * random.normal(size=one.shape))
        if "intercept" in best:
            shift = scale * random.normal(size=best["intercept"].shape)
            tried["intercept"] = best["intercept"] + shift
        found = knows.worth(tried, most)
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
FEW, FEW_REPEATS = (100, 500), 6  # test records
N_FRESH = 20_000  # records that nobody of the study has
HARDEST = ("sign flipped, honest length", "the worst that is published, by search")


def forge(contribution, key, attack, knows):
    """Return the file that the fourth site signs, and its learner as if nobody had checked it."""
    tensors, changes = attack(contribution, knows)
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
class Hub:
    """A hub as far as releases are concerned; where it is trusted, with a ledger of its own."""

    study: Study
    public: Public
    test: Public
    folder: Path
    key: SigningKey = field(default_factory=SigningKey.generate)
    last: Release | None = None

    def __post_init__(self):
        if self.study.draws_noise:
            unit, neighbours = self.study.hidden
            self.ledger = Ledger(self.folder / f"hub-{self.key.public[:16]}.ledger")
            limit = Budget(epsilon=1e4, delta=0.1, unit=unit, neighbours=neighbours)
            self.ledger.allow(self.study.digest, limit)

    def make(self, contributions):
        """Return the release of these contributions."""
        account = Account()
        if self.study.draws_noise:
            account = Account(self.ledger, self.study.digest)
        records = {"public": self.public, "test": self.test}
        publication = Publication(self.key, account=account)
        return collect(self.study, contributions, **records, publication=publication)

    def judge(self, contributions):
        """Return a release, what the hub asks before it publishes it, and whom it names."""
        release, far, heavy = self.make(contributions), {}, {}
        learners, names = [one.learner for one in contributions], self.study.schema.feature_names
        if not self.study.trusted:
            far = find_far(learners, self.public, self.test, names=names)
            heavy = find_heavy(release.ensemble)
        named = [
            {contributions[place].site: text for place, text in places.items()}
            for places in (far, heavy)
        ]
        records = self.last, self.public, self.test
        return release, Candidate(self.study, release, contributions, *named, *records), far

    def publish(self, contributions):
        """Return a release, whether the hub withholds it and whether it names the fourth site."""
        release, candidate, named = self.judge(contributions)
        return release.ensemble, bool(candidate.find_reasons()), WRONG in named


@dataclass
class Knowledge:
    """All that the fourth site could know: the others' files, the records and what the hub does."""

    hub: Hub
    others: list
    own: Contribution
    key: SigningKey

    def accept(self, tensors):
        """Return the contribution with such numbers if the hub accepts it, or None."""
        facts = {k: v for k, v in self.own.sealed.facts.items() if k not in ("key", "tensors")}
        body = Sealed.seal("contribution", facts, tensors, self.key).to_bytes()
        return accept(self.hub.study, body)

    def sees(self, learner):
        """Tell whether a learner raises an alert."""
        if self.hub.study.trusted:
            return False
        members = [one.learner for one in self.others]
        return WRONG in find_far([*members, learner], self.hub.public, self.hub.test)

    def worth(self, tensors, most):
        """Return the error of the release with such numbers; -1 if it is not over `most`.

        Or if the hub does not publish it.
        """
        accepted = self.accept(tensors)
        if accepted is None:
            return -1.0
        every, hub = [*self.others, accepted], self.hub
        if not hub.study.draws_noise:
            learners = [one.learner for one in every]
            if combine_unchecked(hub.study, learners, hub.public, hub.test) <= most:
                return -1.0
        made, withheld, _ = hub.publish(every)
        return -1.0 if withheld else error_of(made, hub.test)


def accept(study, body):
    """Return a contribution if the study accepts it, or None."""
    try:
        return study.accept(Contribution.load(body, trusted=study.trusted))
    except ConsilienceError:
        return None


def run(seed, folder, methods=METHODS, attacks=None, n_test=N_TEST, n_fresh=0):
    """Return rows of one repeat."""
    tables = read_tables(seed, n_test, n_fresh)
    sites, public_table, test_table = tables[:N_SITES], tables[N_SITES], tables[N_SITES + 1]
    fresh_table = tables[-1]  # the test records themselves if there are no others
    rows, trained = [], {}
    for method in methods:
        study = make_study(method)
        public, test, fresh = (
            encode(study, table) for table in (public_table, test_table, fresh_table)
        )
        kind = METHODS[method][:2]
        if kind not in trained:
            trained[kind] = train(study, sites, folder)
        made, keys = trained[kind]
        # One training serves all methods; each study is named in its own signed copies.
        made = [restamp(one, study, key) for one, key in zip(made, keys, strict=True)]
        hub = Hub(study, public, test, folder)
        if method == LATER:
            hub.last = hub.make(made[:WRONG])
        honest, withheld, named = hub.publish(made)
        errors = error_of(honest, test), error_of(honest, fresh)
        rows.append((method, "none", errors[0], *errors, withheld, False, named))
        members = [one.learner for one in made[:WRONG]]
        knows = Knowledge(hub, made[:WRONG], made[WRONG], keys[WRONG])
        for title, attack in (attacks or ATTACKS).items():
            body, learner = forge(made[WRONG], keys[WRONG], attack, knows)
            before = combine_unchecked(study, [*members, learner], public, test)
            accepted = [*made[:WRONG], accept(study, body)]
            accepted = [one for one in accepted if one is not None]
            after, withheld, named = hub.publish(accepted)
            errors = error_of(after, test), error_of(after, fresh)
            refused = len(accepted) < N_SITES
            rows.append((method, title, before, *errors, withheld, refused, named))
    columns = "method attack before after fresh withheld refused named".split()
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
    for method in dict.fromkeys(table.method):
        mine = table[table.method == method]
        own = honest[method]
        error = own.std(ddof=1) / np.sqrt(len(own)) if len(own) > 1 else np.nan
        lines.append(
            f"| {method} | none | {own.mean():.3f} ± {error:.3f} | "
            f"{own.mean():.3f} | | "
            f"{describe_withheld(mine[mine.attack == 'none'].withheld) or 'published'} |"
        )
        for attack in ATTACKS:
            rows = mine[mine.attack == attack].set_index("seed")
            shown = rows[~rows.withheld]
            failed = rows.before.isna().mean()
            before = "no release" if failed == 1 else f"{rows.before.mean():.3f}"
            after, rise = "—", "—"
            if len(shown):
                after = f"{shown.after.mean():.3f}"
                rises = shown.after - own[shown.index]
                rise = f"{rises.mean():+.3f} ({rises.max():+.3f})"
            what = [
                f"refused at the door in {rows.refused.sum()} of {len(rows)}"
                if rows.refused.any()
                else "accepted",
                describe_withheld(rows.withheld),
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
    "published releases with those of four honest sites, repeat by repeat: the mean, and the "
    "largest in brackets.\n\n"
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


def describe_withheld(withheld):
    return f"withheld in {withheld.sum()} of {len(withheld)}" if withheld.any() else ""


MORE_PAGE = (
    "# One wrong site of four: totals, a trusted hub, few test records\n\n"
    "Made by `python benchmarks/poisoning.py --pages more`; do not edit, run it again. Data, sites "
    "and attacks are those of [poisoning.md](poisoning.md); repeats of the first table: {repeats}, "
    "of the second: {few_repeats}. Beside the mean over repeats, a rise has the largest one in "
    "brackets.\n\n"
    "| method | attack | before | published | rise | the hub |\n"
    "|---|---|---|---|---|---|\n"
    "{rows}\n\n"
    "Of sums, a liar changes the products with the label. A trusted hub draws the noise itself "
    "(epsilon = {epsilon:g} for each record, ridge 1e-3), and only when a coordinator asks: the "
    "release is then compared with public records alone, with guessing, and with the release "
    "before it, which here is that of the three honest sites. Nothing that is computed from exact "
    "contributions may be shown, so nobody is named and nobody is left out in turn. What a "
    "wrong site costs such a study is bounded by these comparisons alone: hardly in a first "
    "release, and in a later one by what the noise leaves to be seen, of honest releases too.\n\n"
    "## Few test records\n\n"
    "Average, the two attacks that are hardest to see. A release waits if "
    'any one site costs it more than "allowed" on the test records. "On them" is the rise of the '
    'error on the test records, "on others" on {fresh:,} records that nobody of the study has; '
    'in brackets the largest. "Honest" counts releases of four honest sites that wait, at epsilon '
    "= {budgets}.\n\n"
    "| test records | allowed | attack | on them | on others | withheld | honest |\n"
    "|---|---|---|---|---|---|---|\n"
    "{few}\n\n"
    "The fourth site knows the test records, and finds a model that costs little on them and more "
    "on others: the fewer there are, the more.\n"
)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--pages", nargs="+", choices=WRITERS, default=list(WRITERS))
    asked = parser.parse_args()
    baselines.MOST_COMPARED = 0  # other aggregators are not compared here, which takes longest
    with tempfile.TemporaryDirectory() as folder:
        for page in asked.pages:
            WRITERS[page](asked.repeats, folder)


def repeat(repeats, folder, methods):
    """Return the rows of all repeats."""
    parts = []
    for seed in range(repeats):
        parts.append(run(seed, Path(tempfile.mkdtemp(dir=folder)), methods))
        print(f"repeat {seed + 1} of {repeats}", flush=True)
    return pd.concat(parts)


def write_methods(repeats, folder):
    """Write the page on methods whose noise is drawn at the sites."""
    table = repeat(repeats, folder, [one for one in METHODS if one not in MORE])
    honest = ", ".join(
        f"{count} of {HONEST_REPEATS} at epsilon = {epsilon:g}"
        for epsilon, count in count_withheld(folder).items()
    )
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
        "alone": np.mean([error_alone(seed) for seed in range(repeats)]),
        "rows": "\n".join(describe(table)),
    }
    write_page(ROOT / "benchmarks" / "poisoning.md", PAGE.format(**facts))


def write_more(repeats, folder):
    """Write the page on totals, a trusted hub, and few test records."""
    table, few = repeat(repeats, folder, MORE), run_few(folder)
    facts = {
        "repeats": repeats,
        "epsilon": EPSILON,
        "few_repeats": FEW_REPEATS,
        "fresh": N_FRESH,
        "budgets": ", ".join(f"{one:g}" for one in HONEST),
        "rows": "\n".join(describe(table)),
        "few": "\n".join(few),
    }
    write_page(ROOT / "benchmarks" / "poisoning_more.md", MORE_PAGE.format(**facts))


WRITERS = {"methods": write_methods, "more": write_more}


def count_withheld(folder, n_test=N_TEST, epsilons=HONEST):
    """Return how many averages of honest sites are withheld because one of them costs too much."""
    counts = {}
    for epsilon in epsilons:
        count, study = 0, make_study("Average")
        for seed in range(HONEST_REPEATS):
            *sites, public_table, test_table = read_tables(1000 + seed, n_test)
            place = Path(tempfile.mkdtemp(dir=folder))
            made, _ = train(study, sites, place, epsilon)
            hub = Hub(study, encode(study, public_table), encode(study, test_table), place)
            reasons = hub.judge(made)[1].find_reasons()
            count += any(reason.startswith("Without") for reason in reasons)
        counts[epsilon] = count
    return counts


def run_few(folder):
    """Return rows on what an average suffers where there are few test records."""
    lines = []
    for n_test in FEW:
        parts = []
        for seed in range(FEW_REPEATS):
            place = Path(tempfile.mkdtemp(dir=folder))
            attacks = {title: ATTACKS[title] for title in HARDEST}
            parts.append(run(100 + seed, place, ["Average"], attacks, n_test, N_FRESH))
        table = pd.concat(parts).set_index("seed")
        honest = table[table.attack == "none"]
        waits = count_withheld(folder, n_test)
        said = ", ".join(f"{waits[epsilon]}" for epsilon in HONEST)
        for title in HARDEST:
            mine = table[table.attack == title]
            shown = mine[~mine.withheld]
            cells = ["—", "—"]
            if len(shown):
                rises = [shown[one] - honest[one][shown.index] for one in ("after", "fresh")]
                cells = [f"{one.mean():+.3f} ({one.max():+.3f})" for one in rises]
            lines.append(
                f"| {n_test:,} | {allowed_rise(n_test):.3f} | {title} | {cells[0]} | {cells[1]} | "
                f"{mine.withheld.sum()} of {len(mine)} | {said} of {HONEST_REPEATS} |"
            )
        print(f"{n_test} test records", flush=True)
    return lines


def error_alone(seed):
    """Return the error of a model of the public records alone."""
    *_, public_table, test_table = read_tables(seed)
    study = make_study("Average")
    learner = study.build(EPSILON).set_params(epsilon=np.inf)
    model = baselines.public_only(learner, encode(study, public_table))
    return error_of(model, encode(study, test_table))


if __name__ == "__main__":
    sys.exit(main())
