"""Measure what shared noise costs sites, keyholders and the hub, and how wide the noise of all is.

    python benchmarks/shared_noise.py

A blind study of `SITES` sites, of which `SHARES` together draw a whole noise, counts classes in the
leaves of public trees: 625 trees of 32 leaves, five classes, 100,000 numbers. Every part runs by
the code that sites, keyholders and hubs run, on files in a temporary folder, and each measurement
in a process of its own, forked after everything was imported and used once. Nothing of the study
is kept. Writes benchmarks/shared_noise.md.
"""

from __future__ import annotations

import math
import os

os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"))

import platform
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from opendp.domains import atom_domain, vector_domain
from opendp.measurements import make_gaussian
from opendp.metrics import l2_distance
from rich.console import Console

from consilience import Budget, Ledger
from consilience.blind.masked import KIND, Batch, MaskedFile, Masking, Opening, mask, unmask
from consilience.blind.pads import Context, SealKey, Words, add_words
from consilience.blind.roster import Card, Roster, check_cards
from consilience.files.durable import write_durably
from consilience.files.sealed import Sealed, SealedFile, SigningKey
from consilience.keyholder.keyholder import Keyholder
from consilience.privacy.accounting import SharedSum
from consilience.privacy.mechanisms import Noise, noisy_sum
from consilience.privacy.spending import Account, Spending
from consilience.privacy.vector_noise import calibrate_sum
from consilience.statistics.base import MASKED, Statistic
from consilience.study.check import build_for
from consilience.study.study import Study
from pages import write_page

HERE = Path(__file__).resolve().parent
SITES, SHARES = 100, 80
TREES, DEPTH, CLASSES = 625, 5, 5
SMALLEST = 3, 2, 1  # sites, shares and trees of a study whose files take next to no memory
FEATURES, RECORDS = 20, 200
KEYHOLDERS = 3
REPEATS = 5  # of the hub, of OpenDP's draw and of what keyholders and the hub stand beside
TOTALS = 10  # of shares alone, whose variance is measured besides
EPSILON, DELTA = 1.0, 1e-6


@dataclass(frozen=True)
class Cost:
    """What some work took: processor time and elapsed seconds, and memory on top of the rest."""

    processor: float
    elapsed: float
    memory: float  # MB


def measure(work: Callable[..., Any], *given: Any) -> tuple[Any, Cost]:
    """Return what `work` returns and what it cost, in a fork of its own."""
    fork = get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    process = fork.Process(target=_measured, args=(theirs, work, given))
    process.start()
    theirs.close()  # so that a process that fails does not leave this one waiting
    found: tuple[Any, Cost] = ours.recv()
    process.join()
    return found


def _measured(answer: Connection, work: Callable[..., Any], given: tuple[Any, ...]) -> None:
    held, begun, used = _peak(), time.perf_counter(), time.process_time()
    made = work(*given)
    cost = time.process_time() - used, time.perf_counter() - begun, _peak() - held
    answer.send((made, Cost(*cost)))


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def median(costs: list[Cost]) -> Cost:
    """Return the median of each number."""
    names = ("processor", "elapsed", "memory")
    return Cost(*(statistics.median(getattr(one, name) for one in costs) for name in names))


# ------------------------------------------------------------------------------ who takes part


class Party:
    """The sites, keyholders and hub of one blind study, and the folder of their files."""

    def __init__(self, folder: Path, n_sites: int, shares: int, n_trees: int) -> None:
        self.folder = folder
        folder.mkdir()
        self.places = [folder / f"keyholder-{k}" for k in range(KEYHOLDERS)]
        keyholders = [Keyholder.create(place) for place in self.places]
        keys = [each.key.public for each in keyholders]
        self.study = Study.from_text(study_text(keys, n_sites, shares, n_trees))
        assert self.study.blind is not None
        self.rule = self.study.blind
        self.keys = [SigningKey.generate() for _ in range(n_sites)]
        self.hub, self.seal = SigningKey.generate(), SealKey.generate()
        listed = [(f"site {i}", key.public, "nobody") for i, key in enumerate(self.keys)]
        roster = Roster.make(self.study.reference, listed, self.hub)
        cards = [each.countersign(roster, self.rule, self.hub.public) for each in keyholders]
        cards.append(Card.make(roster, self.seal.public, self.hub))
        holders = check_cards(roster, self.rule, self.hub.public, cards)
        self.masking = Masking(roster, self.rule, holders, tuple(roster.names))

    def statistic(self) -> Statistic:
        """Return what every site adds up."""
        made = build_for(self.study, EPSILON)
        assert isinstance(made, Statistic)
        return made

    def files(self) -> list[Path]:
        """Return the masked files."""
        return sorted(self.folder.glob("*.safetensors"))


