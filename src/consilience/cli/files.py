"""The commands `consilience contribution …` and `consilience release …`, for signed files."""

from __future__ import annotations

import io
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer
from typer import Argument, Option

import consilience as cs
from consilience.cli.command import Answer, Commands, show
from consilience.cli.options import (
    PREDICTIONS,
    FilePath,
    IdColumn,
    MappingPath,
    OwnTable,
    PredictionsPath,
    check_out,
    open_mapped,
)
from consilience.errors import SettingsError
from consilience.files.durable import write_durably
from consilience.text import quote

if TYPE_CHECKING:
    import pyarrow as pa

    from consilience.evaluation.adaptation import Adapted
    from consilience.files.certificate import Page
    from consilience.files.contribution import Contribution
    from consilience.files.release import Release
    from consilience.study.study import Study
    from consilience.tables.schema import Schema

contribution = Commands("Read and check the file that a site submits.")
release = Commands("Read, check and use what a hub publishes.")

ReleaseKey = Annotated[
    Path | None,
    Option(
        help="The key that signs releases; created if it does not exist. By default the study's "
        "own in your folder of settings."
    ),
]


@dataclass(frozen=True, kw_only=True)
class CostOptions:
    """What mistakes cost, of models of two classes: only the ratio matters."""

    cost_false_positive: Annotated[
        float, Option(help="What naming the second class costs where it is the first.")
    ] = 1.0
    cost_false_negative: Annotated[
        float, Option(help="What naming the first class costs where it is the second.")
    ] = 1.0


NO_COSTS = CostOptions()
Html = Annotated[Path | None, Option("--html", help="Also write the certificate as a web page.")]


@contribution.add("show", "contribution show contribution-0001.safetensors")
def show_contribution(file: FilePath, html: Html = None) -> Answer:
    """Print a contribution's certificate."""
    from consilience.files.certificate import of_contribution

    loaded = cs.Contribution.load(file, trusted=True)
    return _show(loaded, of_contribution(loaded), html)


@release.add("show", "release show release-0001.safetensors")
def show_release(file: FilePath, html: Html = None) -> Answer:
    """Print a release's certificate."""
    from consilience.files.certificate import of_release

    loaded = cs.Release.load(file)
    return _show(loaded, of_release(loaded), html)


def _show(loaded: Contribution | Release, page: Page, html: Path | None) -> Answer:
    if html is not None:
        check_out(html, ".html").write_text(page.as_html(), encoding="utf-8")
    return Answer({**loaded.sealed.facts, "digest": loaded.digest}, page.on_screen())


@contribution.add("verify", "contribution verify contribution-0001.safetensors")
def verify_contribution(
    file: FilePath,
    key: Annotated[
        str | None,
        Option(help="The site's public key. Without it, any key is accepted and printed."),
    ] = None,
) -> Answer:
    """Check signature, digests and guarantee offline; the exit code is 0 only if all are valid."""
    loaded = cs.Contribution.load(file, trusted=True).verify(key=key)
    named = quote(loaded.site, 100)
    signed = f"signed by {named} with"
    if key is None:  # whoever has any key can sign in any name
        signed = f"signed in the name of {named}, by whoever has"
    return _confirm(loaded, signed, site=loaded.site)


@release.add("verify", "release verify release-0001.safetensors --key 3f9a...")
def verify_release(
    file: FilePath,
    key: Annotated[
        str | None,
        Option(help="The hub's public key. Without it, any key is accepted and printed."),
    ] = None,
) -> Answer:
    """Check signature, digests and guarantee offline; the exit code is 0 only if all are valid."""
    return _confirm(cs.Release.load(file, key=key), "signed with")


def _confirm(loaded: Contribution | Release, signed: str, **more: str) -> Answer:
    key, guarantee = loaded.sealed.key, loaded.guarantee
    facts = {"holds": True, **more, "key": key, "digest": loaded.digest}
    text = f"Valid: {guarantee!r}, {signed} key {key}"
    return Answer({**facts, "guarantee": guarantee.as_dict()}, text)


