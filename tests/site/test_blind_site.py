"""Sites of a blind study with their folders, keyholders with theirs, and a shared folder."""

from __future__ import annotations

import csv
import json
import multiprocessing
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from consilience import Budget, Ledger
from consilience.blind.masked import Batch
from consilience.blind.papers import Papers
from consilience.blind.roster import Card, Roster
from consilience.cli.app import main
from consilience.errors import (
    BudgetExceeded,
    ContributionRejected,
    HubUnavailable,
    SettingsError,
)
from consilience.files.certificate import of_contribution
from consilience.files.contribution import Contribution
from consilience.files.release import Release
from consilience.files.sealed import Sealed, SigningKey
from consilience.keyholder.desk import FolderDesk
from consilience.keyholder.keyholder import Keyholder
from consilience.learners.base import plan_fit
from consilience.privacy.spending import Account, Spending
from consilience.site.blind import alone_account
from consilience.site.site import Site
from consilience.statistics import base
from consilience.statistics.moments import Moments
from consilience.study.batches import freeze_roster, gather_batches
from consilience.study.collect import read_submitted
from consilience.study.study import Study
from studies import blind_text, public_rows, table

STUDY = "heart-risk"
NAMES = ("north", "south", "east", "west")


@dataclass
class Collaboration:
    """A shared folder with a blind study, its sites, its keyholders and a coordinator's key."""

    place: Path
    n_keyholders: int = 2
    trusting: bool = True
    statistic: str = "Moments"
    settings: str = ""

    def __post_init__(self) -> None:
        self.shared, self.key = self.place / "shared", self.place / "coordinator.pem"
        self.shared.mkdir()
        self.keyholders = [
            Keyholder.create(self.place / f"keyholder-{k}") for k in range(self.n_keyholders)
        ]
        self.holders = [each.key.public for each in self.keyholders]
        text = blind_text(self.holders, statistic=self.statistic, settings=self.settings)
        (self.shared / "study.toml").write_text(text)
        self.study = Study.in_folder(self.shared)
        self.sites = [
            Site.init(
                self.place / name,
                name=name,
                dataset="ward",
                budget=Budget(epsilon=5.0, delta=1e-5),
            )
            for name in NAMES
        ]
        for site in self.sites:
            site.join_folder(self.shared)
            if self.trusting:
                site.trust_keyholders(STUDY, self.holders)

    def freeze(self) -> Roster:
        """Freeze the roster, and have all keyholders sign it."""
        listed = [(site.name, site.key.public, "the registrar") for site in self.sites]
        roster = freeze_roster(self.study, self.shared, listed, self.key)
        assert self.study.blind is not None
        for each in self.keyholders:
            self.papers.add_card(
                each.countersign(roster, self.study.blind, SigningKey.load(self.key).public)
            )
        return roster

    @property
    def papers(self) -> Papers:
        return Papers(self.shared)

    def work(self) -> None:
        """Have all keyholders acknowledge and open whatever is there."""
        for each in self.keyholders:
            for file in self.papers.files():
                self.papers.add_acknowledgement(each.acknowledge(file))
            for batch in self.papers.batches():
                self.papers.add_opening(each.open(batch))

    def contribute(self, i: int, epsilon: float = 1.0) -> Path:
        """Have a site train and submit."""
        path = self.sites[i].train(STUDY, table(400, seed=i), epsilon=epsilon)
        assert path is not None
        self.sites[i].submit(STUDY)
        return path

    def make(self) -> Release:
        """Make the release of what is open, by the command."""
        run("release", "make", self.shared, "--key", self.key)
        newest = sorted(self.shared.glob("release-*.safetensors"))[-1]
        return Release.load(newest)


def run(*arguments: object) -> str:
    """Run a command that must succeed."""
    with pytest.raises(SystemExit) as leaving:
        main(list(map(str, arguments)))
    assert (leaving.value.code or 0) == 0
    return ""


@pytest.fixture
def wards(tmp_path: Path) -> Collaboration:
    made = Collaboration(tmp_path)
    made.freeze()
    return made