def study_text(keyholders: list[str], n_sites: int, shares: int, n_trees: int) -> str:
    columns = ",".join(f'{{kind="numeric",name="c{i}",low=0.0,high=1.0}}' for i in range(FEATURES))
    named = ", ".join(f'"{key}"' for key in keyholders)
    return f"""
[study]
name = "shared-noise"
[privacy]
epsilon_min = {EPSILON}
epsilon_max = {EPSILON}
delta = {DELTA}
min_sites = {n_sites}
hub = "blind"
[schema]
label = "y"
classes = {list(range(CLASSES))}
columns = [{columns}]
[statistic]
name = "LeafCounts"
n_trees = {n_trees}
max_depth = {DEPTH}
[blind]
shares = {shares}
spare = {n_sites - shares}
keyholders = [{named}]
"""


def table(i: int) -> pd.DataFrame:
    generator = np.random.default_rng(i)
    made: dict[str, Any] = {f"c{j}": generator.random(RECORDS) for j in range(FEATURES)}
    return pd.DataFrame({**made, "y": generator.integers(0, CLASSES, RECORDS)})


# ------------------------------------------------------------------------------ what is measured


def train(party: Party, i: int) -> None:
    """A site's whole part, from its table to its file: sum, charges, share, pads, signature."""
    ledger = Ledger(party.folder / f"{i}.ledger")
    for dataset in ("ward", "alone"):
        ledger.allow(dataset, Budget(epsilon=1000.0, delta=1e-3))
    spending = Spending(Account(ledger, "ward"), "alone")
    content = party.study.mask_sum(
        table(i),
        spending,
        party.masking,
        epsilon=EPSILON,
        site=f"site {i}",
        signing=party.keys[i],
    )
    write_durably(party.folder / f"{i}.safetensors", content)


def train_plainly(party: Party, i: int) -> None:
    """A site that hands over its exact sum as an array, with no noise, pads, charge or check."""
    exact = party.statistic().set_params(epsilon=math.inf)
    exact.sharing, exact.schema = None, party.study.schema
    np.save(party.folder / f"{i}.npy", exact.fit(table(i)).total_)


def draw(party: Party) -> None:
    """A site's share of the noise alone."""
    event, widths = share_of(party)
    noisy_sum(np.zeros(event.length, np.int64), widths, event=event, source=Noise().open())


def pad(party: Party) -> None:
    """A site's pads alone, with their seeds sealed."""
    length = party.statistic().length
    digest, key = party.study.digest, party.keys[0].public
    context = Context(
        study=digest,
        roster=party.masking.roster.digest,
        site="site 0",
        key=key,
        sequence=1,
        nonce=os.urandom(32).hex(),
        statistic="LeafCounts",
        length=length,
    )
    mask(np.zeros(length, np.int64), context, party.masking.holders)


def draw_by_opendp(party: Party) -> None:
    """OpenDP's exact draw of a site's share, of the same width, from a list of zeros."""
    event, widths = share_of(party)
    metric, domain = l2_distance(T=float), vector_domain(atom_domain(T="i64"))
    noise = make_gaussian(domain, metric, scale=event.drawn_sigma * float(widths[0]))
    noise([0] * event.length)


def share_of(party: Party) -> tuple[SharedSum, Any]:
    """Return the event of a share and how many grains wide noise of width 1 is."""
    statistic = party.statistic()
    event = statistic.plan_noise().event
    assert isinstance(event, SharedSum)
    return event, 1 / (statistic.weights() * statistic.step)


def add_plainly(party: Party) -> Words:
    """Read plain arrays and add them up."""
    paths = sorted(party.folder.glob("*.npy"))
    return add_words((np.load(path) for path in paths), party.statistic().length)


def read(party: Party) -> None:
    """Read the sites' signed files, with the checks of every signed file, and add up the words."""
    loaded = (Sealed.load(path, KIND).tensors[MASKED] for path in party.files())
    add_words(loaded, party.statistic().length)


def acknowledge_and_open(party: Party, k: int) -> None:
    """A keyholder's whole part: it acknowledges every file by its facts and opens the batch."""
    keyholder = Keyholder(party.places[k])
    files = [MaskedFile.of(SealedFile(path, KIND).hollow) for path in party.files()]
    for file in files:
        keyholder.acknowledge(file)
    opening = keyholder.open(Batch.of(files))
    opening.sealed.save(party.places[k] / "opening.safetensors")


def open_total(party: Party) -> Words:
    """The hub's part: it reads files and openings and takes the pads off their sum."""
    loaded = [Sealed.load(path, KIND) for path in party.files()]
    files = [(MaskedFile.of(one), one.tensors[MASKED]) for one in loaded]
    openings = [
        Opening.read((place / "opening.safetensors").read_bytes()) for place in party.places
    ]
    return unmask(files, openings, party.rule, (party.hub.public, party.seal))


