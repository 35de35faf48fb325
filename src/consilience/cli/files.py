"""The commands `consilience contribution …` and `consilience release …`, for signed files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

import consilience as cs
from consilience.cli.command import Answer, Commands
from consilience.cli.options import FilePath, TablePath, check_out
from consilience.errors import SettingsError
from consilience.text import quote

if TYPE_CHECKING:
    from consilience.files.certificate import Page
    from consilience.files.contribution import Contribution
    from consilience.files.release import Release
    from consilience.study.study import Study

contribution = Commands("Read and check the file that a site submits.")
release = Commands("Read, check and use what a hub publishes.")

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
    return Answer({**loaded.sealed.facts, "digest": loaded.digest}, page.as_text())


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
    table: TablePath,
    out: Annotated[
        Path, Option(help="CSV or Parquet file to write, with one row per record.")
    ] = Path("predictions.csv"),
) -> Answer:
    """Predict for the records of a table on this machine; nothing is sent anywhere."""
    import pyarrow as pa
    import pyarrow.csv as pcsv
    import pyarrow.parquet as pq

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
            f"of it. Nothing was predicted. Give the file of study {name!r}."
        )
    check_release(agreed, loaded)
    check_out(out, ".csv", ".parquet", besides=table)
    X = agreed.schema.encode_features(table)
    columns = {"prediction": loaded.predict(X)}
    if agreed.schema.classes is not None:
        probabilities = loaded.predict_proba(X)
        for k, label in enumerate(loaded.ensemble.classes_.tolist()):
            columns[f"probability of {label}"] = probabilities[:, k]
    write = pq.write_table if out.suffix == ".parquet" else pcsv.write_csv
    write(pa.table(columns), out)
    return Answer({"file": str(out), "rows": len(X)}, f"Written: {out} ({len(X):,} rows)")


@release.add("make", "release make shared --key coordinator.pem")
def make(
    folder: Annotated[
        Path, Argument(help="A shared folder with one study and the sites' contributions.")
    ],
    key: Annotated[Path, Option(help="The key that signs releases; created if it does not exist.")],
) -> Answer:
    """Combine the contributions in a shared folder into a signed release, without a hub."""
    from consilience.files.certificate import of_release
    from consilience.files.sealed import SigningKey
    from consilience.study.collect import Publication, collect, read_log, read_records

    study = cs.Study.in_folder(folder)
    if study.draws_noise:
        raise SettingsError(
            f"{study.aggregator} draws noise, which must be charged to a hub's ledger. Nothing was "
            "combined. Run this study at a hub."
        )
    signing = SigningKey.at(key)
    done = set(folder.glob("release-*.safetensors"))
    by_site = _load_contributions(study, sorted(set(folder.glob("*.safetensors")) - done))
    newest = [of_site[-1] for of_site in by_site.values()]
    earlier = {site: [one.guarantee for one in ones[:-1]] for site, ones in by_site.items()}
    public, test = read_records(study, folder)
    log = read_log(folder)
    publication = Publication(signing, log.length + 1, earlier, log=log)
    made = collect(study, newest, public=public, test=test, publication=publication)
    path = folder / made.filename
    made.save(path)
    facts = {"file": str(path), "sequence": made.sequence, "digest": made.digest}
    text = f"{of_release(made).as_text()}\nWritten: {path}"
    return Answer({**facts, "sites": list(by_site)}, text)


def _load_contributions(study: Study, files: list[Path]) -> dict[str, list[Contribution]]:
    """Return the contributions of each site, sites by name and contributions in their order."""
    by_site: dict[str, list[Contribution]] = {}
    for file in files:
        loaded = study.accept(cs.Contribution.load(file, trusted=study.trusted))
        by_site.setdefault(loaded.site, []).append(loaded)
    for site, of_site in by_site.items():
        if len({one.sealed.key for one in of_site}) > 1:
            raise SettingsError(
                f"Contributions of {site!r} are signed with different keys. Nothing was combined. "
                "Ask the site which key is its own."
            )
        of_site.sort(key=lambda one: one.sequence)
    return dict(sorted(by_site.items()))