def test_a_folder_carries_a_blind_study_to_a_release(
    wards: Collaboration, capsys: pytest.CaptureFixture[str]
) -> None:
    for i in range(4):
        wards.contribute(i, epsilon=[1.0, 3.0, 0.5, 2.0][i])
    wards.work()
    with pytest.raises(SystemExit):
        main(["release", "make", str(wards.shared), "--key", str(wards.key)])
    said = capsys.readouterr().err
    assert "No batch of this study is open yet" in said
    assert "was listed now" in said
    with pytest.raises(SystemExit):
        main(["release", "make", str(wards.shared), "--key", str(wards.key)])
    assert "is listed and waits for 2 keyholders" in capsys.readouterr().err
    wards.work()
    release = wards.make()
    assert {source.site for source in release.sources} == set(NAMES)
    for site in wards.sites:
        fetched = site.fetch(STUDY)
        assert fetched is not None
        assert "lists this site's contribution 1" in site.describe_own_part(STUDY, fetched)
    own, other = table(400, seed=0), table(400, seed=5)
    assert "That sum was subtracted" in wards.sites[0].adapt(STUDY, own).page.as_text(10_000)
    assert "cannot be subtracted" in wards.sites[0].adapt(STUDY, other).page.as_text(10_000)
    X = wards.study.schema.encode(table(500, seed=9)).X
    assert (release.predict(X) == table(500, seed=9)["ill"].to_numpy()).mean() > 0.6