@release.add("predict", "release predict release-0001.safetensors study.toml new.csv")
def predict(
    file: FilePath,
    study: Annotated[Path, Argument(help="The study file, or the site's folder.")],
    table: OwnTable,
    out: PredictionsPath = PREDICTIONS,
    ids: IdColumn = None,
    mapping: MappingPath = None,
    *,
    costs: CostOptions,
) -> Answer:
    """Predict for the records of a table on this machine; nothing is sent anywhere."""
    agreed, loaded = _load_agreed(file, study)
    check_out(out, ".csv", ".parquet", besides=table)
    if study.is_dir():
        records = cs.Site(study).open_table(agreed.name, table, mapping)
    else:
        records = open_mapped(table, agreed.schema, mapping)
    return write_predictions(loaded, agreed.schema, WithIds(records, ids), out, costs)


def _load_agreed(file: Path, study: Path) -> tuple[Study, Release]:
    """Return a study, from its file or a site's folder, and a release that fits it."""
    from consilience.study.check import check_release

    loaded = cs.Release.load(file)
    name = str(loaded.study["name"])
    if study.is_dir():
        site = cs.Site(study)
        agreed, key = site.study(name), site.hub_key(name)
        if key is not None:
            loaded.verify(key=key)
    else:
        agreed = cs.Study.load(study)
    if agreed.reference != loaded.study:
        raise SettingsError(
            f"The release was made for another study than {str(study)!r}, or for another version "
            f"of it. Nothing was done. Give the file of study {name!r}."
        )
    return agreed, check_release(agreed, loaded)


@release.add("export", "release export release-0001.safetensors study.toml --to onnx")
def export(
    file: FilePath,
    study: Annotated[Path, Argument(help="The study file, or the site's folder.")],
    to: Annotated[
        Literal["json", "python", "onnx"],
        Option(
            help="A scorecard in the columns' units; a Python module that makes a model of "
            "scikit-learn; or an ONNX graph of the table's columns."
        ),
    ] = "json",
    out: Annotated[
        Path | None, Option(help="The file to write; by default named like the release.")
    ] = None,
) -> Answer:
    """Write a linear release in a form that other software reads."""
    from consilience.files.export import describe_origin, scorecard, to_onnx, to_python

    agreed, loaded = _load_agreed(file, study)
    ending = {"json": ".json", "python": ".py", "onnx": ".onnx"}[to]
    path = check_out(Path(loaded.filename).with_suffix(ending) if out is None else out, ending)
    origin = describe_origin(loaded)
    if to == "onnx":
        content = to_onnx(loaded, agreed.schema, about=origin).SerializeToString()
    elif to == "json":
        card = scorecard(loaded, agreed.schema, **origin)
        content = json.dumps(card, indent=1, allow_nan=False).encode()
    else:
        content = to_python(loaded, agreed.schema).encode()
    write_durably(path, content)
    return Answer({"file": str(path), "to": to}, f"Written: {path}")


@release.add("card", "release card release-0001.safetensors study.toml --html card.html")
def card(
    file: FilePath,
    study: Annotated[Path, Argument(help="The study file, or the site's folder.")],
    html: Annotated[Path | None, Option("--html", help="Also write it as a web page.")] = None,
) -> Answer:
    """Print a model card: purpose, guarantees, quality, performance by site, limits."""
    from consilience.study.card import of_model

    agreed, loaded = _load_agreed(file, study)
    return _show(loaded, of_model(agreed, loaded), html)


