"""A keyholder's folder: its keys, the files it has acknowledged, and the log of what it opened.

A keyholder sees signed facts, never masked numbers. It opens the sum of a batch only once, and only
if every site in it is among enough others that it counts on itself. What it opens is in its log,
durably, before anybody is told.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, Self

from consilience.blind.masked import (
    Acknowledgement,
    Batch,
    MaskedFile,
    Opening,
    find_obstacles,
)
from consilience.blind.pads import SealKey, add_words
from consilience.blind.roster import Card, Roster, Rule
from consilience.errors import LedgerDamaged, SettingsError
from consilience.files.sealed import Sealed, SigningKey, canonical, parse_facts, refused

_VERSION = 3
_GENESIS = "0" * 64
_SCHEMA = """
BEGIN;
CREATE TABLE studies (
  digest TEXT PRIMARY KEY, name TEXT NOT NULL, rule TEXT NOT NULL, hub TEXT NOT NULL,
  roster BLOB NOT NULL, card BLOB NOT NULL, closed INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE TABLE files (
  digest TEXT PRIMARY KEY, study TEXT NOT NULL REFERENCES studies, site TEXT NOT NULL,
  sequence INTEGER NOT NULL, nonce TEXT NOT NULL UNIQUE, seed TEXT NOT NULL UNIQUE,
  facts TEXT NOT NULL, signature TEXT NOT NULL, acknowledgement BLOB NOT NULL,
  UNIQUE (study, site, sequence)
) STRICT;
CREATE TABLE openings (
  number INTEGER PRIMARY KEY, batch TEXT NOT NULL UNIQUE, study TEXT NOT NULL REFERENCES studies,
  opening BLOB NOT NULL, head TEXT NOT NULL
) STRICT;
CREATE TABLE opened (
  file TEXT PRIMARY KEY REFERENCES files, number INTEGER NOT NULL REFERENCES openings
) STRICT;
CREATE TRIGGER openings_stay BEFORE DELETE ON openings
  BEGIN SELECT RAISE(ABORT, 'openings are never deleted'); END;
CREATE TRIGGER openings_hold BEFORE UPDATE ON openings
  BEGIN SELECT RAISE(ABORT, 'openings are never changed'); END;
CREATE TRIGGER opened_stay BEFORE DELETE ON opened
  BEGIN SELECT RAISE(ABORT, 'openings are never deleted'); END;
CREATE TRIGGER files_stay BEFORE DELETE ON files
  BEGIN SELECT RAISE(ABORT, 'files are never forgotten'); END;
PRAGMA user_version = 1;
COMMIT;
"""
_UPGRADES = (  # from each version to the next
    (
        "CREATE TABLE places (study TEXT PRIMARY KEY REFERENCES studies, place TEXT NOT NULL, "
        "certificate TEXT) STRICT",
    ),
    # Anybody can copy a nonce out of a shared folder, so that each site has its own.
    ("UPDATE files SET nonce = site || ' ' || nonce",),
)


class Entry(NamedTuple):
    """One line of the log: which batch of which study was opened, and the head of the log then."""

    number: int
    study: str
    batch: str
    n_files: int
    head: str


class Signed(NamedTuple):
    """A study whose roster was signed: where its files are, and whether its key was destroyed."""

    name: str
    digest: str
    hub: str
    roster: str
    place: str | None
    certificate: str | None
    is_closed: bool


class Keyholder:
    """A keyholder in its own folder.

    Any number of processes may use the folder; SQLite lets one write at a time.

    Parameters
    ----------
    folder
        Where its key, its log and its keys for seeds are. It must not be put back from an old copy:
        a keyholder that forgets what it opened could open an overlapping batch.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        if not (self.folder / "keyholder.sqlite").exists():
            raise SettingsError(
                f"There is no keyholder in {self.folder.name!r}. Nothing was read. Make one with "
                "'consilience keyholder init'."
            )
        self.key = SigningKey.load(self.folder / "keyholder.key")
        self._check()

    @classmethod
    def create(cls, folder: str | os.PathLike[str]) -> Self:
        """Make a keyholder in a new folder."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        if any(path.iterdir()):
            raise SettingsError(
                f"The folder {path.name!r} is not empty. Nothing was made. Name a new folder."
            )
        (path / "seals").mkdir(mode=0o700)
        SigningKey.generate().save(path / "keyholder.key")
        draft = path / "keyholder.sqlite.part"
        draft.touch(mode=0o600)
        with sqlite3.connect(draft) as db:
            db.executescript(_SCHEMA)
        db.close()
        draft.rename(path / "keyholder.sqlite")
        return cls(path)

    # ------------------------------------------------------------------------------- what is agreed

    def countersign(self, roster: Roster, rule: Rule, hub: str) -> Card:
        """Sign a study's roster, and make the key that its seeds are sealed to.

        The keyholder has compared the keys on it with what the sites told it themselves. One roster
        is signed for a study, and the same roster gives the same card.
        """
        study = roster.study["digest"]
        if self.key.public not in rule.keyholders or hub in rule.keyholders:
            raise SettingsError(
                "This study does not name this keyholder, or names its hub as a keyholder. Nothing "
                "was signed."
            )
        with self._writing() as db:
            row = db.execute(
                "SELECT roster, card, rule, hub FROM studies WHERE digest = ?", (study,)
            ).fetchone()
            if row is not None:
                same = Sealed.load(row["roster"], "roster").digest == roster.digest
                if not same or row["rule"] != _rule_text(rule) or row["hub"] != hub:
                    raise SettingsError(
                        "Another roster of this study was signed before, and there can be only "
                        "one. Nothing was signed. Sites that are missing on it need a new study."
                    )
                return Card.read(Sealed.load(row["card"], "pad-holder"))
            path = self._seal_path(study)
            if not path.exists():
                SealKey.generate().save(path)
            card = Card.make(roster, SealKey.load(path).public, self.key)
            db.execute(
                "INSERT INTO studies (digest, name, rule, hub, roster, card) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (
                    study,
                    roster.study["name"],
                    _rule_text(rule),
                    hub,
                    roster.sealed.to_bytes(),
                    card.sealed.to_bytes(),
                ),
            )
            return card

    def acknowledge(self, file: MaskedFile) -> Acknowledgement:
        """Confirm that this keyholder can open its seed in a file; the same file, the same answer.

        Refused is whatever could reuse a pad: a second file under a number or a nonce of its site,
        and a seed that was seen before.
        """
        study, _, _, key = self._agreed(file.facts["study"]["digest"], file)
        seed = hashlib.sha256(file.open_seed(self.key.public, key)).hexdigest()
        blind = file.facts["blind"]
        with self._writing() as db:
            known = db.execute(
                "SELECT acknowledgement FROM files WHERE digest = ?", (file.digest,)
            ).fetchone()
            if known is not None:
                return Acknowledgement.read(known["acknowledgement"])
            answer = Acknowledgement.make(file, self.key)
            try:
                db.execute(
                    "INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (
                        file.digest,
                        study,
                        file.site_key,
                        file.facts["sequence"],
                        f"{file.site_key} {blind['nonce']}",
                        seed,
                        file.text,
                        file.signature.hex(),
                        answer.sealed.to_bytes(),
                    ),
                )
            except sqlite3.IntegrityError:
                raise refused(
                    "another file of its site has its number, its nonce or its seed, so that a pad "
                    "would be used twice"
                ) from None
            return answer

    def open(self, batch: Batch) -> Opening:
        """Return the sum of this keyholder's pads for a batch; the same batch, the same answer."""
        study, rule, _, key = self._agreed(batch.study["digest"])
        with self._writing() as db:
            before = db.execute(
                "SELECT opening FROM openings WHERE batch = ?", (batch.digest,)
            ).fetchone()
            if before is not None:
                return Opening.read(before["opening"])
            files = self._acknowledged(db, study, batch)
            if obstacles := find_obstacles(files, rule):
                raise refused("; ".join(obstacles))
            length = files[0].context.length
            pads = add_words((file.pad(self.key.public, key) for file in files), length)
            number, head = self._head(db)
            opening = Opening.make(batch, pads, number + 1, head, self.key)
            after = _next_head(head, opening)
            try:
                db.execute(
                    "INSERT INTO openings VALUES (?, ?, ?, ?, ?)",
                    (number + 1, batch.digest, study, opening.sealed.to_bytes(), after),
                )
                db.executemany(
                    "INSERT INTO opened VALUES (?, ?)",
                    [(file.digest, number + 1) for file in files],
                )
            except sqlite3.IntegrityError:
                raise refused("one of its files is in a batch that was opened before") from None
        return opening

    def close(self, study: str) -> None:
        """Destroy the key for a study's seeds: nobody can open anything of it any more."""
        with self._writing() as db:
            closing = db.execute("UPDATE studies SET closed = 1 WHERE digest = ?", (study,))
            if not closing.rowcount:
                raise refused("this keyholder has signed no roster of its study")
        path = self._seal_path(study)
        if not path.exists():
            return
        with path.open("r+b") as file:  # file systems may keep the old blocks all the same
            file.write(os.urandom(path.stat().st_size))
            file.flush()
            os.fsync(file.fileno())
        path.unlink()

    def studies(self) -> list[Signed]:
        """Return the studies whose rosters this keyholder signed."""
        with self._reading() as db:
            rows = db.execute(
                "SELECT name, digest, hub, roster, place, certificate, closed FROM studies "
                "LEFT JOIN places ON places.study = studies.digest ORDER BY studies.rowid"
            ).fetchall()
        return [
            Signed(
                row["name"],
                row["digest"],
                row["hub"],
                Sealed.load(row["roster"], "roster").digest,
                row["place"],
                row["certificate"],
                bool(row["closed"]),
            )
            for row in rows
        ]

    def remember(self, study: str, place: str, certificate: str | None = None) -> None:
        """Note where the files of a signed study are: a hub's address, or a shared folder."""
        with self._writing() as db:
            db.execute(
                "INSERT INTO places VALUES (?, ?, ?) ON CONFLICT (study) DO UPDATE SET "
                "place = excluded.place, certificate = excluded.certificate",
                (study, place, certificate),
            )

    def log(self) -> list[Entry]:
        """Return what was opened, oldest first."""
        with self._reading() as db:
            rows = db.execute(
                "SELECT number, study, batch, head, (SELECT count(*) FROM opened WHERE "
                "opened.number = openings.number) AS n_files FROM openings ORDER BY number"
            ).fetchall()
        return [
            Entry(row["number"], row["study"], row["batch"], row["n_files"], row["head"])
            for row in rows
        ]

    # --------------------------------------------------------------------------------------- inside

    def _agreed(
        self, study: str, file: MaskedFile | None = None
    ) -> tuple[str, Rule, Roster, SealKey]:
        """Return what a study agreed on; with `file`, refuse one that was made for other terms."""
        with self._reading() as db:
            row = db.execute("SELECT * FROM studies WHERE digest = ?", (study,)).fetchone()
        if row is None or row["closed"]:
            raise refused(
                "its study is closed" if row else "this keyholder has signed no roster of its study"
            )
        rule, roster = _read_rule(row["rule"]), _read_roster(row["roster"])
        if file is not None:
            file.check_agreed(roster, rule, {*rule.keyholders, row["hub"]})
        return study, rule, roster, SealKey.load(self._seal_path(study))

    def _acknowledged(
        self, db: sqlite3.Connection, study: str, batch: Batch
    ) -> Sequence[MaskedFile]:
        rows = [
            db.execute(
                "SELECT facts, signature FROM files WHERE digest = ? AND study = ?", (name, study)
            ).fetchone()
            for name in batch.files
        ]
        if None in rows:
            raise refused("this keyholder has not acknowledged all of its files")
        files = [MaskedFile.read(row["facts"], row["signature"]) for row in rows]
        if Batch.of(files) != batch:
            raise refused("it names another study or roster than its files")
        return files

    def _head(self, db: sqlite3.Connection) -> tuple[int, str]:
        row = db.execute(
            "SELECT number, head FROM openings ORDER BY number DESC LIMIT 1"
        ).fetchone()
        return (0, _GENESIS) if row is None else (row["number"], row["head"])

    def _check(self) -> None:
        """Refuse a log that was changed."""
        head = _GENESIS
        with self._reading() as db:
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if 1 <= version < _VERSION:
                self._upgrade()
                version = _VERSION
            if version != _VERSION:
                raise SettingsError(
                    f"The keyholder's log has version {version}, and this program knows version "
                    f"{_VERSION}. Nothing was changed. Use the program that wrote it."
                )
            rows = db.execute("SELECT number, opening, head FROM openings ORDER BY number")
            for expected, row in enumerate(rows, start=1):
                opening = Opening.read(row["opening"])
                facts = opening.sealed.facts
                if (
                    (row["number"], facts["number"], facts["head"]) != (expected, expected, head)
                    or opening.sealed.key != self.key.public
                    or row["head"] != _next_head(head, opening)
                ):
                    raise LedgerDamaged(
                        "The keyholder's log was changed or lacks entries. Nothing was opened. "
                        "Find out what happened to its folder, and tell the sites."
                    )
                head = row["head"]

    def _upgrade(self) -> None:
        """Bring the log to the present version, unless another process was first."""
        with self._writing() as db:
            (version,) = db.execute("PRAGMA user_version").fetchone()
            for number in range(version, _VERSION):
                for statement in _UPGRADES[number - 1]:
                    db.execute(statement)
                db.execute(f"PRAGMA user_version = {number + 1}")

    def _seal_path(self, study: str) -> Path:
        return self.folder / "seals" / f"{study}.key"

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        db = sqlite3.connect(self.folder / "keyholder.sqlite", timeout=60.0, isolation_level=None)
        try:
            db.row_factory = sqlite3.Row
            db.execute("PRAGMA synchronous = FULL")
            db.execute("PRAGMA foreign_keys = ON")
            yield db
        finally:
            db.close()

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._reading() as db:
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
            except BaseException:
                db.execute("ROLLBACK")
                raise
            db.execute("COMMIT")


def _next_head(head: str, opening: Opening) -> str:
    return hashlib.sha256(f"{head}{opening.sealed.digest}".encode()).hexdigest()


@lru_cache(maxsize=4)  # every file is held against the same roster
def _read_roster(content: bytes) -> Roster:
    return Roster.read(Sealed.load(content, "roster"))


def _rule_text(rule: Rule) -> str:
    return canonical(rule.as_dict())


def _read_rule(text: str) -> Rule:
    return Rule.from_dict(parse_facts(text))