def test_what_a_site_adapts_to_is_the_others_sum_and_all_the_noise(
    wards: Collaboration, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a chi-square test of the total that is finished, with a false alarm below 1e-6."""
    epsilons = [1.0, 3.0, 0.5, 2.0]
    for i in range(4):
        wards.contribute(i, epsilon=epsilons[i])
    wards.work()
    with pytest.raises(SystemExit):
        main(["release", "make", str(wards.shared), "--key", str(wards.key)])
    wards.work()
    wards.make()
    site = wards.sites[0]
    site.fetch(STUDY)
    finished: list[base.Summed] = []
    finish = Moments.finish

    def note(self: Moments, total: base.Summed, public: Any = None) -> Any:
        finished.append(total)
        return finish(self, total, public)

    monkeypatch.setattr(Moments, "finish", note)
    site.adapt(STUDY, table(400, seed=0))
    (rest,) = finished
    exact, size = 0.0, 0.0
    for i in range(1, 4):
        learner = wards.study.build(epsilons[i])
        assert isinstance(learner, base.Statistic)
        learner.schema = wards.study.schema
        task, _ = plan_fit(learner, table(400, seed=i), None)
        exact = exact + learner.scaled_total(task) * learner.step
        size += 400 * learner.scale
    found = (rest.values - exact) / np.sqrt(rest.variance)
    assert stats.chi2.ppf(3e-7, len(found)) < (found**2).sum() < stats.chi2.isf(3e-7, len(found))
    assert rest.size == pytest.approx(size)


def test_votes_hide_whole_sites_from_a_blind_hub_and_from_everybody(tmp_path: Path) -> None:
    """The opened total is the sites' votes and four shares of noise, and nothing else.

    By a chi-square test with a false alarm below 1e-6.
    """
    wards = Collaboration(tmp_path, statistic="VoteTally", settings=public_rows())
    wards.freeze()
    text = wards.sites[0].preview(STUDY, epsilon=1.0).page.as_text(10_000)
    assert "one site were replaced" in text
    assert "what this site's exact model, which stays here, says of public records" in text
    assert "what hides this whole site hides every record of it as well" in text
    epsilons = [1.0, 3.0, 0.5, 2.0]
    for i in range(4):
        path = wards.contribute(i, epsilon=epsilons[i])
        made = Contribution.load(path)
        assert made.guarantee.unit == "site"
        assert made.sealed.facts["size"] is None
        assert "one whole site" in of_contribution(made).as_text()
        assert wards.sites[i].ledger.balance("ward").spent.epsilon == pytest.approx(
            epsilons[i],
            rel=0.02,  # what is scaled by whole parts of 256 costs less
        )
    wards.work()
    with pytest.raises(SystemExit):
        main(["release", "make", str(wards.shared), "--key", str(wards.key)])
    wards.work()
    release = wards.make()
    assert release.guarantee.unit == "site"
    total, exact = release.total, 0.0
    assert total is not None
    for i in range(4):
        learner = wards.study.build(epsilons[i])
        assert isinstance(learner, base.Statistic)
        learner.schema = wards.study.schema
        task, _ = plan_fit(learner, table(400, seed=i), None)
        exact = exact + learner.scaled_total(task)
    event = learner.plan_noise().event
    assert event is not None
    found = (total.words - exact) * learner.step / (2 * event.drawn_sigma)
    assert stats.chi2.ppf(3e-7, len(found)) < (found**2).sum() < stats.chi2.isf(3e-7, len(found))
    assert total.size == pytest.approx(sum(wards.study.build(e).scale for e in epsilons))
    site = wards.sites[0]
    assert site.fetch(STUDY) is not None
    own = table(400, seed=0)
    assert "That sum was subtracted" in site.adapt(STUDY, own).page.as_text(10_000)


def test_the_page_says_whom_the_promise_rests_on_and_what_is_left(wards: Collaboration) -> None:
    site = wards.sites[0]
    text = site.preview(STUDY, epsilon=1.0).page.as_html()
    for said in (
        "at least 2 of the sites that are added up with this one",
        "If everybody else colludes, the same holds with epsilon = 1.44",
        "confirmed by the data owner",
        "checked by the registrar",
        "if at most 1 of all sites",
        "in an account of its own",
        "sealed seeds",
    ):
        assert said in text, said
    path = site.train(STUDY, table(400, seed=0), epsilon=1.0)
    assert path is not None
    page = of_contribution(Contribution.load(path)).as_html()
    assert "If everybody else colludes" in page
    assert "under one pad for each pad holder" in page
    (status,) = [each for each in [site.status(STUDY)] if each["blind"]]
    assert any(
        "if everybody else colludes: epsilon 1.44" in said for said in status["blind"]["said"]
    )


def test_keyholders_that_nobody_confirmed_count_as_colluding(tmp_path: Path) -> None:
    wards = Collaboration(tmp_path, trusting=False)
    wards.freeze()
    site = wards.sites[0]
    shown = site.preview(STUDY, epsilon=1.0)
    assert shown.cost is not None
    assert shown.cost.epsilon == pytest.approx(1.445, abs=0.01)
    assert "NOT confirmed" in shown.page.as_html()
    site.trust_keyholders(STUDY, wards.holders[:1])
    assert site.preview(STUDY, epsilon=1.0).cost == shown.cost
    with pytest.raises(SettingsError, match="names no keyholder"):
        site.trust_keyholders(STUDY, ["a" * 64])
    path = site.train(STUDY, table(400, seed=0), epsilon=1.0)
    (charge,) = site.ledger.charges("ward")
    assert path is not None
    alone = Contribution.load(path).alone
    assert alone is not None
    assert charge.epsilon == pytest.approx(alone.epsilon)
    site.trust_keyholders(STUDY, wards.holders)
    cost = site.preview(STUDY, epsilon=1.0).cost
    assert cost is not None
    assert 0.98 < (cost.epsilon or 0.0) <= 1.0


def test_what_holds_if_everybody_else_colludes_has_a_limit_of_its_own(
    wards: Collaboration,
) -> None:
    site = wards.sites[0]
    site.trust_keyholders(STUDY, (), limit=2.0)
    wards.contribute(0)
    balance = site.ledger.balance(alone_account("ward"))
    assert balance.left.epsilon == pytest.approx(2.0 - 1.4415, abs=0.01)
    with pytest.raises(BudgetExceeded, match="a limit of its own"):
        site.train(STUDY, table(400, seed=0), epsilon=1.0)
    assert len(site.ledger.charges("ward")) == 1


def test_a_repeated_training_returns_the_same_bytes(wards: Collaboration) -> None:
    site = wards.sites[0]
    path = site.train(STUDY, table(400, seed=0), epsilon=1.0)
    assert path is not None
    content = path.read_bytes()
    path.unlink()  # as if the machine had stopped between the seal and the file
    again = site.train(STUDY, table(400, seed=0), epsilon=1.0)
    assert again == path
    assert path.read_bytes() == content
    assert len(site.ledger.charges("ward")) == 1


def _die_while_drawing(folder: Path) -> None:
    base.noisy_sum = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    Site(folder).train(STUDY, table(400, seed=0), epsilon=1.0)


def test_a_stop_between_charge_and_seal_leaves_the_charge_and_no_file(
    wards: Collaboration,
) -> None:
    site = wards.sites[0]
    child = multiprocessing.get_context("fork").Process(
        target=_die_while_drawing, args=(site.folder,)
    )
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    (charge,) = site.ledger.charges("ward")
    assert charge.state == "reserved"
    assert not list(site.folder.rglob("contribution-*"))
    with pytest.raises(SettingsError, match="stopped before its result was stored"):
        site.train(STUDY, table(400, seed=0), epsilon=1.0)
    path = site.train(STUDY, table(400, seed=0), epsilon=1.0, anew=True)
    assert path is not None
    assert len(site.ledger.charges("ward")) == len(site.ledger.charges(alone_account("ward"))) == 2


def test_a_roster_that_not_all_have_signed_masks_nothing(tmp_path: Path) -> None:
    wards = Collaboration(tmp_path)
    site = wards.sites[0]
    with pytest.raises(HubUnavailable, match="not frozen yet"):
        site.preview(STUDY, epsilon=1.0)
    listed = [(each.name, each.key.public, "the registrar") for each in wards.sites]
    freeze_roster(wards.study, wards.shared, listed, wards.key)
    with pytest.raises(SettingsError, match="1 have signed its roster"):
        site.preview(STUDY, epsilon=1.0)
    wards.freeze()
    site.preview(STUDY, epsilon=1.0)


def test_a_roster_with_another_key_of_this_site_masks_nothing(tmp_path: Path) -> None:
    wards = Collaboration(tmp_path)
    listed = [(each.name, each.key.public, "the registrar") for each in wards.sites[1:]]
    listed.append((wards.sites[0].name, SigningKey.generate().public, "the hub"))
    roster = freeze_roster(wards.study, wards.shared, listed, wards.key)
    assert wards.study.blind is not None
    for each in wards.keyholders:
        hub = SigningKey.load(wards.key).public
        wards.papers.add_card(each.countersign(roster, wards.study.blind, hub))
    with pytest.raises(SettingsError, match="does not list this site"):
        wards.sites[0].preview(STUDY, epsilon=1.0)


def test_the_hub_cannot_show_another_roster_later(wards: Collaboration) -> None:
    site = wards.sites[0]
    before = site.terms(STUDY).masking.roster.digest
    other = SigningKey.generate()
    listed = [(each.name, each.key.public, "nobody") for each in wards.sites]
    roster = Roster.make(wards.study.reference, listed, other)
    place = wards.shared / "blind"
    (place / "roster.safetensors").write_bytes(roster.sealed.to_bytes())
    for card in wards.papers.cards():
        (place / f"pad-holder-{card.key}.safetensors").unlink()
    wards.papers.add_card(Card.make(roster, "0" * 64, other))
    assert site.terms(STUDY).masking.roster.digest == before
    with pytest.raises(SettingsError, match="have signed"):
        wards.sites[1].terms(STUDY)


def test_what_a_stranger_puts_into_the_folder_keeps_no_site_from_masking(tmp_path: Path) -> None:
    """Cards of 20 strangers, and a roster of one of them, which no keyholder has signed."""
    wards = Collaboration(tmp_path)
    listed = [(each.name, each.key.public, "nobody") for each in wards.sites]
    strangers = [SigningKey.generate() for _ in range(20)]
    theirs = Roster.make(wards.study.reference, listed, strangers[0])
    wards.papers.freeze(theirs, wards.holders)
    for stranger in strangers:
        wards.papers.add_card(Card.make(theirs, stranger.public, stranger))
    with pytest.raises(SettingsError, match="1 have signed its roster"):
        wards.sites[0].terms(STUDY)
    roster = wards.freeze()
    for stranger in strangers:
        wards.papers.add_card(Card.make(roster, stranger.public, stranger))
    wards.contribute(0)


def test_no_batch_of_a_stranger_is_waited_for_or_opened(wards: Collaboration) -> None:
    """Opened by one keyholder, or too small for any, it would leave all of its files unopened."""
    for i in range(4):
        wards.contribute(i)
    for each in wards.keyholders:
        for file in wards.papers.files():
            wards.papers.add_acknowledgement(each.acknowledge(file))
    files = wards.papers.files()
    for some in (files[:2], files[:3], files[1:]):
        wards.papers.add_batch(Batch.of(some).sign(SigningKey.generate()))
    desk = FolderDesk(wards.shared, SigningKey.load(wards.key).public)
    assert desk.batches(wards.holders[0]) == []
    submitted = read_submitted(wards.study, wards.shared)
    found = gather_batches(wards.study, wards.shared, submitted, wards.key)
    assert found.waiting == Batch.of(files)
    assert desk.batches(wards.holders[0]) == [found.waiting]


def test_a_file_of_a_site_that_is_not_on_the_roster_stops_no_batch(
    wards: Collaboration, tmp_path: Path
) -> None:
    for i in range(3):
        wards.contribute(i)
    ledger = Ledger(tmp_path / "strange.ledger")
    ledger.allow("ward", Budget(epsilon=500.0, delta=1e-4))
    masking = wards.sites[0].terms(STUDY).masking
    whose: Any = {"site": "strange", "signing": SigningKey.generate()}
    spending = Spending(Account(ledger, "ward"))
    content = wards.study.mask_sum(table(50, seed=9), spending, masking, epsilon=1.0, **whose)
    (wards.shared / "contribution-strange-0001.safetensors").write_bytes(content)
    for each in wards.keyholders:
        for file in wards.papers.files():
            if file.facts["site"] != "strange":
                wards.papers.add_acknowledgement(each.acknowledge(file))
    submitted = read_submitted(wards.study, wards.shared)
    found = gather_batches(wards.study, wards.shared, submitted, wards.key)
    assert found.waiting is not None
    assert len(found.waiting.files) == 3
    assert "'strange' is left out" in found.describe()


def test_a_site_counts_on_whom_it_knows(wards: Collaboration) -> None:
    site = wards.sites[0]
    assert site.count_on(STUDY, ["south", "east"]) == 3
    path = site.train(STUDY, table(400, seed=0), epsilon=1.0)
    assert path is not None
    counted = Contribution.load(path).sealed.facts["blind"]["counted"]
    assert counted == sorted(wards.sites[i].key.public for i in (1, 2))
    with pytest.raises(SettingsError, match="needs 3 sites"):
        site.count_on(STUDY, ["south"])
    with pytest.raises(SettingsError, match="lists no site"):
        site.count_on(STUDY, ["nowhere"])


def test_noise_of_a_site_fills_a_batch(wards: Collaboration) -> None:
    wards.contribute(0)
    wards.contribute(1)
    wards.work()
    wards.sites[2].mask_noise(STUDY)
    wards.sites[2].submit(STUDY)
    assert wards.sites[2].ledger.charges() == []
    wards.work()
    with pytest.raises(SystemExit):
        main(["release", "make", str(wards.shared), "--key", str(wards.key)])
    wards.work()
    release = wards.make()
    weights = {row["site"]: row["weight"] for row in release.sealed.facts["sources"]}
    assert weights == {"north": pytest.approx(0.5), "south": pytest.approx(0.5), "east": 0.0}
    for site in wards.sites[:3]:
        assert site.fetch(STUDY) is not None


def test_a_late_site_waits_and_no_site_is_in_two_batches(wards: Collaboration) -> None:
    for i in range(3):
        wards.contribute(i)
    wards.work()
    with pytest.raises(SystemExit):
        main(["release", "make", str(wards.shared), "--key", str(wards.key)])
    wards.contribute(3)
    wards.contribute(0)  # again, after its first file was listed
    wards.work()
    submitted = read_submitted(wards.study, wards.shared)
    batches = gather_batches(wards.study, wards.shared, submitted, wards.key)
    assert len(batches.opened.files) == 3
    assert batches.waiting is None
    assert "1 of the 3 sites" in batches.describe()
    release = wards.make()
    north = next(source for source in release.sources if source.site == "north")
    assert north.sequence == 1
    assert north.guarantee.epsilon == pytest.approx(2 * 0.98, abs=0.05)


def test_sites_lend_noise_to_a_late_one_and_all_fetch(wards: Collaboration) -> None:
    north = wards.sites[0]
    wards.contribute(0)
    wards.contribute(0)  # superseded before any batch: both are paid for
    for i in (1, 2):
        wards.contribute(i)
    wards.work()
    with pytest.raises(SystemExit):
        main(["release", "make", str(wards.shared), "--key", str(wards.key)])
    wards.work()
    wards.contribute(3)
    for site in wards.sites[:2]:
        site.mask_noise(STUDY)
        site.submit(STUDY)
    wards.work()
    wards.make()  # which lists the second batch
    wards.work()
    release = wards.make()
    spent = {one.site: one.guarantee.epsilon for one in release.sources if one.guarantee.epsilon}
    assert set(spent) == set(NAMES)
    assert len(release.sources) == 6
    assert spent["north"] == pytest.approx(2 * spent["south"])
    for site in wards.sites:
        assert site.fetch(STUDY) is not None
    assert "That sum was subtracted" in north.adapt(STUDY, table(400, seed=0)).page.as_text(10_000)


def test_a_release_with_a_site_that_is_not_on_the_roster_is_not_kept(
    wards: Collaboration,
) -> None:
    for i in range(3):
        wards.contribute(i)
    wards.work()
    with pytest.raises(SystemExit):
        main(["release", "make", str(wards.shared), "--key", str(wards.key)])
    wards.work()
    release = wards.make()
    facts = {k: v for k, v in release.sealed.facts.items() if k not in ("key", "tensors")}
    facts["sources"] = [{**facts["sources"][0], "site": "nowhere"}, *facts["sources"][1:]]
    forged = Sealed.seal("release", facts, release.sealed.tensors, SigningKey.load(wards.key))
    forged.save(wards.shared / release.filename)
    absent = next(site for site in wards.sites if site.name == "west")
    absent.terms(STUDY)
    with pytest.raises(ContributionRejected, match="not on the roster"):
        absent.fetch(STUDY)
    stranger = SigningKey.generate()
    Sealed.seal("release", facts, release.sealed.tensors, stranger).save(
        wards.shared / release.filename
    )
    with pytest.raises(ContributionRejected, match="another key"):
        wards.sites[0].fetch(STUDY)


def test_a_file_that_is_withdrawn_takes_its_batch_along(wards: Collaboration) -> None:
    for i in range(3):
        wards.contribute(i)
    wards.work()
    with pytest.raises(SystemExit):
        main(["release", "make", str(wards.shared), "--key", str(wards.key)])
    wards.work()
    wards.sites[1].withdraw(STUDY)
    submitted = read_submitted(wards.study, wards.shared)
    batches = gather_batches(wards.study, wards.shared, submitted, wards.key)
    assert batches.opened.files == []


def test_a_lost_ledger_gets_both_charges_back(wards: Collaboration) -> None:
    site = wards.sites[0]
    wards.contribute(0)
    before = [site.ledger.balance(name).spent.epsilon for name in ("ward", alone_account("ward"))]
    for path in site.folder.glob("ledger.sqlite*"):
        path.unlink()
    recovered = site.recover(limit=Budget(epsilon=5.0, delta=1e-5))
    assert recovered.entered == 1
    after = [site.ledger.balance(name).spent.epsilon for name in ("ward", alone_account("ward"))]
    assert after == pytest.approx(before)


def test_the_commands_freeze_trust_and_mask(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wards = Collaboration(tmp_path, n_keyholders=1, trusting=False)
    roster = tmp_path / "roster.csv"
    with roster.open("w", newline="") as file:
        rows: Any = csv.writer(file)
        rows.writerow(["name", "key", "checked_by"])
        rows.writerows([site.name, site.key.public, "the registrar"] for site in wards.sites)
    run("release", "freeze", wards.shared, roster, "--key", wards.key)
    wards.freeze()
    site = ("--folder", tmp_path / "north")
    capsys.readouterr()
    run("site", "trust-keyholder", STUDY, wards.holders[0], "--limit", 4, *site)
    assert "All keyholders of the study are confirmed" in capsys.readouterr().out
    run("site", "count-on", STUDY, "south", "west", *site)
    capsys.readouterr()
    run("site", "noise", STUDY, *site, "--json")
    noise = json.loads(capsys.readouterr().out)
    assert not Contribution.load(noise["file"]).has_records
    run("site", "status", *site)
    assert "newest file: noise only, no record" in capsys.readouterr().out
    run("contribution", "show", noise["file"])
    assert "It holds a share of noise, and no record." in capsys.readouterr().out
    roster.write_text("name,key\n")
    with pytest.raises(SystemExit):
        main(["release", "freeze", str(wards.shared), str(roster), "--key", str(wards.key)])
    assert "cannot be read as a list of sites" in capsys.readouterr().err


def test_an_unmasked_sum_is_no_contribution_to_a_blind_study(wards: Collaboration) -> None:
    learner = wards.study.build(1.0)
    learner.schema = wards.study.schema
    ledger = wards.sites[0].ledger
    learner.fit(table(400, seed=0), ledger=ledger, dataset="ward", key="clear")
    with pytest.raises(ContributionRejected):
        wards.study.accept(
            Contribution.make(
                learner,
                study=wards.study.reference,
                site="north",
                sequence=1,
                key=wards.sites[0].key,
            )
        )
