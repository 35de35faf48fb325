"""A keyholder at the command line, with a shared folder and with a hub that is away."""

from __future__ import annotations

import io
import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from consilience import Budget, Ledger
from consilience.blind.masked import MaskedFile, Masking
from consilience.blind.papers import Papers
from consilience.blind.roster import check_cards
from consilience.cli.app import main
from consilience.errors import ContributionRejected, HubUnavailable
from consilience.files.contribution import Contribution
from consilience.files.sealed import SigningKey
from consilience.keyholder.desk import FolderDesk, serve, work
from consilience.keyholder.keyholder import Keyholder, Signed
from consilience.privacy.spending import Account, Spending
from consilience.study.batches import freeze_roster, gather_batches
from consilience.study.collect import read_submitted
from consilience.study.study import Study
from parties import Parties
from studies import blind_text, table


def run(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    """Return what a command of the keyholder prints."""
    with pytest.raises(SystemExit) as ended:
        main(["keyholder", *map(str, arguments)])
    said = capsys.readouterr()
    assert ended.value.code == code, said.err
    return said.out + said.err


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    folder = tmp_path / "shared"
    folder.mkdir()
    return folder


def test_a_study_in_a_shared_folder_from_the_first_key_to_the_last(
    shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = [tmp_path / "office", tmp_path / "university"]
    keys = [json.loads(run(capsys, "init", "--folder", place, "--json"))["key"] for place in places]
    (shared / "study.toml").write_text(blind_text(keys))
    study = Study.in_folder(shared)
    assert study.blind is not None
    said = run(capsys, "countersign", shared, "--folder", places[0], code=1)
    assert "not frozen yet" in said
    sites = [SigningKey.generate() for _ in range(3)]
    listed = [(f"site {i}", key.public, "the registrar") for i, key in enumerate(sites)]
    hub = tmp_path / "hub.pem"
    roster = freeze_roster(study, shared, listed, hub)
    said = run(capsys, "countersign", shared, "--roster", "0" * 64, "--folder", places[0], code=1)
    assert "another digest" in said
    for place in places:
        options = ("--roster", roster.digest, "--folder", place)
        assert "Countersigned" in run(capsys, "countersign", shared, *options)
    cards = Papers(shared).cards()
    holders = check_cards(roster, study.blind, roster.sealed.key, cards)
    masking = Masking(roster, study.blind, holders, tuple(roster.names))
    for i, key in enumerate(sites):
        ledger = Ledger(tmp_path / f"{i}.ledger")
        ledger.allow("ward", Budget(epsilon=10.0, delta=1e-4))
        whose: Any = {"site": f"site {i}", "signing": key}
        spending = Spending(Account(ledger, "ward"))
        content = study.mask_sum(table(200, seed=i), spending, masking, epsilon=1.0, **whose)
        (shared / f"contribution-{i}-0001.safetensors").write_bytes(content)
    for place in places:
        assert "Acknowledged files: 3" in run(capsys, "open", "--folder", place)
    assert gather_batches(study, shared, read_submitted(study, shared), hub).listed
    for place in places:
        assert "Opened batches: 1" in run(capsys, "open", "--folder", place)
        assert "Nothing waits for you" in run(capsys, "open", "--folder", place)
        assert "3 files of heart-risk" in run(capsys, "log", "--folder", place)
    batches = gather_batches(study, shared, read_submitted(study, shared), hub)
    ((files, openings),) = batches.opened.batches
    assert (len(files), len(openings)) == (3, 2)
    assert all(isinstance(file, Contribution) for file in files)
    assert "destroyed" in run(capsys, "close", "heart-risk", "--yes", "--folder", places[0])
    assert list((places[0] / "seals").iterdir()) == []
    assert "Nothing waits for you" in run(capsys, "open", "--folder", places[0])
    assert "closed" in run(capsys, "log", "--folder", places[0])


def test_a_roster_is_shown_before_it_is_signed(
    shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    keyholder = Keyholder.create(tmp_path / "office")
    (shared / "study.toml").write_text(blind_text([keyholder.key.public]))
    sites = [SigningKey.generate() for _ in range(3)]
    listed = [(f"site {i}", key.public, "the registrar") for i, key in enumerate(sites)]
    roster = freeze_roster(Study.in_folder(shared), shared, listed, tmp_path / "hub.pem")
    monkeypatch.setattr("sys.stdin", io.StringIO())  # nobody answers
    said = run(capsys, "countersign", shared, "--folder", tmp_path / "office", code=130)
    for each in (*(key.public for key in sites), "the registrar", "(you)", roster.digest):
        assert each in said
    assert "No sum of fewer than 3 sites" in said
    assert [card.key for card in Papers(shared).cards()] == [roster.sealed.key]
    assert keyholder.studies() == []


def test_one_study_that_is_away_holds_up_no_other_and_is_asked_less_often(
    shared: Path, tmp_path: Path
) -> None:
    keyholder = Keyholder.create(tmp_path / "office")
    for name in ("first", "second"):
        place = tmp_path / name
        place.mkdir()
        text = blind_text([keyholder.key.public]).replace("heart-risk", name)
        (place / "study.toml").write_text(text)
        study = Study.in_folder(place)
        listed = [(f"site {i}", SigningKey.generate().public, "ann") for i in range(3)]
        roster = freeze_roster(study, place, listed, tmp_path / f"{name}.pem")
        assert study.blind is not None
        keyholder.countersign(roster, study.blind, roster.sealed.key)
        keyholder.remember(study.digest, str(place))
    asked, waits = list[str](), list[float]()

    def find(_: Keyholder, study: Signed) -> FolderDesk:
        asked.append(study.name)
        if study.name == "first":
            raise HubUnavailable("It is away.")
        return FolderDesk(Path(study.place or ""), study.hub)

    done = work(keyholder, find)
    assert asked == ["first", "second"]
    assert done.unreachable == ["first: It is away."]
    (tmp_path / "first").rename(tmp_path / "elsewhere")
    list(islice(serve(keyholder, 1.0, waits.append), 5))
    assert waits == sorted(waits)
    assert waits[-1] > 8


def test_a_keyholder_of_the_first_version_is_brought_up_to_date(tmp_path: Path) -> None:
    import sqlite3

    parties = Parties(tmp_path, n_keyholders=1)
    folder = parties.keyholders[0].folder
    first = parties.file(0)
    parties.acknowledge(first)
    nonce = first.facts["blind"]["nonce"]
    with sqlite3.connect(folder / "keyholder.sqlite") as db:
        db.executescript("DROP TABLE places; PRAGMA user_version = 1;")
        db.execute("UPDATE files SET nonce = ?", (nonce,))
    db.close()
    keyholder = Keyholder(folder)
    assert [study.place for study in keyholder.studies()] == [None]
    assert keyholder.log() == []
    with pytest.raises(ContributionRejected, match="used twice"):
        keyholder.acknowledge(MaskedFile.of(parties.file(0, sequence=2, nonce=nonce)))
    keyholder.acknowledge(MaskedFile.of(parties.file(1, nonce=nonce)))
