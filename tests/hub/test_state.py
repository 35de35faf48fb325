"""In every state that a study can reach, what its pages and answers say is so.

A walk through releases × what sites do × closing × trust × test records. Facts are counted here
from the rows themselves: a sentence that is on a page must follow from them, and some facts must be
said.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import sqlalchemy as sa

from consilience.hub import dashboard
from consilience.hub.auth import new_token
from consilience.hub.dashboard.texts import NOTICES
from consilience.hub.store.database import now
from consilience.hub.store.tables import invitations, tables
from consilience.privacy.guarantee import Budget
from consilience.protocol import Refusal

COMBINING = "consilience.hub.combining"


# --------------------------------------------------------------------------------- what is the case


class Facts(NamedTuple):
    """What the rows say, counted without the code under test."""

    is_open: bool
    noisy: bool
    has_test: bool
    n_sites: int
    in_use: dict[str, Any]  # by site
    may_contribute: set[str]
    submitted: set[str]
    withdrawals: dict[str, int]
    releases: list[dict[str, Any]]
    current: dict[str, Any] | None
    in_current: set[str]
    withheld: bool
    problem: str | None
    due: bool
    alerts: dict[str, str]
    open_invitations: int
    enrolled: set[str]

    @property
    def enough(self) -> bool:
        return len(self.in_use) >= 2

    @property
    def may_come(self) -> bool:
        """Whether there is no release, and there may be one."""
        return not self.releases and not self.withheld and (self.is_open or self.enough)

    @property
    def all_withdrawn(self) -> bool:
        states = {row["state"] for row in self.releases}
        return states == {"withdrawn"}


def count(world: Any, noisy: bool, has_test: bool, said: dict[str, Any]) -> Facts:
    with world.hub.store.reading() as db:
        rows = {
            name: [dict(row) for row in db.execute(sa.select(table)).mappings()]
            for name, table in tables.tables.items()
        }
    study = next(row for row in rows["studies"] if row["name"] == "demo")
    is_open = study["status"] == "open"
    current = next((row for row in rows["releases"] if row["state"] == "current"), None)
    sites = {row["digest"]: row["site"] for row in rows["contributions"]}
    of_current = [row for row in rows["members"] if current and row["release"] == current["digest"]]
    in_current = {sites[row["contribution"]] for row in of_current}
    due = study["changes"] > study["combined"] and not noisy
    gone = [row["site"] for row in rows["contributions"] if row["state"] == "withdrawn"]
    unused = [row for row in rows["invitations"] if row["used"] is None and row["expires"] > now()]
    enrolled = {row["name"] for row in rows["sites"] if row["status"] == "enrolled"}
    readers = {row["name"] for row in rows["sites"] if row["fetch_only"]}
    in_use = {row["site"]: row for row in rows["contributions"] if row["state"] == "accepted"}
    return Facts(
        is_open=is_open,
        noisy=noisy,
        has_test=has_test,
        n_sites=len(rows["sites"]),
        in_use=in_use,
        may_contribute=enrolled - readers,
        submitted=set(sites.values()),
        withdrawals={site: gone.count(site) for site in gone},
        releases=rows["releases"],
        current=current,
        in_current=in_current,
        withheld=said.get("withheld") == study["changes"],
        problem=None if due else study["problem"],
        due=due,
        alerts=said["alerts"] if current and current["digest"] == said.get("release") else {},
        open_invitations=len(unused) if is_open else 0,
        enrolled=enrolled,
    )


# ----------------------------------------------------------------------- what may be said, and when


Claim = Callable[[Facts, Any], bool]
CLAIMS: dict[str, Claim] = {
    r"site in it (has )?withdr": lambda *_: False,  # a coordinator can have done it
    r"There is no release yet|nothing to measure yet|No weights yet": lambda f, _: f.may_come,
    r"Current release (— )?none yet|Newest release none yet": lambda f, _: f.may_come,
    r"[Tt]he first (release|one)": lambda f, _: f.may_come,
    r"No site has joined yet": lambda f, _: f.is_open and not f.n_sites,
    r"No site joined\.": lambda f, _: not f.is_open and not f.n_sites,
    r"Nothing has been submitted yet": lambda f, _: f.is_open and not f.submitted,
    r"Nothing was submitted yet": lambda f, _: f.is_open,
    r"\byet\b": lambda f, _: f.is_open or f.enough,
    r"(\d+) of (\d+) enrolled sites have": lambda f, m: int(m[1]) <= int(m[2]),
    r"(\d+) of (\d+) contributed": lambda f, m: int(m[1]) <= int(m[2]),
    r"(\d+) of (\d+) in use": lambda f, m: (
        int(m[1]) == len(set(f.in_use) & f.may_contribute) and int(m[2]) == len(f.may_contribute)
    ),
    r"In use (\d+) contributions": lambda f, m: int(m[1]) == len(f.in_use),
    r"contribute: (\d+), with a contribution in use: (\d+)": lambda f, m: (
        int(m[1]) == len(f.may_contribute) and int(m[2]) == len(set(f.in_use) & f.may_contribute)
    ),
    r"is unlike the others": lambda f, _: bool(f.alerts) and set(f.alerts) <= f.in_current,
    r"It is in the release": lambda f, _: bool(f.alerts),
    r"It is in release (\d+)": lambda f, m: (
        f.current is not None and f.current["sequence"] == int(m[1])
    ),
    r"Invite (a|another) site\b(?! to)|Invite it again|invite more|Your next step": lambda f, _: (
        f.is_open
    ),
    r"What you submit appears here|train and submit on their own": lambda f, _: f.is_open,
    r"The site trains with": lambda f, _: f.is_open,
    r"used by (\S*)": lambda f, m: m[1] in {"ward", "reader"},
    r"[Tt]he study is( already)? closed": lambda f, _: not f.is_open,
    r"never sees a record": lambda f, _: False,
    r"Sites keep the newest release|sites have release (\d+)": lambda f, m: (
        f.current is not None and str(f.current["sequence"]) in (m[1], str(f.current["sequence"]))
    ),
    r"sites have no release": lambda f, _: f.current is None,
    r"Its releases remain|still fetch its releases": lambda f, _: f.current is not None,
    r"release is being made|The hub makes one as soon": lambda f, _: f.due and f.enough,
    r"A release is withheld|one is withheld|keeps it back": lambda f, _: f.withheld,
    r"Every release was withdrawn|all were withdrawn": lambda f, _: (
        f.all_withdrawn and not f.withheld
    ),
    r"none will be made|no release will be made|no further release": lambda f, _: not f.enough,
    r"Combining failed": lambda f, _: f.problem is not None and not f.withheld,
    r"Nothing of your site is in use": lambda f, _: "ward 1" not in f.in_use,
    r"You can withdraw your contribution": lambda f, _: "ward 1" in f.in_use,
    r"(\d+) open invitation": lambda f, m: int(m[1]) == f.open_invitations > 0,
    r"no open invitation": lambda f, _: f.is_open and not f.open_invitations,
    r"[Cc]ombines? the remaining contributions": lambda f, _: not f.noisy,
    r"coordinator can (then )?ask for|You can still ask for releases": lambda f, _: f.noisy,
    r"The site '(ward \d)' withdrew (\d+) times": lambda f, m: f.withdrawals[m[1]] == int(m[2]) > 1,
    r"accepts its next contribution from": lambda f, _: f.is_open,
    r"has to wait before its next": lambda f, _: f.is_open,
    r"Releases are measured on the study's|measured as soon": lambda f, _: f.has_test,
    r"this study names none": lambda f, _: not f.has_test,
    r"can return with a new key": lambda f, _: f.is_open,
    r"Withdraw its contribution|Also withdraw its contribution": lambda f, _: bool(f.in_use),
    r"A release can be made": lambda f, _: f.noisy and f.enough,
    r"The hub makes one when (\d+)": lambda f, m: f.is_open and not f.enough and not f.noisy,
    r"The hub could not make one": lambda f, _: f.problem is not None,
}
# What a coordinator must be told on the study's page, and a site on its own.
DUTIES: dict[str, Callable[[Facts], bool]] = {
    "A release is withheld": lambda f: f.withheld,
    "is unlike the others": lambda f: bool(f.alerts),
    "Every release was withdrawn": lambda f: f.all_withdrawn and not f.withheld,
    "none will be made": lambda f: not (f.is_open or f.enough or f.current),
    "withdraws again and again": lambda f: (
        f.is_open and any(n > 1 and site in f.enrolled for site, n in f.withdrawals.items())
    ),
    "A new release is being made": lambda f: f.due and f.enough,
}


def plain(html: str) -> str:
    """Return what a page says, without its mark-up, charts and form fields."""
    html = re.sub(r"<svg.*?</svg>|<head>.*?</head>", " ", html, flags=re.S)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html)).replace("&#39;", "'")


def check(facts: Facts, said: str, where: object) -> None:
    for pattern, claim in CLAIMS.items():
        for match in re.finditer(pattern, said):
            around = said[max(0, match.start() - 80) : match.end() + 80]
            assert claim(facts, match), (where, match[0], around, facts)


# --------------------------------------------------------------------------- how a state is reached


class Walk:
    """A hub whose rows can be put back to an earlier state, and the steps from one to another."""

    def __init__(self, world: Any, tools: Any, monkeypatch: Any, trusted: bool, test: str) -> None:
        self.world, self.monkeypatch, self.noisy = world, monkeypatch, trusted
        # Trust and test records change few sentences, so that fewer ways to leave will do there.
        self.is_whole = not trusted and test == "none"
        self.has_test, self.is_uploaded = test != "none", test == "there"
        more = {"aggregator": 'name = "Average"\nepsilon = 1.0', "hub": "trusted"}
        parts = dict(more) if trusted else {}
        if test != "none":
            parts["test"] = tools.write_csv(world.folder / "test.csv", tools.table(60, 9))
        self.study = world.add_study(tools.study_text(min_sites=2, **parts))
        if trusted:
            world.hub.allow("demo", Budget(epsilon=1000.0), "coordinator:ann")
        if test == "there":
            content = (world.folder / "test.csv").read_bytes()
            path = "/api/studies/demo/files/test.csv"
            answer = world.client.put(path, content=content, headers=world.coordinator)
            assert answer.status_code == 200, answer.text
        token, _ = new_token(world.hub.store, "ann", hours=1, kind="test")
        self.cookie = {"cookie": f"consilience={token}"}
        self.said: dict[str, Any] = {"alerts": {}}
        self.trained: dict[tuple[str, int], Any] = {}
        self.requests = iter(f"{i:016x}" for i in range(10**6))

    def save(self) -> tuple[dict[str, list[dict[str, Any]]], dict[str, Any]]:
        with self.world.hub.store.reading() as db:
            rows = {
                table.name: [dict(row) for row in db.execute(sa.select(table)).mappings()]
                for table in tables.sorted_tables
            }
        return rows, dict(self.said)

    def load(self, saved: tuple[dict[str, list[dict[str, Any]]], dict[str, Any]]) -> None:
        rows, said = saved
        with self.world.hub.store._engines[1].begin() as db:
            for table in reversed(tables.sorted_tables):
                db.execute(table.delete())
            for table in tables.sorted_tables:
                if rows[table.name]:
                    db.execute(table.insert(), rows[table.name])
        self.said = dict(said)

    # ----- steps

    def enrol(self) -> None:
        for i in range(3):
            self.world.ward(f"ward {i}")
        self.world.ward("reader", fetch_only=True)
        self.world.invitation()
        self.world.invitation(days=0.5)
        with self.world.hub.store._engines[1].begin() as db:  # as restoring a backup leaves one
            row = db.execute(sa.select(invitations.c.hash).where(invitations.c.used.is_(None)))
            void = invitations.update().where(invitations.c.hash == row.scalars().first())
            db.execute(void.values(used=now(), used_by=""))

    def submit(self, name: str, sequence: int = 1) -> None:
        ward = self.world.wards[name]
        if (name, sequence) not in self.trained:
            made = ward.train(self.study, sequence=sequence, epsilon=5.0)
            self.trained[name, sequence] = made.sealed.to_bytes()
        answer = self.world.submit(ward, self.trained[name, sequence])
        assert answer.status_code == 201, answer.text

    def combine(self, *, reason: str | None = None, far: str | None = None) -> None:
        world, alerts = self.world, {far: "It is far."} if far else {}
        with self.monkeypatch.context() as patch:
            reasons = [] if reason is None else [reason]
            patch.setattr(f"{COMBINING}.Candidate.find_reasons", lambda _: reasons)
            patch.setattr(f"{COMBINING}.Combiner._find_far", lambda *_: alerts)
            patch.setattr(f"{COMBINING}.find_heavy", lambda _: {})
            if self.noisy:
                with contextlib.suppress(Refusal):  # too few sites
                    world.combiner.combine("demo", request=next(self.requests), actor="ann")
            else:
                world.combiner.run(at_once=True)
        row, current = world.hub.store.study("demo"), world.hub.store.release("demo")
        if reason is not None and reason in row["problem"]:
            self.said["withheld"] = row["changes"]
        elif current is not None and current["change"] == row["changes"]:
            self.said |= {"alerts": alerts, "release": current["digest"]}

    def fail(self) -> None:
        with self.monkeypatch.context() as patch:
            patch.setattr(f"{COMBINING}.collect", None)
            self.world.combiner.run(at_once=True)

    def withdraw(self, name: str) -> None:
        ward = self.world.wards[name]
        self.world.call(ward, "POST", "/api/studies/demo/withdrawals", b"{}")

    def revoke(self, name: str, *, withdraw: bool = False) -> None:
        self.world.hub.revoke("demo", name, "coordinator:ann", withdraw=withdraw)

    # ----- the three dimensions of the walk

    def releases(self) -> Iterator[str]:
        """Lead to studies without, with withheld, current and several releases."""
        start = self.save()
        yield "empty"
        self.load(start)
        self.enrol()
        yield "none"
        self.submit("ward 0")
        yield "too few"
        self.submit("ward 1")
        due = self.save()
        yield "due"
        if not self.noisy:
            self.combine(reason="It is worse.")
            yield "first withheld"
            self.load(due)
            self.fail()
            yield "failed"
            self.load(due)
        self.combine()
        yield "current"
        self.submit("ward 2")
        two = self.save()
        if not self.noisy:
            self.combine(reason="It is worse.")
            yield "second withheld"
            self.load(two)
            self.combine(far="ward 2")
            yield "alert"
            self.load(two)
        self.combine()
        yield "two"

    def events(self, at: str) -> Iterator[str]:
        """Let sites leave in all ways."""
        start = self.save()
        yield "nobody leaves"
        if at == "empty":
            return
        for name in ("ward 0", "ward 2") if self.is_whole else ("ward 0",):
            for combined in (False, True) if self.is_whole else (True,):
                self.load(start)
                self.withdraw(name)
                if combined:
                    self.combine()
                yield f"{name} withdraws{' and the rest is combined' * combined}"
        for withdraw in (False, True) if self.is_whole else (False,):
            self.load(start)
            self.revoke("ward 0", withdraw=withdraw)
            yield f"ward 0 is revoked{' and withdrawn' * withdraw}"
        if self.is_whole:
            for i in range(3):
                self.revoke(f"ward {i}")
            yield "all are revoked"
        if at in ("two", "none"):
            self.load(start)
            for sequence in (2, 3):
                self.submit("ward 2", sequence)
                self.withdraw("ward 2")
            yield "ward 2 withdraws again and again"
        self.load(start)

    def close(self) -> None:
        self.world.hub.close_study("demo", "coordinator:ann")


# -------------------------------------------------------------------------------- what is looked at


def pages(walk: Walk, facts: Facts) -> Iterator[tuple[str, str]]:
    """Yield the pages of a coordinator, the page of a site, and what the API answers it."""
    world = walk.world
    paths = ["/studies", "/studies/demo", "/studies/demo/close", "/studies/demo/sites"]
    paths += ["/studies/demo/invite", "/studies/demo/aggregate"]
    for name in ("ward 0", "ward 2") if facts.n_sites else ():
        at = f"/studies/demo/sites/{name}"
        paths += [at, f"{at}/revoke"]
    if facts.releases:
        paths.append(f"/studies/demo/releases/{facts.releases[-1]['sequence']}")
    for path in paths:
        answer = world.client.get(path, headers=walk.cookie)
        assert answer.status_code in (200, 403, 409), (path, answer.text)
        yield path, plain(answer.text)
    if "ward 1" in facts.enrolled:
        ward = world.wards["ward 1"]
        answer = world.call(ward, "GET", "/api/studies/demo/release")
        assert (answer.status_code == 200) == (facts.current is not None)
        if facts.current is None:
            yield "API", " ".join(answer.json()["error"][part] for part in ("message", "fix"))
        link = world.call(ward, "POST", "/api/studies/demo/visits").json()["path"]
        form = world.client.get(link)
        secret = form.headers["set-cookie"].partition(";")[0]
        token = re.search(r'name="token" value="([0-9a-f]{64})"', form.text)[1]
        opened = world.client.post(link, data={"token": token}, headers={"cookie": secret})
        view = next(
            line.partition(";")[0]
            for line in opened.headers.get_list("set-cookie")
            if line.startswith("consilience-site=")
        )
        world.client._client.cookies.clear()
        answer = world.client.get("/studies/demo", headers={"cookie": view})
        assert answer.status_code == 200, answer.text
        yield "own", plain(answer.text)
    world.client._client.cookies.clear()


def check_notices(walk: Walk, where: tuple[str, ...]) -> None:
    """What an address says was done is repeated only where it is so."""
    facts = count(walk.world, walk.noisy, walk.has_test, walk.said)
    is_so = {"created": facts.is_open, "closed": not facts.is_open, "uploaded": walk.is_uploaded}
    revoked, withdrawn = "ward 0" not in facts.enrolled, facts.all_withdrawn
    for path, is_done in {
        "/studies/demo": is_so,
        "/studies/demo/sites/ward 0": {"revoked": revoked},
        "/studies/demo/releases/1": {"released": bool(facts.releases) and not withdrawn},
        "/studies/demo/aggregate": {"allowed": True},
        "/studies": {},
    }.items():
        for done in NOTICES:
            answer = walk.world.client.get(f"{path}?done={done}", headers=walk.cookie)
            shown = re.search(r'role="status">', answer.text) is not None
            assert not shown or is_done.get(done, False), (where, path, done)


def check_state(walk: Walk, where: tuple[str, ...]) -> None:
    facts = count(walk.world, walk.noisy, walk.has_test, walk.said)
    seen = dict(pages(walk, facts))
    for path, said in seen.items():
        check(facts, said, (*where, path))
    for sentence, is_so in DUTIES.items():
        if is_so(facts):
            assert sentence in seen["/studies/demo"], (where, sentence, facts)
    for name in ("ward 0", "ward 2") if facts.n_sites else ():
        said = seen[f"/studies/demo/sites/{name}/revoke"]
        assert ("ithdraw its contribution" in said) == (name in facts.in_use), (where, said)
        assert ("will never work again" in said) == (name in facts.enrolled), (where, said)


@pytest.mark.parametrize(
    ("trusted", "test"),
    [(False, "none"), (False, "there"), (False, "missing"), (True, "none")],
)
def test_what_pages_say_is_so_in_every_state(
    sqlite_world: Any, tools: Any, monkeypatch: Any, trusted: bool, test: str
) -> None:
    walk = Walk(sqlite_world, tools, monkeypatch, trusted, test)
    n_states = 0
    for at in walk.releases():
        here = walk.save()
        for event in walk.events(at):
            check_state(walk, (at, event, "open"))
            there = walk.save()
            if at in ("empty", "current") and event in ("nobody leaves", "ward 0 is revoked"):
                check_notices(walk, (at, event, "open"))
            walk.close()
            check_state(walk, (at, event, "closed"))
            if at in ("empty", "current"):
                check_notices(walk, (at, event, "closed"))
            walk.load(there)
            n_states += 2
        walk.load(here)
    assert n_states > (100 if walk.is_whole else 30)


def test_templates_say_nothing_that_depends_on_a_state() -> None:
    """Such sentences are made in `hub.state`, beside the facts that they follow from."""
    folder = Path(dashboard.__file__).parent / "templates"
    words = re.compile(r"\byet\b|first (release|one)\b|[Nn]ewest release|row\.status ==|\.used\b")
    kept = {"new_study.html", "studies.html", "aggregate.html", "audit.html"}  # of no study, budget
    kept |= {"account.html"}  # whether an account is active is all there is to say of its state
    for file in sorted(folder.glob("*.html")):
        assert file.name in kept or not words.search(file.read_text()), file.name