WORKS: tuple[tuple[Callable[..., Any], tuple[int, ...]], ...] = (
    (draw, ()),
    (pad, ()),
    (draw_by_opendp, ()),
    (add_plainly, ()),
    (read, ()),
    (acknowledge_and_open, (0,)),
    (open_total, ()),
    (train_plainly, (0,)),
    (train, (0,)),  # the last: another file of a site is no part of its batch
)


# -------------------------------------------------------------------------------------- the report


def play(party: Party, run: Callable[..., tuple[Any, Cost]]) -> tuple[dict[str, Cost], Words]:
    """Run all parts, what is compared in turn; return the medians and the noise of the total."""
    costs: dict[str, list[Cost]] = {}
    totals: dict[str, Words] = {}

    def note(work: Callable[..., Any], *given: Any) -> None:
        made, cost = run(work, party, *given)
        costs.setdefault(work.__name__, []).append(cost)
        totals[work.__name__] = made

    n_sites = len(party.keys)
    for i in range(n_sites):
        note(train, i)
        note(train_plainly, i)
        if i % -(-n_sites // REPEATS) == 0:
            for work in (draw, pad, draw_by_opendp):
                note(work)
    for k in range(KEYHOLDERS):
        note(acknowledge_and_open, k)
        note(read)
        note(add_plainly)
    for _ in range(REPEATS):
        note(open_total)
        note(read)
        note(add_plainly)
    noise = totals["open_total"] - totals["add_plainly"]
    return {name: median(each) for name, each in costs.items()}, noise


def _directly(work: Callable[..., Any], *given: Any) -> tuple[Any, Cost]:
    return work(*given), Cost(0.0, 0.0, 0.0)


def main() -> None:
    console = Console()
    load = os.getloadavg()[0]
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="shared-noise-") as place:
        # Once in this process, so that nothing is compiled or loaded in the forks.
        first = Party(Path(place) / "first", *SMALLEST)
        play(first, _directly)
        least = {work.__name__: measure(work, first, *given)[1].memory for work, given in WORKS}
        party = Party(Path(place) / "study", SITES, SHARES, TREES)
        size = party.statistic().length
        whole, noise = play(party, measure)
        costs = {
            name: replace(cost, memory=cost.memory - least[name]) for name, cost in whole.items()
        }
        lines = [*cost_lines(costs), *noise_lines(party, noise)]
        megabytes = party.files()[0].stat().st_size / 1e6
    packages = ", ".join(f"{name} {version(name)}" for name in ("numpy", "opendp", "cryptography"))
    head = [
        "# What shared noise costs",
        "",
        "Made by `python benchmarks/shared_noise.py`; do not edit, run it again.",
        "",
        f"- A blind study of {SITES} sites with {RECORDS} records each, every one of which hands "
        f"over {size:,} numbers in a file of {megabytes:.2f} MB; the noise of {SHARES} sites is a "
        f"whole one (ε = {EPSILON:g}, δ = {DELTA:g}); pad holders: {KEYHOLDERS} keyholders and the "
        "hub",
        f"- Python {platform.python_version()}, {packages}; {os.cpu_count()} cores, one thread, "
        f"load average {load:.1f} before the run and {os.getloadavg()[0]:.1f} after it, "
        f"{time.perf_counter() - begun:.0f} s in all",
        "- each measurement in a process of its own, forked when everything was imported and used "
        f"once; medians: of {SITES} sites, of {KEYHOLDERS} keyholders, of {REPEATS} draws and "
        "openings, in turn with what they stand beside",
        "- processor: seconds of processor time, by which ratios are formed; memory: the peak of "
        "what is resident, in MB, beyond what the same work takes in a study of three sites and "
        f"{2**DEPTH * CLASSES} numbers",
        "",
    ]
    write_page(HERE / "shared_noise.md", "\n".join([*head, *lines]))
    console.print((HERE / "shared_noise.md").read_text(), markup=False)


ROWS = (
    ("a site", "train", "OpenDP's draw of its share", "draw_by_opendp", 1.5),
    ("a site", "train", "adding up and saving an array", "train_plainly", None),
    ("a keyholder", "acknowledge_and_open", "reading the signed files", "read", 5.0),
    ("a keyholder", "acknowledge_and_open", "adding plain arrays", "add_plainly", None),
    ("the hub", "open_total", "reading the signed files", "read", 5.0),
    ("the hub", "open_total", "adding plain arrays", "add_plainly", None),
)
PARTS = {
    "train_plainly": "adding up its records",
    "draw": "its share of the noise",
    "pad": "pads and sealed seeds",
}