@release.add("odds", "release odds release-0001.safetensors study.toml")
def odds(
    file: FilePath,
    study: Annotated[Path, Argument(help="The study file, or the site's folder.")],
) -> Answer:
    """Print the odds ratios of a logistic model, with intervals where the noise is known."""
    from consilience.evaluation.odds import odds_ratios
    from consilience.study.check import build_for

    agreed, loaded = _load_agreed(file, study)
    found = odds_ratios(loaded, agreed.schema, learner=build_for(agreed, math.inf))
    rows = [vars(row) for row in found.rows]
    return Answer(
        {"of": found.of, "level": found.level, "rows": rows, "note": found.note}, str(found)
    )


@release.add("summary", "release summary release-0001.safetensors study.toml --html table.html")
def summary(
    file: FilePath,
    study: Annotated[Path, Argument(help="The study file, or the site's folder.")],
    html: Annotated[Path | None, Option("--html", help="Also write it as a web page.")] = None,
    csv: Annotated[Path | None, Option("--csv", help="Also write it as a CSV file.")] = None,
    plot: Annotated[
        Path | None, Option("--plot", help="Also draw each column, as a PNG, SVG or PDF file.")
    ] = None,
) -> Answer:
    """Print what a summary says of all sites' records: each number with its interval."""
    from consilience.display.panels import require_drawing
    from consilience.evaluation.table_one import TableOne

    if plot is not None:
        require_drawing()
    agreed, loaded = _load_agreed(file, study)
    title = f"Summary of {loaded.study['name']}, release {loaded.sequence}"
    made = TableOne.of(loaded.ensemble, agreed.schema, title=title)
    for path, ending, write in ((html, ".html", made.as_html), (csv, ".csv", made.as_csv)):
        if path is not None:
            check_out(path, ending, besides=file).write_text(write(), encoding="utf-8")
    if plot is not None:
        from matplotlib.figure import Figure

        figure = Figure(layout="constrained")
        made.plot(ax=figure)
        figure.savefig(check_out(plot, ".png", ".svg", ".pdf", besides=file))
    rows = [
        {"column": row.column, "what": row.what, "groups": [vars(each) for each in row.measures]}
        for row in made.rows
    ]
    return Answer({"groups": list(made.groups), "level": made.level, "rows": rows}, made.as_text())


@release.add("scores", "release scores release-0001.safetensors study.toml")
def scores(
    file: FilePath,
    study: Annotated[Path, Argument(help="The study file, or the site's folder.")],
    html: Annotated[Path | None, Option("--html", help="Also write it as a web page.")] = None,
) -> Answer:
    """Print how good a model, or each site's own, is on the sites' own records."""
    from consilience.evaluation.own_records import describe_scores
    from consilience.files.certificate import Page

    agreed, loaded = _load_agreed(file, study)
    sites = [source.site for source in loaded.sources]
    sections = describe_scores(loaded.ensemble, agreed.schema, sites)
    title = f"Scores of {loaded.study['name']}, release {loaded.sequence}"
    page = Page(title, sections)
    if html is not None:
        check_out(html, ".html", besides=file).write_text(page.as_html(), encoding="utf-8")
    return Answer({heading: dict(rows) for heading, _, rows in sections}, page.on_screen())


class WithIds(NamedTuple):
    """A table to predict for, and the column of it that tells whose each prediction is."""

    table: object
    ids: str | None

    def read(self, schema: Schema) -> tuple[pa.Table, dict[str, Any]]:
        """Return the records, which are read once, and the ids by the name of their column."""
        from consilience.tables.reading import PlainTable, RowSource, concatenate

        source = self.table if isinstance(self.table, RowSource) else PlainTable(self.table)
        names = {column.name for column in schema.columns}
        if self.ids is None:
            return concatenate(source, names), {}
        if self.ids == "prediction" or source.list_columns().count(self.ids) != 1:
            raise SettingsError(
                f"The ids cannot be kept: the table has no column {self.ids!r}, has it twice, or "
                "its name is that of the predictions. Nothing was predicted. Name another one with "
                "--id."
            )
        rows = concatenate(source, names | {self.ids})
        return rows, {self.ids: rows[self.ids]}


