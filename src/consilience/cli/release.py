"""The commands `consilience release …`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

import consilience as cs
from consilience.cli.command import Answer, Commands
from consilience.cli.options import FilePath, Html, TablePath
from consilience.errors import SettingsError

if TYPE_CHECKING:
    from consilience.files.contribution import Contribution
    from consilience.study.study import Study

commands = Commands("Read, check and use what a hub publishes.")


@commands.add("show", "release show release-0001.safetensors")
def show(file: FilePath, html: Html = None) -> Answer:
    """Print a release's certificate."""
    from consilience.files.certificate import of_release

    release = cs.Release.load(file)
    page = of_release(release)
    if html is not None:
        html.write_text(page.as_html(), encoding="utf-8")
    return Answer({**release.sealed.facts, "digest": release.digest}, page.as_text())


@commands.add("verify", "release verify release-0001.safetensors --key 3f9a...")
def verify(
    file: FilePath,
    key: Annotated[
        str | None,
        Option(help="The hub's public key. Without it, any key is accepted and printed."),
    ] = None,
) -> Answer:
    """Check signature, digests and guarantee offline; the exit code is 0 only if all are valid."""
    release = cs.Release.load(file, key=key)
    facts = {
        "holds": True,
        "key": release.sealed.key,
        "digest": release.digest,
        "guarantee": release.guarantee.as_dict(),
    }
    return Answer(facts, f"Valid: {release.guarantee!r}, signed with key {release.sealed.key}")


@commands.add("predict", "release predict release-0001.safetensors study.toml new.csv")
def predict(
    file: FilePath,
    study: Annotated[Path, Argument(help="The study file, or the site's folder.")],
    table: TablePath,
    out: Annotated[
        Path, Option(help="CSV or Parquet file to write, with one row per record.")
    ] = Path("predictions.csv"),
) -> Answer:
    """Predict for the records of a table on this machine; nothing is sent anywhere."""
    import pyarrow as pa
    import pyarrow.csv as pcsv
    import pyarrow.parquet as pq

    release = cs.Release.load(file)
    name = str(release.study["name"])
    agreed = cs.Site(study).study(name) if study.is_dir() else cs.Study.load(study)
    if agreed.reference != release.study:
        raise SettingsError(
            f"The release was made for another study than {str(study)!r}, or for another version "
            f"of it. Nothing was predicted. Give the file of study {name!r}."
        )
    X = agreed.schema.encode_features(table)
    columns = {"prediction": release.predict(X)}
    if agreed.schema.classes is not None:
        probabilities = release.predict_proba(X)
        for k, label in enumerate(release.ensemble.classes_.tolist()):
            columns[f"probability of {label}"] = probabilities[:, k]
    result = pa.table(columns)
    if out.suffix == ".parquet":
        pq.write_table(result, out)
    else:
        pcsv.write_csv(result, out)
    facts = {"file": str(out), "rows": len(result)}
    return Answer(facts, f"Written: {out} ({len(result):,} rows)")


@commands.add("make", "release make shared --key coordinator.pem")
def make(
    folder: Annotated[
        Path, Argument(help="A shared folder with one study and the sites' contributions.")
    ],
    key: Annotated[Path, Option(help="The key that signs releases; created if it does not exist.")],
) -> Answer:
    """Combine the contributions in a shared folder into a signed release, without a hub."""
    from consilience.files.certificate import of_release
    from consilience.files.sealed import SigningKey
    from consilience.study.collect import Publication, collect, read_records

    study = cs.Study.in_folder(folder)
    if study.draws_noise:
        raise SettingsError(
            f"{study.aggregator} draws noise, which must be charged to a hub's ledger. Nothing was "
            "combined. Run this study at a hub."
        )
    if not key.exists():
        SigningKey.generate().save(key)
    done = set(folder.glob("release-*.safetensors"))
    by_site = _load_contributions(study, sorted(set(folder.glob("*.safetensors")) - done))
    newest = [of_site[-1] for of_site in by_site.values()]
    earlier = {
        site: [contribution.guarantee for contribution in of_site[:-1]]
        for site, of_site in by_site.items()
    }
    public, test = read_records(study, folder)
    publication = Publication(SigningKey.load(key), len(done) + 1, earlier)
    release = collect(study, newest, public=public, test=test, publication=publication)
    path = folder / release.filename
    release.save(path)
    facts = {
        "file": str(path),
        "sequence": publication.sequence,
        "digest": release.digest,
        "sites": list(by_site),
    }
    return Answer(facts, f"{of_release(release).as_text()}\nWritten: {path}")


def _load_contributions(study: Study, files: list[Path]) -> dict[str, list[Contribution]]:
    """Return the contributions of each site, sites by name and contributions in their order."""
    by_site: dict[str, list[Contribution]] = {}
    for file in files:
        contribution = study.accept(cs.Contribution.load(file, trusted=study.trusted))
        by_site.setdefault(contribution.site, []).append(contribution)
    for site, of_site in by_site.items():
        if len({contribution.sealed.key for contribution in of_site}) > 1:
            raise SettingsError(
                f"Contributions of {site!r} are signed with different keys. Nothing was combined. "
                "Ask the site which key is its own."
            )
        of_site.sort(key=lambda contribution: contribution.sequence)
    return dict(sorted(by_site.items()))