def cost_lines(costs: dict[str, Cost]) -> list[str]:
    """Say what each role costs, and where a site's time goes."""
    rest = costs["train"].processor - sum(costs[name].processor for name in PARTS)
    return [
        "A site goes from its table to its file: it adds up, is charged in two accounts, draws its "
        "share, masks, signs, checks the file, and writes ledger and file durably. A keyholder "
        "reads the signed facts of all files, acknowledges each, opens the batch, and keeps all of "
        "that durably. The hub reads files and openings, checks them, and takes the pads off their "
        "sum. To read the signed files is to check signature and digest of each, as is done with "
        "every signed file, and to add up the words; plain arrays are read by `numpy.load` and "
        "checked by nobody.",
        "",
        "| | processor, s | elapsed, s | memory | beside | processor, s | elapsed, s | memory "
        "| ratio | target | |",
        "|---|---:|---:|---:|---|---:|---:|---:|---:|---:|---|",
        *(_row(costs, *row) for row in ROWS),
        "",
        "Targets are of processor time. Elapsed, a keyholder takes "
        f"{costs['acknowledge_and_open'].elapsed / costs['read'].elapsed:.0f} × as long as reading "
        "the files: it waits for the disk after each acknowledgement, which is durable before "
        "anybody is told. The hub holds all files of a batch in memory; what stands beside it "
        "holds one at a time. Plain arrays carry no signature and no digest.",
        "",
        "## Where a site's time goes",
        "",
        "| part | processor, s |",
        "|---|---:|",
        *(f"| {text} | {costs[name].processor:.3f} |" for name, text in PARTS.items()),
        f"| the rest: charges, checks, signature, files | {rest:.3f} |",
        "",
    ]


def _row(
    costs: dict[str, Cost], name: str, work: str, beside: str, other: str, most: float | None
) -> str:
    ratio = costs[work].processor / costs[other].processor
    cells = [name, *_cells(costs[work]), beside, *_cells(costs[other]), f"{ratio:.2f}"]
    verdict = "" if most is None else "met" if ratio <= most else "**missed**"
    return f"| {' | '.join([*cells, '' if most is None else f'{most:g}', verdict])} |"


def _cells(cost: Cost) -> list[str]:
    return [f"{cost.processor:.3f}", f"{cost.elapsed:.3f}", f"{cost.memory:.1f}"]


def noise_lines(party: Party, noise: Words) -> list[str]:
    """Say how wide the noise of the total is beside what docs/guarantees/shared-noise.md states."""
    statistic = party.statistic()
    _, widths = share_of(party)
    whole = calibrate_sum(
        statistic.unit_reach(),
        widths,
        epsilon=EPSILON,
        delta=DELTA,
        unit=statistic.unit,
        neighbours=statistic.neighbours,
    )
    n, k = len(party.keys), party.rule.shares
    sigma = whole.sigma * float(widths[0])
    expected = n / k * sigma**2
    found = noise.astype(np.float64)
    error = math.sqrt(2 / len(found))
    ratio = float(np.mean(np.square(found))) / expected
    event, _ = share_of(party)
    zeros, more = np.zeros(event.length, np.int64), 0.0
    for _ in range(TOTALS):
        shares = (noisy_sum(zeros, widths, event=event, source=Noise().open()) for _ in range(n))
        total = add_words(shares, event.length).astype(np.float64)
        more += float(np.mean(np.square(total))) / expected / TOTALS
    mean = float(np.mean(found)) / math.sqrt(expected / len(found))
    return [
        "## How wide the noise of the total is",
        "",
        f"The total that the hub opened, less that of the plain arrays, is the noise of {n} sites: "
        f"{len(found):,} numbers, drawn by the code above. σ is the standard deviation that this "
        f"guarantee needs, {sigma:,.1f} grains, as computed for one sum without shares.",
        "",
        "| | in grains² | ratio to σ²N/k | standard error |",
        "|---|---:|---:|---:|",
        f"| stated: σ²N/k = σ² × {n}/{k} | {expected:.6g} | 1 | |",
        f"| measured: mean square | {ratio * expected:.6g} | {ratio:.4f} | {error:.4f} |",
        f"| measured: {TOTALS} further totals of shares alone | {more * expected:.6g} | {more:.4f} "
        f"| {error / math.sqrt(TOTALS):.4f} |",
        f"| if every site drew the whole noise: σ²N | {n * sigma**2:.6g} | {k} | |",
        "",
        f"The measured variance is {(ratio - 1) / error:+.1f} standard errors from what is stated, "
        f"the mean of the noise {mean:+.1f} from 0.",
    ]


if __name__ == "__main__":
    main()