def write_predictions(
    model: Release | Adapted,
    schema: Schema,
    records: WithIds,
    out: Path,
    costs: CostOptions | None = None,
) -> Answer:
    """Write what a model says of each record of a table."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.csv as pcsv
    import pyarrow.parquet as pq

    rows, columns = records.read(schema)
    X = schema.encode_features(rows)
    if costs is None or costs == NO_COSTS:
        columns["prediction"] = model.predict(X)
    else:
        columns["prediction"] = cs.predict_at_cost(
            model,
            X,
            false_positive=costs.cost_false_positive,
            false_negative=costs.cost_false_negative,
        )
    if schema.classes is not None:
        probabilities = model.predict_proba(X)
        known = model.ensemble.classes_ if isinstance(model, cs.Release) else model.classes_
        for k, label in enumerate(np.asarray(known).tolist()):
            columns[f"probability of {label}"] = probabilities[:, k]
    write, content = pq.write_table if out.suffix == ".parquet" else pcsv.write_csv, io.BytesIO()
    write(pa.table(columns), content)
    said, mode = f"Written: {out} ({len(X):,} rows)", 0o666
    if getattr(model, "stays_at_site", False):
        said += "\nThese answers are as exact as this site's records. They must not leave the site."
        mode = 0o600
    write_durably(out, content.getvalue(), mode=mode)
    return Answer({"file": str(out), "rows": len(X)}, said)


@release.add("freeze", "release freeze shared roster.csv")
def freeze(
    folder: Annotated[Path, Argument(help="A shared folder with one blind study.")],
    sites: Annotated[
        Path, Argument(help="A CSV file with the columns name, key and checked_by.", metavar="CSV")
    ],
    key: ReleaseKey = None,
) -> Answer:
    """Freeze the roster of a blind study in a shared folder: no site can be added afterwards."""
    from consilience.study.batches import freeze_roster, read_sites, seal_path

    study = cs.Study.in_folder(folder)
    key = _find_key(study, folder, key)
    roster = freeze_roster(study, folder, read_sites(sites), key)
    facts = {"roster": roster.digest, "sites": len(roster.names), "key": roster.sealed.key}
    return Answer(
        facts,
        f"The roster of {len(roster.names)} sites is frozen, with the digest {roster.digest}\n"
        f"Signed with key {roster.sealed.key}\n"
        f"Back up {seal_path(key)}: without it no sum of this study can be opened.\n"
        "Next: each keyholder compares the keys on it with what the sites told it, and signs it.",
    )


@release.add(
    "hand-over", "release hand-over release-0001.safetensors parent.toml north https://hub.example"
)
def hand_over(
    file: FilePath,
    parent: Annotated[Path, Argument(help="The parent's study file, which names the branch.")],
    name: Annotated[str, Argument(help="The branch's name in the parent study.")],
    hub: Annotated[str, Argument(help="The parent's hub, or its shared folder.")],
    invitation: Annotated[str, Option(help="The parent hub's invitation.")] = "",
    key: Annotated[
        Path | None, Option(help="The key that signs the branch's releases, for a hub.")
    ] = None,
) -> Answer:
    """Hand a release of one study to a parent study, of which it is a member."""
    from consilience.files.sealed import SigningKey
    from consilience.protocol import Invitation
    from consilience.site.client import HubClient, check_address, hand_over_release
    from consilience.study.branches import PREFIX, accept_branch

    study, loaded = cs.Study.load(parent), cs.Release.load(file)
    accept_branch(study, name, loaded)
    facts = {"branch": name, "digest": loaded.digest}
    if not hub.startswith(("http://", "https://")):
        if study.digest != cs.Study.in_folder(Path(hub)).digest:
            raise SettingsError(
                f"The folder {hub!r} holds another study than {str(parent)!r}. Nothing was "
                "written. Name the parent study's folder."
            )
        target = Path(hub) / f"{PREFIX}{name.replace(' ', '_')}-{loaded.sequence:04d}.safetensors"
        loaded.save(target)
        return Answer({**facts, "file": str(target)}, f"Written: {target}")
    invited = Invitation.parse(invitation)
    if invited is None or key is None or not key.exists():
        raise SettingsError(
            "A hub takes a branch's release with an --invitation of its own and the --key of the "
            "branch's hub. Nothing was sent. Name both."
        )
    client = HubClient(check_address(hub), SigningKey.load(key), invited.hub_key)
    answer = hand_over_release(loaded, study, name, client, invited)
    return Answer({**facts, **answer}, f"Handed over, digest {loaded.digest}.")


def _find_key(study: Study, folder: Path, key: Path | None) -> Path:
    """Return where the key is that signs a study's releases, which is never in the shared folder.

    Without a choice it is in the coordinator's own folder of settings, by the study's digest: one
    name may stand for another study next year.
    """
    if key is None:
        keys = Path(typer.get_app_dir("consilience")) / "keys"
        key = keys / f"{study.name}-{study.digest[:16]}.pem"
    if key.resolve().is_relative_to(folder.resolve()):
        raise SettingsError(
            f"The key {str(key)!r} lies in the shared folder, and whoever can read that could sign "
            "releases with it. Nothing was combined. Keep it elsewhere; if one is there, make "
            "another."
        )
    if not key.exists():
        key.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        show(f"A new key that signs releases of {study.name}: {key}. Back it up.", as_error=True)
    return key


@release.add("make", "release make shared")
def make(
    folder: Annotated[
        Path, Argument(help="A shared folder with one study and the sites' contributions.")
    ],
    key: ReleaseKey = None,
) -> Answer:
    """Combine the contributions in a shared folder into a signed release, without a hub."""
    from consilience.files.certificate import of_release
    from consilience.files.contribution import WITHDRAWN, Withdrawal
    from consilience.files.sealed import SigningKey
    from consilience.study.batches import gather_batches
    from consilience.study.branches import read_branches
    from consilience.study.collect import (
        Publication,
        collect,
        earlier_costs,
        read_log,
        read_records,
        read_submitted,
    )

    study = cs.Study.in_folder(folder)
    if study.draws_noise:
        raise SettingsError(
            f"{study.aggregator} draws noise, which must be charged to a hub's ledger. Nothing was "
            "combined. Run this study at a hub."
        )
    key = _find_key(study, folder, key)
    signing = SigningKey.at(key)
    by_site = read_submitted(study, folder)
    newest = [submitted.newest for submitted in by_site.values()]
    branches, opened, waits = read_branches(study, folder), None, ""
    if study.is_blind:
        batches = gather_batches(study, folder, by_site, key)
        opened, waits = batches.opened, batches.describe()
        newest = opened.files
        if not newest:
            raise SettingsError(
                "No batch of this study is open yet. Nothing was combined. "
                f"{waits or 'Wait for more sites.'}"
            )
    earlier = earlier_costs(newest, by_site)
    public, test = read_records(study, folder)
    log = read_log(folder, signing.public)
    publication = Publication(signing, log.length + 1, earlier, log=log, opened=opened)
    made = collect(study, [*newest, *branches], public=public, test=test, publication=publication)
    path = folder / made.filename
    made.save(path)
    facts = {"file": str(path), "sequence": made.sequence, "digest": made.digest}
    notes = (Withdrawal.load(note).site for note in folder.glob(f"*{WITHDRAWN}"))
    gone = sorted(set(notes) - by_site.keys())
    said = f"\nNot in it, because they withdrew: {', '.join(map(quote, gone))}" if gone else ""
    text = f"{of_release(made).on_screen()}\nWritten: {path}{said}"
    facts |= {"sites": [one.site for one in newest], "withdrawn": gone}
    facts |= {"branches": [one.site for one in branches]} if branches else {}
    return Answer(facts, f"{text}\n{waits}".rstrip())
