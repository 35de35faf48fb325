import ast
import json
import os
import re
import shutil
import signal
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from consilience import Budget, Ledger
from consilience.cli import site as commands
from consilience.cli.app import main
from consilience.cli.files import make
from consilience.errors import (
    BudgetExceeded,
    ContributionRejected,
    HubUnavailable,
    LedgerDamaged,
    SettingsError,
)
from consilience.files.contribution import Contribution
from consilience.files.log import ReleaseLog
from consilience.files.release import Release
from consilience.files.sealed import Sealed, SealedFile, SigningKey
from consilience.hub.combining import Combiner
from consilience.hub.hub import Hub, Settings
from consilience.hub.store.tables import releases
from consilience.protocol import Invitation, Refusal, Rotation
from consilience.site import releases as releases_module
from consilience.site.client import HubClient, SharedFolder
from consilience.site.history import Seen, compare_logs
from consilience.site.recovery import Recovery
from consilience.site.site import Site
from consilience.study.collect import Publication, read_submitted
from consilience.study.study import Study
from forks import HubProcess
from studies import ACCEPTED_ONCE, TRUSTED, records_parts, study, study_text, table


@pytest.fixture
def shared(tmp_path):
    folder = tmp_path / "shared"
    folder.mkdir()
    (folder / "study.toml").write_text(study_text())
    return folder


def site_in(folder, shared, name="north", epsilon=3.0):
    site = Site.init(folder, name=name, dataset="ward", budget=Budget(epsilon=epsilon))
    site.join_folder(shared)
    return site


def publish(shared, sequence=1, key=None, log=..., without=0):
    """Put a release into the folder; by default its log lists made-up ones before it."""
    if log is ...:
        log = ReleaseLog(digests=[f"{number:064x}" for number in range(1, sequence)])
    found = study()
    parts = [
        Contribution.load(file) for file in sorted(shared.glob("contribution-*-0001.safetensors"))
    ]
    del parts[:without]
    published = Publication(key or SigningKey.generate(), sequence, log=log)
    release = found.combine(parts, publication=published)
    release.save(shared / f"release-{sequence:04d}.safetensors")
    return release


def test_a_folder_is_enough_to_take_part(shared, tmp_path):
    sites = [site_in(tmp_path / name, shared, name) for name in ("north", "south")]
    for i, site in enumerate(sites):
        path = site.train("heart-risk", table(500, seed=i), epsilon=1.0)
        assert path.name == "contribution-0001.safetensors"
        assert site.ledger.balance("ward").left.epsilon == pytest.approx(2.0)
        assert site.submit("heart-risk")["state"] == "accepted"
        assert site.submit("heart-risk")["digest"] == Contribution.load(path).digest
    assert sites[0].fetch("heart-risk") is None
    made = publish(shared)
    found = sites[0].fetch("heart-risk")
    assert found.digest == made.digest == sites[0].release("heart-risk").digest
    assert sites[0].status("heart-risk")["release"] == 1
    sites[1].withdraw("heart-risk")
    assert [file.name for file in shared.glob("contribution-*.safetensors")] == [
        "contribution-north-0001.safetensors"
    ]


def test_sites_with_similar_names_have_different_files(shared, tmp_path):
    names = ("release", "north", "north-1", "north 1", "north.1")
    sites = {name: site_in(tmp_path / name, shared, name) for name in names}
    for i, site in enumerate(sites.values()):
        site.train("heart-risk", table(300, seed=i), epsilon=1.0)
        site.submit("heart-risk")
    assert sites["north"].fetch("heart-risk") is None  # the site named "release" is not one

    def there():
        return {Contribution.load(file).site for file in shared.glob("contribution-*.safetensors")}

    assert there() == set(names)
    sites["north"].withdraw("heart-risk")
    assert there() == set(names) - {"north"}


def test_nothing_is_charged_or_trained_without_approval(shared, tmp_path):
    site = site_in(tmp_path / "north", shared)
    seen = []
    assert (
        site.train(
            "heart-risk", table(200), epsilon=1.0, approve=lambda preview: seen.append(preview)
        )
        is None
    )
    assert site.ledger.charges() == []
    text = seen[0].page.as_text()
    assert "epsilon = 3 of 3" in text
    assert "epsilon = 2 of 3" in text
    assert "What will leave this site" in text


@pytest.mark.parametrize("delta", [0.0, 1e-6])
def test_the_page_to_approve_states_what_the_ledger_will_charge(delta, shared, tmp_path):
    text = study_text("PrivateForestClassifier", "WeightedVote")
    (shared / "study.toml").write_text(text.replace("[privacy]", f"[privacy]\ndelta = {delta}"))
    budget = Budget(epsilon=3.0, delta=1e-5)  # under replace-one, the study under add-remove
    site = Site.init(tmp_path / "north", name="north", dataset="ward", budget=budget)
    site.join_folder(shared)
    shown = site.preview("heart-risk", epsilon=1.0)
    assert "this training  epsilon = 2" in shown.page.as_text()
    assert "epsilon = 1 of 3" in shown.page.as_text()
    assert not site.preview("heart-risk", epsilon=1.6).fits
    site.train("heart-risk", table(200), epsilon=1.0)
    spent = site.ledger.balance("ward").spent
    assert spent.epsilon == pytest.approx(shown.cost.epsilon, abs=1e-6)
    assert spent.epsilon <= shown.cost.epsilon
    assert spent.delta <= shown.cost.delta
    with pytest.raises(BudgetExceeded, match="was to be charged epsilon=2"):
        site.train("heart-risk", table(200), epsilon=1.0, anew=True)


@pytest.mark.parametrize(("mechanism", "bound"), [("objective", ""), ("generalized", "at most ")])
def test_the_page_says_where_the_ledger_may_charge_less(mechanism, bound, shared, tmp_path):
    (shared / "study.toml").write_text(study_text(settings=f'mechanism = "{mechanism}"'))
    site = site_in(tmp_path / "north", shared)
    shown = site.preview("heart-risk", epsilon=1.0)
    assert f"this training  {bound}epsilon = 1" in shown.page.as_text()
    site.train("heart-risk", table(200), epsilon=1.0)
    spent = site.ledger.balance("ward").spent.epsilon
    assert spent <= shown.cost.epsilon
    assert (spent < 0.99) == bool(bound)


def test_different_costs_are_different_on_the_page(shared, tmp_path):
    (shared / "study.toml").write_text(
        study_text().replace("epsilon_max = 3.0", "epsilon_max = 30.0")
    )
    site = site_in(tmp_path / "north", shared, epsilon=30.0)
    pages = [site.preview("heart-risk", epsilon=each) for each in (10.0, 10.000000004)]
    assert pages[0].digest != pages[1].digest
    poor = site_in(tmp_path / "south", shared, "south", epsilon=0.9999999)
    with pytest.raises(BudgetExceeded, match=r"epsilon=1, but epsilon=0\.9999999 is left"):
        poor.train("heart-risk", table(200), epsilon=1.0)
    with pytest.raises(SettingsError, match="is that already"):
        site.raise_budget(epsilon=30.0000000004, reason="more")


def test_a_training_beyond_the_budget_is_refused_before_it_starts(shared, tmp_path):
    site = site_in(tmp_path / "north", shared, epsilon=0.5)
    assert not site.preview("heart-risk", epsilon=1.0).fits
    with pytest.raises(BudgetExceeded, match=r"0\.5 is left"):
        site.train("heart-risk", table(200), epsilon=1.0)
    with pytest.raises(SettingsError, match=r"from 0\.1 to 3"):
        site.train("heart-risk", table(200), epsilon=7.0)
    assert site.ledger.charges() == []


def test_a_machine_that_stops_before_the_file_is_written_charges_once(
    shared, tmp_path, monkeypatch
):
    site = site_in(tmp_path / "north", shared)
    save = Contribution.save

    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(Contribution, "save", stopped)
    with pytest.raises(KeyboardInterrupt):
        site.train("heart-risk", table(200), epsilon=1.0)
    assert site.ledger.balance("ward").spent.epsilon == pytest.approx(1.0)
    monkeypatch.setattr(Contribution, "save", save)
    asked = []
    path = Site(site.folder).train(
        "heart-risk", table(200), epsilon=1.0, approve=lambda preview: asked.append(preview)
    )
    assert path.exists()
    assert asked == []  # it was approved and paid for
    assert site.ledger.balance("ward").spent.epsilon == pytest.approx(1.0)
    site.train("heart-risk", table(200), epsilon=1.0, anew=True)
    assert site.ledger.balance("ward").spent.epsilon == pytest.approx(2.0)
    assert Contribution.load(site.contribution("heart-risk")).sequence == 2


def test_a_release_of_another_hub_or_an_older_one_is_not_kept(shared, tmp_path):
    sites = [site_in(tmp_path / name, shared, name) for name in ("north", "south")]
    for i, site in enumerate(sites):
        site.train("heart-risk", table(300, seed=i), epsilon=1.0)
        site.submit("heart-risk")
    key = SigningKey.generate()
    publish(shared, 2, key)
    assert sites[0].fetch("heart-risk").sequence == 2
    (shared / "release-0002.safetensors").unlink()
    publish(shared, 1, key)
    with pytest.raises(ContributionRejected, match="older than release 2"):
        sites[0].fetch("heart-risk")
    publish(shared, 3, SigningKey.generate())
    with pytest.raises(ContributionRejected, match="older than release 2"):
        sites[0].fetch("heart-risk")
    (shared / "release-0001.safetensors").unlink()
    with pytest.raises(ContributionRejected, match="another key"):  # there is nothing else
        sites[0].fetch("heart-risk")
    assert sites[0].release("heart-risk").sequence == 2


def test_a_restored_ledger_cannot_forget_what_was_handed_out(shared, tmp_path):
    site = site_in(tmp_path / "north", shared)
    site.train("heart-risk", table(200), epsilon=0.5)
    head = site.backup(tmp_path / "backup.sqlite")
    site.train("heart-risk", table(200), epsilon=1.0)
    spent = site.ledger.balance("ward").spent.epsilon
    with pytest.raises(SettingsError, match="still has a ledger"):
        site.recover(tmp_path / "backup.sqlite")
    shutil.rmtree(tmp_path / "lost", ignore_errors=True)
    for file in site.folder.glob("ledger.sqlite*"):
        file.unlink()
    with pytest.raises(SettingsError, match="ledger is gone"):
        site.preview("heart-risk", epsilon=0.5)
    assert site.recover(tmp_path / "backup.sqlite").entered == 1
    assert site.ledger.balance("ward").spent.epsilon == pytest.approx(spent)
    Ledger(site.folder / "ledger.sqlite").verify(head)


def test_a_folder_that_is_no_site_and_names_that_cannot_be(tmp_path, shared):
    with pytest.raises(SettingsError, match="consilience site init"):
        Site(tmp_path)
    with pytest.raises(SettingsError, match="name of a site"):
        Site.init(tmp_path / "x", name="../etc", dataset="ward", budget=Budget(epsilon=1.0))
    site = site_in(tmp_path / "north", shared)
    with pytest.raises(SettingsError, match="holds a site already"):
        Site.init(tmp_path / "north", name="north", dataset="ward", budget=Budget(epsilon=1.0))
    for name in ("unknown", "../north", ".x"):
        with pytest.raises(SettingsError, match="study"):
            site.study(name)
    with pytest.raises(SettingsError, match="https://"):
        site.join("http://hub.example", "code")


class Stopped(BaseException):
    """Raised where a machine stops: nothing after it is done."""


def stop(*_, **__):
    raise Stopped


def test_a_machine_that_stops_while_a_key_is_written_leaves_no_half_of_it(
    tmp_path, shared, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr("consilience.files.sealed.os.link", stop)
        with pytest.raises(Stopped):
            site_in(tmp_path / "north", shared)
    assert not list((tmp_path / "north").glob("*.pem"))
    assert site_in(tmp_path / "north", shared).key.public


def test_a_machine_that_stops_while_a_ledger_is_restored_has_restored_nothing(
    tmp_path, shared, monkeypatch
):
    """Half a restore would be a ledger without its last charges, which must never happen."""
    site = site_in(tmp_path / "north", shared)
    site.backup(tmp_path / "backup.sqlite")
    site.train("heart-risk", table(200), epsilon=1.0)
    for file in site.folder.glob("ledger.sqlite*"):
        file.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "recover", stop)
        with pytest.raises(Stopped):
            site.recover(tmp_path / "backup.sqlite")
    with pytest.raises(SettingsError, match="ledger is gone"):
        site.preview("heart-risk", epsilon=0.5)
    assert site.recover(tmp_path / "backup.sqlite").entered == 1
    assert site.ledger.balance("ward").spent.epsilon == pytest.approx(1.0)
    site.ledger.verify()


def test_a_journal_that_was_left_is_not_mixed_with_a_backup(tmp_path, shared):
    site = site_in(tmp_path / "north", shared)
    site.backup(tmp_path / "backup.sqlite")
    (site.folder / "ledger.sqlite").rename(tmp_path / "lost.sqlite")
    (site.folder / "ledger.sqlite-wal").write_bytes(b"left behind")
    with pytest.raises(SettingsError, match="-wal and -shm"):
        site.recover(tmp_path / "backup.sqlite")


def test_a_rotation_that_stopped_after_the_hub_took_the_key_is_completed(tmp_path, monkeypatch):
    hub = Hub(Settings(tmp_path / "hub"))
    hub.add_study(study_text(), "operator")
    code, _ = hub.invite("heart-risk", "operator")
    server = HubProcess(tmp_path / "hub")
    server.start()
    server.wait()
    try:
        site = Site.init(
            tmp_path / "north", name="north", dataset="ward", budget=Budget(epsilon=3.0)
        )
        site.join(server.address, code)
        old = site.key.public
        site.train("heart-risk", table(100), epsilon=1.0)
        with pytest.raises(
            SettingsError, match="was not submitted"
        ):  # it would be lost, and was paid for
            site.rotate_key()
        assert not (site.folder / "key.new.pem").exists()
        site.submit("heart-risk")
        with monkeypatch.context() as patch:
            rotate_key = HubClient.rotate_key
            patch.setattr(HubClient, "rotate_key", lambda *given: stop(rotate_key(*given)))
            with pytest.raises(Stopped):
                site.rotate_key()
        assert site.key.public == hub.store.sites("heart-risk")[0]["key"] != old
        assert site.outdated == ["heart-risk"]  # as far as this site knows
        site.train(
            "heart-risk", table(100), epsilon=1.0
        )  # completes it first: what the old key signs is lost
        assert site.outdated == []
        assert site.submit("heart-risk")["state"] == "accepted"
        new = site.key.public
        assert new != old
        assert new == site.key.public == hub.store.sites("heart-risk")[0]["key"]
        assert SigningKey.load(site.folder / f"key.{old[:16]}.pem").public == old
        assert site.fetch("heart-risk") is None
        hub.revoke("heart-risk", "north", "operator")
        site.rotate_key()
        assert site.outdated == ["heart-risk"]
        with pytest.raises(SettingsError, match="replaced or revoked"):
            site.fetch("heart-risk")
    finally:
        server.kill()
        server.end()
        hub.close()


def test_a_hub_that_refuses_a_rotation_stops_nothing_elsewhere(hub, tmp_path, monkeypatch):
    hub.add_study(study_text().replace("heart-risk", "aaa"), "operator")
    site = Site.init(tmp_path / "north", name="north", dataset="ward", budget=Budget(epsilon=3.0))
    for name in ("aaa", "heart-risk"):
        site.join(hub.address, hub.invite(name, "operator")[0])
    site.train("aaa", table(100), epsilon=0.5)
    send, refusal, old = HubClient._send, {"kind": SettingsError}, site.key.public

    def refuse(client, method, path, body, most):
        if b'"aaa"' in body or "/aaa" in path:
            raise refusal["kind"]("no")
        return send(client, method, path, body, most)

    with monkeypatch.context() as patch:
        patch.setattr(HubClient, "_send", refuse)
        with pytest.raises(SettingsError, match="--anyway"):
            site.rotate_key()
        for kind in (SettingsError, HubUnavailable):  # twice: two keys that this hub knows not
            refusal["kind"] = kind
            assert site.rotate_key(anyway=True) == site.key.public != old
            assert site.outdated == ["aaa"]
        with pytest.raises(refusal["kind"], match="--skip aaa"):  # it may have what is not here
            site.train("heart-risk", table(100), epsilon=0.5)
        assert site.train("heart-risk", table(100), epsilon=0.5, skip=["aaa"])
        assert site.submit("heart-risk")["state"] == "accepted"
        assert site.fetch("heart-risk") is None
        assert site.withdraw("heart-risk")["state"] == "withdrawn"
        assert site.recover().unreached == ("aaa",)
        with pytest.raises(HubUnavailable, match="no"):
            site.train("aaa", table(100), epsilon=0.5)
        with pytest.raises(HubUnavailable, match="no"):
            site.fetch("aaa")
    assert site.train("aaa", table(100), epsilon=0.5)  # it is asked again, and takes the key
    assert site.outdated == []
    assert hub.store.sites("aaa")[0]["key"] == site.key.public
    assert site.submit("aaa")["state"] == "accepted"


def test_a_rotation_that_an_earlier_version_left_is_completed(hub, tmp_path):
    """It noted nothing for each study; the hub may know either key."""
    site = Site.init(tmp_path / "north", name="north", dataset="ward", budget=Budget(epsilon=3.0))
    site.join(hub.address, hub.invite("heart-risk", "operator")[0])
    for taken in (False, True):
        new = SigningKey.at(site.folder / "key.new.pem")
        if taken:
            site._hub(site._joined("heart-risk")).rotate_key("heart-risk", new)
        assert site.fetch("heart-risk") is None
        assert site.key.public == new.public == hub.store.sites("heart-risk")[0]["key"]
        assert not (site.folder / "key.new.pem").exists()


@pytest.mark.parametrize(("text", "problem"), ACCEPTED_ONCE.values(), ids=list(ACCEPTED_ONCE))
def test_a_study_that_is_refused_today_is_shown_but_not_trained(text, problem, shared, tmp_path):
    with pytest.raises(SettingsError, match=problem):
        Study.from_text(text)
    site = site_in(tmp_path / "north", shared)
    old, file = Study.from_text(text, stored=True), tmp_path / "north/studies/heart-risk/study.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "study": old.to_dict()}))
    assert site.studies == ["heart-risk"]
    assert site.study("heart-risk").digest == old.digest
    assert site.status("heart-risk")["contributions"] == 0
    with pytest.raises(SettingsError, match=problem):
        site.train("heart-risk", table(500), epsilon=1.0)
    assert site.ledger.balance("ward").left.epsilon == 3.0


# ------------------------------------------------------------------ exact contributions


@pytest.fixture
def trusting(tmp_path):
    folder = tmp_path / "trusting"
    folder.mkdir()
    text = study_text(more="epsilon = 1.0", privacy=TRUSTED)
    (folder / "study.toml").write_text(text)
    return folder


def test_an_exact_model_leaves_only_a_site_that_allowed_it(trusting, tmp_path):
    site = site_in(tmp_path / "north", trusting)
    assert not site.preview("heart-risk").fits
    with pytest.raises(BudgetExceeded, match="allow-exact"):
        site.train("heart-risk", table(300))
    assert [note.kind for note in site.ledger.notes()] == ["allow"]
    site.allow_exact(reason="the board, 3 May")
    with pytest.raises(SettingsError, match="Leave the epsilon out"):  # it would mean nothing
        site.train("heart-risk", table(300), epsilon=1.0)
    shown = site.preview("heart-risk")
    assert shown.fits
    assert "charged" not in shown.page.as_text()
    assert "as an exact contribution" in " ".join(shown.page.as_text().split())
    path = site.train("heart-risk", table(300))
    note = site.ledger.notes("ward")[-1]
    assert (note.kind, note.study) == ("exact", site.study("heart-risk").digest)
    assert "exact contribution 1 to heart-risk" in note.purpose
    assert site.ledger.balance("ward").spent.epsilon == 0
    assert Contribution.load(path, trusted=True).guarantee.epsilon == float("inf")
    site.allow_exact(reason="the board, 4 May", allowed=False)
    with pytest.raises(BudgetExceeded, match="allow-exact"):
        site.train("heart-risk", table(300), anew=True)
    allowed = Site.init(
        tmp_path / "south", name="s", dataset="w", budget=Budget(epsilon=1.0), allow_exact=True
    )
    assert allowed.ledger.permits_exact("w")


def test_a_training_of_a_site_names_its_epsilon(shared, tmp_path):
    site = site_in(tmp_path / "north", shared)
    with pytest.raises(SettingsError, match="needs an epsilon"):
        site.train("heart-risk", table(200))


def test_an_approval_refers_to_everything_on_the_page(shared, tmp_path):
    site = site_in(tmp_path / "north", shared)
    shown = site.preview("heart-risk", epsilon=1.0)
    assert shown.digest == site.preview("heart-risk", epsilon=1.0).digest
    assert shown.digest != site.preview("heart-risk", epsilon=1.1).digest
    assert shown.digest in shown.page_to_file.as_text()
    site.train("heart-risk", table(200), epsilon=1.0)  # now less is left
    assert shown.digest != site.preview("heart-risk", epsilon=1.0).digest


def test_an_approval_is_good_for_one_training(trusting, tmp_path, monkeypatch):
    """An exact training changes no amount on the page."""
    site = site_in(tmp_path / "north", trusting)
    site.allow_exact(reason="yes")
    approved = site.preview("heart-risk").digest

    def train(seed):
        return site.train(
            "heart-risk", table(300, seed=seed), approve=lambda shown: shown.digest == approved
        )

    with monkeypatch.context() as patch:  # also of one that stopped before its file was written
        patch.setattr(Contribution, "save", stop)
        with pytest.raises(Stopped):
            train(1)
    assert train(1) is not None  # it goes on, without asking
    assert train(1) == site.contribution("heart-risk")  # and is only reported now
    site.submit("heart-risk")
    assert train(1) is None
    assert train(2) is None
    assert [note.kind for note in site.ledger.notes()].count("exact") == 1
    assert "number 2 of this site" in site.preview("heart-risk").page.as_text()
    site.raise_budget(epsilon=4.0, reason="more")
    assert site.ledger.head() in site.preview("heart-risk").page.as_text()


# ------------------------------------------------------------------ joining


@pytest.fixture
def hub(tmp_path):
    hub = Hub(Settings(tmp_path / "hub"))
    hub.add_study(study_text(), "operator")
    server = HubProcess(tmp_path / "hub")
    server.start()
    server.wait()
    hub.address = server.address
    yield hub
    server.kill()
    server.end()
    hub.close()


def test_the_first_answer_of_a_hub_is_checked_against_the_invitation(hub, tmp_path):
    site = Site.init(tmp_path / "north", name="north", dataset="ward", budget=Budget(epsilon=3.0))
    text, _ = hub.invite("heart-risk", "operator")
    invited = Invitation.parse(text)
    assert invited[1:] == (hub.key.public, study().digest)
    with pytest.raises(SettingsError, match="does not name"):
        site.join(hub.address, invited.code)
    with pytest.raises(SettingsError, match="hub with another key"):
        site.join(hub.address, str(invited._replace(hub_key="0" * 64)))
    with pytest.raises(ContributionRejected, match="than the invitation names"):
        site.join(hub.address, str(invited._replace(study="0" * 64)))
    assert site.studies == []
    site.join(hub.address, text)
    assert site._joined("heart-risk").hub_key == hub.key.public


def test_a_study_is_not_replaced_by_another_of_its_name(shared, tmp_path):
    site = site_in(tmp_path / "north", shared)
    site.train("heart-risk", table(200), epsilon=1.0)
    site.submit("heart-risk")
    before = site._joined("heart-risk")
    other = tmp_path / "other"
    shutil.copytree(shared, other)
    with pytest.raises(SettingsError, match="Nothing was replaced"):  # another place
        site.join_folder(other)
    (shared / "study.toml").write_text(study_text().replace("epsilon_max = 3.0", "epsilon_max = 9"))
    with pytest.raises(SettingsError, match="Nothing was replaced"):  # another version
        site.join_folder(shared)
    (shared / "study.toml").write_text(study_text())
    site.join_folder(shared)  # the same again
    assert site._joined("heart-risk") == before


@pytest.mark.parametrize(
    "name", ["study.json", "key.pem", "ledger.sqlite", "contribution-0001.safetensors", ".x.csv"]
)
def test_a_public_file_cannot_be_named_like_a_file_of_the_site(shared, tmp_path, name):
    text = study_text() + records_parts(shared).replace("public.csv", name)
    (shared / "public.csv").rename(shared / name)
    (shared / "study.toml").write_text(text)
    with pytest.raises(SettingsError, match="must be named by"):
        site_in(tmp_path / "north", shared)
    assert Study.from_text(text, stored=True).public.file == name  # old ones stay readable


def test_public_files_of_one_name_are_one_file(shared, tmp_path):
    text = study_text() + records_parts(shared)
    for name in ("public.csv", "Public.csv"):
        with pytest.raises(SettingsError, match="one file with two digests"):
            Study.from_text(text.replace("test.csv", name))
    digests = re.findall("[0-9a-f]{64}", text)
    both = Study.from_text(text.replace("test.csv", "public.csv").replace(digests[1], digests[0]))
    assert [part.file for part in both.files] == ["public.csv", "public.csv"]


# ------------------------------------------------------------------ a shared folder


def test_a_shared_folder_that_leads_elsewhere_is_not_used(shared, tmp_path):
    site = site_in(tmp_path / "north", shared)
    site.train("heart-risk", table(200), epsilon=1.0)
    place = site.folder / "studies" / "heart-risk"
    kept = sorted(file.name for file in place.iterdir())
    uses = (
        lambda: site.withdraw("heart-risk"),
        lambda: site.submit("heart-risk"),
        lambda: site.fetch("heart-risk"),
        lambda: site.train("heart-risk", table(200), epsilon=0.5),
    )
    moved = shared.rename(tmp_path / "moved")
    for use in uses:  # nothing to compare with, and nothing done
        with pytest.raises(HubUnavailable, match="is not there"):
            use()
    for target, problem in ((place, "this site's own folder"), (moved, "is a link now")):
        shared.symlink_to(target)
        for use in uses:
            with pytest.raises(SettingsError, match=problem):
                use()
        assert sorted(file.name for file in place.iterdir()) == kept
        if target is moved:  # who means it joins again
            site.join_folder(shared)
            assert site.submit("heart-risk")["state"] == "accepted"
        shared.unlink()
    (place / "study.toml").write_text(study_text())
    with pytest.raises(SettingsError, match="this site's own folder"):
        site.join_folder(place)


def test_a_folder_that_an_earlier_version_joined_by_a_link_can_be_joined_again(shared, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(shared)
    site = site_in(tmp_path / "north", link)
    assert site._joined("heart-risk").hub == f"folder:{shared}"
    site._write_joined("heart-risk", replace(site._joined("heart-risk"), hub=f"folder:{link}"))
    with pytest.raises(SettingsError, match="join it again"):
        site.fetch("heart-risk")
    site.join_folder(link)
    assert site.fetch("heart-risk") is None


def test_a_file_that_a_stranger_planted_is_not_called_an_old_copy(shared, tmp_path):
    site = site_in(tmp_path / "north", shared)
    stranger = site_in(tmp_path / "stranger", shared)  # has the site's name and another key
    stranger.train("heart-risk", table(200), epsilon=1.0)
    stranger.submit("heart-risk")
    with pytest.raises(LedgerDamaged, match="or they are not this site's"):
        site.train("heart-risk", table(200), epsilon=1.0)
    assert site.recover() == Recovery(0, unproved=("heart-risk",))
    assert site.train("heart-risk", table(200), epsilon=1.0, offline=True)


# ------------------------------------------------------------------ careless hands


def test_two_commands_do_not_work_on_one_folder_at_once(shared, tmp_path):
    site = site_in(tmp_path / "north", shared)
    with site._working():
        other = Site(site.folder)
        for attempt in (
            lambda: other.train("heart-risk", table(200), epsilon=1.0),
            lambda: other.join_folder(shared),
            lambda: other.raise_budget(epsilon=5.0, reason="more"),
            lambda: other.fetch("heart-risk"),
        ):
            with pytest.raises(SettingsError, match="Another command is at work"):
                attempt()
    child = os.fork()
    if child == 0:
        with Site(site.folder)._working():
            (tmp_path / "held").touch()
            time.sleep(60)
        os._exit(0)
    while not (tmp_path / "held").exists():
        time.sleep(0.01)
    with pytest.raises(SettingsError, match="Another command is at work"):
        site.train("heart-risk", table(200), epsilon=1.0)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert site.train("heart-risk", table(200), epsilon=1.0)  # a killed command holds nothing


def test_two_threads_do_not_work_through_one_site_at_once(shared, tmp_path):
    site = site_in(tmp_path / "north", shared)
    held, done, outcomes = threading.Event(), threading.Event(), []

    def approve(_):
        held.set()
        return done.wait(60)

    def train():
        outcomes.append(site.train("heart-risk", table(200), epsilon=1.0, approve=approve))

    first = threading.Thread(target=train)
    first.start()
    assert held.wait(60)
    for _ in range(2):  # one that was refused has released nothing
        with pytest.raises(SettingsError, match="Another command is at work"):
            site.train("heart-risk", table(200), epsilon=1.0)
    done.set()
    first.join()
    assert outcomes == [site.contribution("heart-risk")]
    assert len(site.ledger.charges()) == 1


def test_no_contribution_takes_the_place_of_another(shared, tmp_path, monkeypatch):
    site = site_in(tmp_path / "north", shared)
    kept = site.train("heart-risk", table(200), epsilon=1.0).read_bytes()
    monkeypatch.setattr(Site, "_next_number", lambda *_: 1)
    with pytest.raises(FileExistsError):
        site.train("heart-risk", table(200), epsilon=1.0, anew=True)
    assert site.contribution("heart-risk").read_bytes() == kept


@pytest.mark.parametrize("exact", [False, True])
def test_a_machine_that_stops_after_the_file_is_written_charges_once(
    exact, shared, trusting, tmp_path, monkeypatch
):
    site = site_in(tmp_path / "north", trusting if exact else shared)
    site.allow_exact(reason="yes")
    epsilon, save = None if exact else 0.5, Contribution.save

    def save_and_stop(*given, **settings):
        save(*given, **settings)
        raise Stopped

    def stop_after_writing(seed):
        with monkeypatch.context() as patch:
            patch.setattr(Contribution, "save", save_and_stop)
            with pytest.raises(Stopped):
                site.train("heart-risk", table(200, seed=seed), epsilon=epsilon, anew=True)
        return len(site.ledger.charges()), len(site.ledger.notes())

    before, path = stop_after_writing(1), site.contribution("heart-risk")
    asked = []
    again = site.train(
        "heart-risk", table(200, seed=1), epsilon=epsilon, approve=lambda shown: asked.append(shown)
    )
    assert (again, asked) == (path, [])
    assert (len(site.ledger.charges()), len(site.ledger.notes())) == before
    # The next training is another one, and so is one of another table after a file was written.
    second = site.train("heart-risk", table(200, seed=1), epsilon=epsilon, anew=True)
    stop_after_writing(1)
    fourth = site.train("heart-risk", table(200, seed=2), epsilon=epsilon)
    assert [second.name[13:17], fourth.name[13:17]] == ["0002", "0004"]


def test_an_interrupted_training_is_not_completed_with_another_table(shared, tmp_path, monkeypatch):
    site = site_in(tmp_path / "north", shared)
    with monkeypatch.context() as patch:
        patch.setattr(Contribution, "save", stop)
        with pytest.raises(Stopped):
            site.train("heart-risk", table(200, seed=1), epsilon=1.0)
    for records, epsilon in ((table(200, seed=2), 1.0), (table(200, seed=1), 0.5)):
        with pytest.raises(SettingsError, match="another table, at another epsilon or of another"):
            site.train("heart-risk", records, epsilon=epsilon)
    assert site.ledger.balance("ward").spent.epsilon == pytest.approx(1.0)
    assert site.train("heart-risk", table(200, seed=1), epsilon=1.0)
    assert site.ledger.balance("ward").spent.epsilon == pytest.approx(1.0)
    with monkeypatch.context() as patch:
        patch.setattr(Contribution, "save", stop)
        with pytest.raises(Stopped):
            site.train("heart-risk", table(200, seed=1), epsilon=1.0, anew=True)
    assert site.train("heart-risk", table(200, seed=2), epsilon=1.0, anew=True)
    assert site.ledger.balance("ward").spent.epsilon == pytest.approx(3.0)


def test_what_a_killed_command_left_is_removed(shared, tmp_path):
    site = site_in(tmp_path / "north", shared)
    place = site.folder / "studies" / "heart-risk"
    left = [
        site.folder / ".site.json.0123.part",
        place / ".study.json.0123.part",
        place / "release.part",
        site.folder / ".ledger.sqlite.abc",
        site.folder / ".recovering-abc",
    ]
    for path in left[:-1]:
        path.write_bytes(b"half")
    left[-1].mkdir()
    site.fetch("heart-risk")
    assert not any(path.exists() for path in left)


def test_a_delta_beyond_the_limit_does_not_fit(tmp_path, shared):
    (shared / "study.toml").write_text(study_text(privacy="delta = 0.999999"))
    site = Site.init(
        tmp_path / "north", name="n", dataset="ward", budget=Budget(epsilon=3.0, delta=1e-6)
    )
    site.join_folder(shared)
    shown = site.preview("heart-risk", epsilon=1.0)
    assert not shown.fits
    assert "more than is left: refused" in shown.page.as_text()
    with pytest.raises(BudgetExceeded, match="delta=1e-06 is left"):
        site.train("heart-risk", table(200), epsilon=1.0)


def test_a_spent_budget_is_raised_with_a_reason_and_not_by_a_new_folder(shared, tmp_path):
    site = site_in(tmp_path / "north", shared, epsilon=1.0)
    site.train("heart-risk", table(200), epsilon=1.0)
    with pytest.raises(BudgetExceeded, match="site budget raise"):
        site.train("heart-risk", table(200), epsilon=1.0, anew=True)
    with pytest.raises(SettingsError, match="site budget raise"):
        Site.init(site.folder, name="n", dataset="ward", budget=Budget(epsilon=9.0))
    with pytest.raises(SettingsError, match="to be lowered"):
        site.raise_budget(epsilon=0.5, reason="less")
    balance = site.raise_budget(epsilon=2.0, reason="the board met on 3 May")
    assert balance.left.epsilon == pytest.approx(1.0)
    assert site.ledger.notes("ward")[-1].purpose == "the board met on 3 May"
    assert site.train("heart-risk", table(200), epsilon=1.0, anew=True)
    assert site.ledger.balance("ward").left.epsilon == pytest.approx(0.0)


def test_a_site_made_over_a_ledger_keeps_what_the_ledger_allows(shared, tmp_path):
    """As who lost a key does, or the file site.json: what is spent stays spent, and the limit."""
    spent = site_in(tmp_path / "spent", shared, epsilon=1.0)
    spent.train("heart-risk", table(200), epsilon=1.0)
    folder = tmp_path / "north"
    folder.mkdir()
    spent.backup(folder / "ledger.sqlite")
    made = {"name": "north", "dataset": "ward", "budget": Budget(epsilon=1.0)}
    for other, problem in (
        ({"budget": Budget(epsilon=5.0)}, "site budget raise"),
        ({"budget": Budget(epsilon=1.0, delta=1e-6)}, "site budget raise"),
        ({"budget": Budget(epsilon=1.0, unit="person")}, "site budget raise"),
        ({"budget": Budget(epsilon=1.0, neighbours="add-remove")}, "site budget raise"),
        ({"dataset": "Ward"}, "its own name of the data set: 'ward'"),
        ({"allow_exact": True}, "site budget allow-exact"),
    ):
        with pytest.raises(SettingsError, match=problem):
            Site.init(folder, **{**made, **other})
        assert [file.name for file in folder.iterdir()] == ["ledger.sqlite"]
    site = Site.init(folder, **made)
    assert site.ledger.balance("ward") == spent.ledger.balance("ward")
    assert len(site.ledger.notes()) == 1


# ------------------------------------------------------------------ an old copy


def roll_back(site, copy):
    for file in site.folder.glob("ledger.sqlite*"):
        file.unlink()
    shutil.copyfile(copy, site.folder / "ledger.sqlite")


def test_a_ledger_put_back_from_an_old_copy_is_noticed(shared, tmp_path):
    site = site_in(tmp_path / "north", shared)
    site.backup(tmp_path / "old.sqlite")
    site.train("heart-risk", table(200), epsilon=1.0)
    roll_back(site, tmp_path / "old.sqlite")
    for command in (
        lambda: site.train("heart-risk", table(200), epsilon=1.0),
        lambda: site.preview("heart-risk", epsilon=1.0),
        lambda: site.submit("heart-risk"),
        lambda: site.fetch("heart-risk"),
        lambda: site.backup(tmp_path / "older.sqlite"),
        lambda: site.raise_budget(epsilon=5.0, reason="more"),
        lambda: site.ledger,
        lambda: commands.status(site.folder),
        lambda: commands.show_budget(site.folder),
    ):
        with pytest.raises(LedgerDamaged, match="site recover"):
            command()
    assert not (tmp_path / "older.sqlite").exists()
    (site.folder / "ledger.sqlite").rename(tmp_path / "aside.sqlite")
    assert site.recover(tmp_path / "aside.sqlite").entered == 1
    assert site.ledger.balance("ward").spent.epsilon == pytest.approx(1.0)
    assert site.train("heart-risk", table(200), epsilon=1.0)
    for file in site.folder.glob("ledger.sqlite*"):  # a recovered ledger can be recovered again
        file.rename(tmp_path / f"again{file.name}")
    assert site.recover(tmp_path / "againledger.sqlite").entered == 0


def test_a_ledger_that_forgot_an_exact_contribution_is_noticed(trusting, tmp_path):
    site = site_in(tmp_path / "north", trusting)
    site.backup(tmp_path / "old.sqlite")
    site.allow_exact(reason="yes")
    site.train("heart-risk", table(300))
    roll_back(site, tmp_path / "old.sqlite")
    with pytest.raises(LedgerDamaged, match="lacks 1 of the charges"):
        site.preview("heart-risk")
    (site.folder / "ledger.sqlite").unlink()
    assert site.recover(tmp_path / "old.sqlite").entered == 1
    assert [note.kind for note in site.ledger.notes()] == ["allow", "permit", "exact", "forbid"]
    assert not site.preview("heart-risk").fits  # recovering lets nothing out: the owner decides
    site.allow_exact(reason="yes, still")
    assert site.preview("heart-risk").fits


def test_a_whole_folder_put_back_from_an_old_copy_is_noticed_by_what_the_hub_has(
    shared, tmp_path, monkeypatch
):
    site = site_in(tmp_path / "north", shared)
    shutil.copytree(site.folder, tmp_path / "copy")
    site.train("heart-risk", table(200), epsilon=1.0)
    site.submit("heart-risk")
    copy = Site(tmp_path / "copy")
    with pytest.raises(LedgerDamaged, match="older copy of the whole folder"):
        copy.train("heart-risk", table(200), epsilon=1.0)
    assert copy.ledger.charges() == []

    def gone(*_):
        raise HubUnavailable("gone")

    monkeypatch.setattr("consilience.site.client.SharedFolder.contributions", gone)
    with pytest.raises(HubUnavailable, match="--offline"):
        copy.train("heart-risk", table(200), epsilon=1.0)
    assert copy.ledger.charges() == []


class FalseHub:
    """A hub whose answers a test chooses, by method and path; it keeps what it is asked."""

    def __init__(self, text=""):
        self.study, self.key = Study.from_text(text or study_text()), SigningKey.generate()
        self.path = f"/api/studies/{self.study.name}"
        names = {"hub_key": self.key.public, "digest": self.study.digest, "study": self.study.name}
        self.answers = {
            "POST /api/enrolments": names,
            f"GET {self.path}": {"study": self.study.to_dict()},
            f"GET {self.path}/contributions": {"contributions": []},
        }
        self.asked = []

    def join(self, site, monkeypatch):
        monkeypatch.setattr(HubClient, "_send", self._answer)
        invitation = Invitation("code", self.key.public, self.study.digest)
        return site.join("https://hub.example", str(invitation))

    def _answer(self, method, path, body, most):
        self.asked.append(f"{method} {path}")
        found = self.answers.get(f"{method} {path}")
        if isinstance(found, bytes):
            return 200, found
        refusal = {"error": {"code": "unavailable", "message": "Busy.", "fix": "Wait."}}
        return (
            (503, json.dumps(refusal).encode())
            if found is None
            else (200, json.dumps(found).encode())
        )


def site_at(folder, hub, monkeypatch, epsilon=3.0):
    site = Site.init(folder, name="north", dataset="ward", budget=Budget(epsilon=epsilon))
    hub.join(site, monkeypatch)
    return site


@pytest.mark.parametrize(
    "answer",
    [
        None,
        {"contributions": "none"},
        {"contributions": [1]},
        {"contributions": [{}]},
        {"contributions": [{"digest": "x"}]},
        {},
        [1],
        b"",
        b"[" * 100_000,
    ],
)
def test_no_answer_of_a_hub_that_says_nothing_stands_for_a_comparison(
    answer, tmp_path, monkeypatch
):
    """A folder that was put back is noticed by what the hub has: it must say what that is."""
    hub = FalseHub()
    site = site_at(tmp_path / "north", hub, monkeypatch)
    hub.answers[f"GET {hub.path}/contributions"] = answer
    with pytest.raises(HubUnavailable, match="Nothing was trained") as refused:
        site.train("heart-risk", table(200), epsilon=1.0)
    assert "--offline" in str(refused.value)
    assert site.ledger.charges() == []
    hub.asked.clear()
    seen = []
    site.train(
        "heart-risk",
        table(200),
        epsilon=1.0,
        offline=True,
        approve=lambda shown: seen.append(shown) or True,
    )
    assert hub.asked == []
    assert "will not be compared" in seen[0].page.as_text()
    assert "will not be compared" not in site.preview("heart-risk", epsilon=1.0).page.as_text()


def test_nothing_is_asked_of_a_hub_before_a_training_is_approved(tmp_path, monkeypatch):
    hub = FalseHub()
    site = site_at(tmp_path / "north", hub, monkeypatch)
    hub.asked.clear()
    assert site.train("heart-risk", table(200), epsilon=1.0, approve=lambda _: False) is None
    assert hub.asked == []


def test_a_whole_folder_put_back_is_brought_up_to_what_the_hub_can_prove(shared, tmp_path):
    site = site_in(tmp_path / "north", shared)
    shutil.copytree(site.folder, tmp_path / "copy")
    for epsilon in (0.5, 1.0):
        site.train("heart-risk", table(200), epsilon=epsilon)
        site.submit("heart-risk")
    copy = Site(tmp_path / "copy")
    with pytest.raises(LedgerDamaged, match="site recover"):
        copy.train("heart-risk", table(200), epsilon=1.0)
    assert copy.recover() == Recovery(2)
    assert copy.ledger.balance("ward").spent == site.ledger.balance("ward").spent
    assert {charge.purpose for charge in copy.ledger.charges()} == {"recovered from a contribution"}
    assert copy.status("heart-risk") == site.status("heart-risk")
    assert copy.recover() == Recovery(0)  # nothing is charged twice
    assert site.recover() == Recovery(0)
    path = copy.train("heart-risk", table(200), epsilon=1.0)
    assert Contribution.load(path).sequence == 3
    copy.ledger.verify()


def test_a_lost_ledger_without_a_backup_is_rebuilt_from_a_hub(hub, tmp_path):
    north, south = submitted(hub, tmp_path)
    north.train("heart-risk", table(300, seed=5), epsilon=0.5)
    north.submit("heart-risk")
    spent = north.ledger.balance("ward").spent
    for file in (*north.folder.glob("ledger.sqlite*"), *north.folder.glob("studies/*/contr*")):
        file.unlink()
    with pytest.raises(SettingsError, match="--epsilon"):
        north.recover()
    assert not (north.folder / "ledger.sqlite").exists()
    assert north.recover(limit=Budget(epsilon=2.0)).entered == 2
    assert north.ledger.balance("ward").spent == spent
    assert "declared again" in north.ledger.notes()[0].purpose
    assert north.train("heart-risk", table(300), epsilon=0.25).name.startswith("contribution-0003")
    digest = south._hub(south._joined("heart-risk")).contributions("heart-risk")[0]
    stranger = HubClient(hub.address, SigningKey.generate(), hub.key.public)
    with pytest.raises(SettingsError, match="refused"):  # nobody else gets these files
        stranger.fetch_contribution("heart-risk", digest)
    other = north._hub(north._joined("heart-risk"))
    assert other.fetch_contribution("heart-risk", digest) is None


def test_charges_beyond_a_limit_that_was_raised_since_are_entered_all_the_same(shared, tmp_path):
    site = site_in(tmp_path / "north", shared)
    site.backup(tmp_path / "old.sqlite")
    site.raise_budget(epsilon=5.0, reason="Board")
    for seed in range(2):
        site.train("heart-risk", table(200, seed=seed), epsilon=2.0)
    roll_back(site, tmp_path / "old.sqlite")
    made = site.recover()
    assert (made.entered, made.forgot) == (2, True)
    assert [note.purpose for note in made.decisions] == [
        "recovered: charges beyond the limit that was known"
    ]
    balance = site.ledger.balance("ward")
    assert balance.spent.epsilon == pytest.approx(4.0)
    assert balance.left.epsilon == 0
    assert "recovered" in site.ledger.notes()[-1].purpose
    site.ledger.verify()


def test_a_hub_cannot_use_up_the_budget_with_files_that_no_key_here_signed(shared, tmp_path):
    site = site_in(tmp_path / "north", shared)
    forger = site_in(tmp_path / "forger", shared)  # has the site's name and another key
    forger.train("heart-risk", table(200), epsilon=2.0)
    forger.submit("heart-risk")
    assert site.recover() == Recovery(0, unproved=("heart-risk",))
    assert site.ledger.charges() == []
    # Who lost a key says so, and is charged.
    assert site.recover(lost_key=True) == Recovery(1)
    assert site.ledger.balance("ward").spent.epsilon == pytest.approx(2.0)


def site_over(old, folder, shared):
    """Make a site in a new folder over the ledger of an old one, as who lost the key does."""
    folder.mkdir()
    shutil.copyfile(old.folder / "ledger.sqlite", folder / "ledger.sqlite")
    return site_in(folder, shared)


def test_a_site_that_lost_its_key_and_kept_its_ledger_goes_on(shared, tmp_path):
    old = site_in(tmp_path / "old", shared)
    old.train("heart-risk", table(200), epsilon=1.0)
    old.submit("heart-risk")
    new = site_over(old, tmp_path / "new", shared)
    with pytest.raises(LedgerDamaged):
        new.train("heart-risk", table(200), epsilon=1.0)
    assert new.recover() == Recovery(0)  # the ledger has its charge already
    assert new.train("heart-risk", table(200), epsilon=1.0).name == "contribution-0002.safetensors"


def forge(path, shared, *, numbers=1, receipt=(), key=None, **facts):
    """Put a file that a hub made of another into what the hub offers; return it."""
    sealed = Contribution.load(path).sealed
    kept = {name: each for name, each in sealed.facts.items() if name not in ("key", "tensors")}
    kept |= {"receipt": {**kept["receipt"], **dict(receipt)}, "nonce": "ab" * 32, **facts}
    tensors = {name: numbers * each for name, each in sealed.tensors.items()}
    forged = Sealed.seal("contribution", kept, tensors, key or SigningKey.generate())
    forged.save(shared / "contribution-north-forged.safetensors")
    return forged


def names_of(site):
    return sorted(file.name for file in site.folder.glob("studies/*/contribution*"))


def test_no_file_of_a_hub_takes_the_place_of_a_charge_of_another(shared, tmp_path):
    site = site_in(tmp_path / "north", shared)
    real = Contribution.load(site.train("heart-risk", table(200), epsilon=2.0))
    key = real.sealed.facts["receipt"]["key"]
    cheap = site_in(tmp_path / "cheap", shared).train("heart-risk", table(200), epsilon=0.5)
    site.submit("heart-risk")
    forge(cheap, shared, receipt={"key": key})
    for file in site.folder.glob("ledger.sqlite*"):
        file.unlink()
    assert site.recover(limit=Budget(epsilon=3.0), lost_key=True).entered == 2
    assert site.ledger.balance("ward").spent.epsilon == pytest.approx(2.5)
    assert site.recover(lost_key=True) == Recovery(0)


def test_a_charge_that_an_earlier_version_entered_again_counts_if_it_is_the_files_own(
    shared, tmp_path
):
    """It was named by the receipt's key, which anyone can write into a file."""
    site = site_in(tmp_path / "north", shared)
    real = Contribution.load(site.train("heart-risk", table(200), epsilon=2.0))
    cheap = site_in(tmp_path / "cheap", shared).train("heart-risk", table(200), epsilon=0.5)
    key = f"recovered-{real.sealed.facts['receipt']['key']}"
    for events, entered in ((real.events, 0), (Contribution.load(cheap).events, 1)):
        for file in site.folder.glob("ledger.sqlite*"):
            file.unlink()
        ledger = Ledger(site.folder / "ledger.sqlite")
        ledger.allow("ward", Budget(epsilon=3.0))
        ledger.recover(events, dataset="ward", key=key, purpose="recovered from a contribution")
        (site.folder / "ledger.json").unlink()  # nor did it note which ledger is the site's
        assert site.recover().entered == entered
        assert ledger.balance("ward").spent.epsilon >= 2.0


@pytest.mark.parametrize(
    ("numbers", "facts"),
    [(-1, {"sequence": 2}), (1, {"sequence": 2}), (1, {"sequence": 2**53 - 2})],
)
def test_no_file_that_a_hub_made_gets_into_the_folder(numbers, facts, shared, tmp_path):
    """The hash of a receipt proves nothing: the hub has read it in the site's own file."""
    site = site_in(tmp_path / "north", shared)
    path = site.train("heart-risk", table(200), epsilon=1.0)
    site.submit("heart-risk")
    forge(path, shared, numbers=numbers, **facts)
    assert site.recover() == Recovery(0, unproved=("heart-risk",))
    assert names_of(site) == ["contribution-0001.safetensors"]
    assert site.status("heart-risk")["submitted"] == 1
    site.rotate_key()


def test_a_ledger_proves_only_the_numbers_that_it_sealed(shared, tmp_path):
    old = site_in(tmp_path / "old", shared)
    path = old.train("heart-risk", table(200), epsilon=1.0)
    new = site_over(old, tmp_path / "new", shared)
    forge(path, shared, numbers=-1)
    assert new.recover() == Recovery(0, unproved=("heart-risk",))
    assert names_of(new) == []
    forge(path, shared)  # its own numbers, whoever signed them
    assert new.recover() == Recovery(0)
    assert names_of(new) == ["contribution-0001.safetensors"]


def test_who_lost_a_key_still_gets_no_file_that_fits_neither_study_nor_numbers(shared, tmp_path):
    site = site_in(tmp_path / "north", shared)
    path = site.train("heart-risk", table(200), epsilon=1.0)
    for change in (
        {"sequence": 0},
        {"sequence": 2**53 - 2},
        {"receipt": {"dataset": "another"}},
        {"site": "south"},
        {"study": {"name": "heart-risk", "digest": "0" * 64}},
    ):
        forge(path, shared, **change)
        assert site.recover(lost_key=True).entered == 0
        assert names_of(site) == ["contribution-0001.safetensors"]


def test_a_site_with_two_contributions_of_one_number_goes_on(shared, tmp_path):
    """One was trained in an older copy of the folder while the hub did not answer."""
    site = site_in(tmp_path / "north", shared)
    shutil.copytree(site.folder, tmp_path / "copy")
    submitted = Contribution.load(site.train("heart-risk", table(200), epsilon=0.5))
    copy = Site(tmp_path / "copy")
    copy.train("heart-risk", table(200), epsilon=0.5)
    site.submit("heart-risk")
    copy.recover()
    assert len(names_of(copy)) == 2
    facts = {"digest": submitted.digest, "guarantee": submitted.guarantee, "below": ()}
    source = SimpleNamespace(site="north", **facts)
    release = SimpleNamespace(sources=[source], ensemble=SimpleNamespace(members=()))
    assert "lists this site's contribution 1." in copy.describe_own_part("heart-risk", release)
    copy.rotate_key()  # number 1 is submitted
    copy.train("heart-risk", table(200), epsilon=0.5)
    with pytest.raises(SettingsError, match="site submit"):
        copy.rotate_key()
    source.digest = Contribution.load(copy.contribution("heart-risk", 2)).digest
    assert "contribution 2" in copy.describe_own_part("heart-risk", release)
    copy.submit("heart-risk")
    copy.rotate_key()


def test_what_was_trained_in_an_older_folder_stays_beside_what_the_hub_has(shared, tmp_path):
    site = site_in(tmp_path / "north", shared)
    shutil.copytree(site.folder, tmp_path / "copy")
    site.train("heart-risk", table(200), epsilon=1.0)
    copy = Site(tmp_path / "copy")
    copy.train("heart-risk", table(200), epsilon=0.5)
    site.submit("heart-risk")
    assert copy.recover() == Recovery(1)
    assert copy.ledger.balance("ward").spent.epsilon == pytest.approx(1.5)
    path = copy.train("heart-risk", table(200), epsilon=0.5, anew=True)
    assert path.name == "contribution-0002.safetensors"


def test_an_exact_contribution_that_only_the_hub_has_is_recorded(trusting, tmp_path):
    site = site_in(tmp_path / "north", trusting)
    shutil.copytree(site.folder, tmp_path / "copy")
    site.allow_exact(reason="yes")
    site.train("heart-risk", table(300))
    site.submit("heart-risk")
    copy = Site(tmp_path / "copy")
    made = copy.recover()
    assert (made.entered, made.forgot) == (1, False)
    assert [note.kind for note in made.decisions] == ["permit", "forbid"]  # as it was here
    assert [note.kind for note in copy.ledger.notes()] == ["allow", "permit", "exact", "forbid"]
    assert not copy.ledger.permits_exact("ward")
    assert copy.recover() == Recovery(0)
    copy.ledger.verify()


def test_a_recovery_works_without_the_hub_and_says_so(shared, tmp_path, monkeypatch):
    site = site_in(tmp_path / "north", shared)
    site.backup(tmp_path / "old.sqlite")
    site.train("heart-risk", table(200), epsilon=1.0)
    roll_back(site, tmp_path / "old.sqlite")

    def gone(*_):
        raise HubUnavailable("gone")

    monkeypatch.setattr("consilience.site.client.SharedFolder.contributions", gone)
    assert site.recover() == Recovery(1, unreached=("heart-risk",))
    with pytest.raises(SettingsError, match="Leave out the limit"):
        site.recover(tmp_path / "old.sqlite", limit=Budget(epsilon=1.0))


def test_a_recovery_blames_no_hub_for_a_shared_folder_that_leads_elsewhere(
    shared, tmp_path, capsys
):
    site_in(tmp_path / "north", shared)
    shared.rename(tmp_path / "moved")
    shared.symlink_to(tmp_path / "moved")
    with pytest.raises(SystemExit, match="0"):
        main(["site", "recover", "--folder", str(tmp_path / "north")])
    said = capsys.readouterr().out
    assert "The hub or shared folder of heart-risk could not be asked" in said
    assert "consilience site fetch STUDY may say why" in said
    with pytest.raises(SystemExit, match="1"):
        main(["site", "fetch", "heart-risk", "--folder", str(tmp_path / "north")])
    assert "is a link now" in " ".join(capsys.readouterr().err.split())


# ------------------------------------------------------------------ the log of releases


@pytest.fixture
def sites(shared, tmp_path):
    made = [site_in(tmp_path / name, shared, name) for name in ("north", "south", "east")]
    for i, site in enumerate(made):
        site.train("heart-risk", table(300, seed=i), epsilon=1.0)
        site.submit("heart-risk")
    return made


def test_a_release_continues_the_log_that_the_site_has_seen(shared, sites):
    key, log = SigningKey.generate(), ReleaseLog()
    seen = []
    for number in (1, 2):
        made = publish(shared, number, key, log)
        seen.append(sites[0].fetch("heart-risk").digest)
        log = log.add(made.digest)
    assert sites[0].log("heart-risk") == ReleaseLog(digests=tuple(seen))
    assert sites[0].fetch("heart-risk").sequence == 2  # the same again
    first, second = seen
    forged = {
        "other content": (2, ReleaseLog(digests=[first])),
        "another release 1": (3, ReleaseLog(digests=["a" * 64, second])),
        "another release 2": (4, ReleaseLog(digests=[first, "a" * 64, "b" * 64])),
        "carries no log": (3, None),
        "comes too long after": (266, ReleaseLog(9, "a" * 64, ["b" * 64] * 256)),
    }
    for problem, (number, of_hub) in forged.items():
        for file in shared.glob("release-*"):
            file.unlink()
        publish(shared, number, key, of_hub, without=1)
        with pytest.raises(ContributionRejected, match=problem):
            sites[0].fetch("heart-risk")
        assert sites[0].log("heart-risk").digests == (first, second)
        assert sites[0].release("heart-risk").digest == second
    for file in shared.glob("release-*"):
        file.unlink()
    publish(shared, 5, key, ReleaseLog(digests=[first, second, "c" * 64, "d" * 64]))
    assert sites[0].fetch("heart-risk").sequence == 5  # none of the others blocked it
    assert sites[0].log("heart-risk").length == 5


def test_a_release_that_is_offered_again_is_taken_if_the_site_has_seen_it(shared, sites):
    """As when a site withdraws that is in all later ones; another one of its number is refused."""
    key, log = SigningKey.generate(), ReleaseLog()
    made = []
    for number in (1, 2):
        made.append(publish(shared, number, key, log))
        sites[0].fetch("heart-risk")
        log = log.add(made[-1].digest)
    (shared / "release-0002.safetensors").unlink()
    assert sites[0].fetch("heart-risk").digest == made[0].digest
    assert sites[0].release("heart-risk").digest == made[0].digest
    assert sites[0].log("heart-risk") == log  # nothing is forgotten
    publish(shared, 1, key, ReleaseLog(), without=1)
    with pytest.raises(ContributionRejected, match="release 1"):
        sites[0].fetch("heart-risk")
    (shared / "release-0001.safetensors").unlink()
    publish(shared, 3, key, log)
    assert sites[0].fetch("heart-risk").sequence == 3


def test_a_release_without_a_log_is_accepted_only_on_request(shared, sites):
    """A hub that leaves the log out could tell each site another history."""
    key, site = SigningKey.generate(), sites[0]
    second = publish(shared, 2, key, log=None)
    with pytest.raises(ContributionRejected, match="carries no log"):
        site.fetch("heart-risk")
    assert site.seen("heart-risk").digests == {}
    assert site.fetch("heart-risk", new_log=True).digest == second.digest
    assert site.fetch("heart-risk").digest == second.digest  # it is here
    assert site.log("heart-risk") is None
    for number in (3, 1000):
        publish(shared, number, key, log=None)
        with pytest.raises(ContributionRejected, match="carries no log"):
            site.fetch("heart-risk")
    (shared / "release-1000.safetensors").unlink()
    publish(shared, 3, key, ReleaseLog(digests=["a" * 64, "b" * 64]))
    with pytest.raises(ContributionRejected, match="another release 2 than the one"):
        site.fetch("heart-risk")
    third = publish(shared, 3, key, ReleaseLog(digests=["a" * 64, second.digest]))
    assert site.fetch("heart-risk").sequence == 3
    # A release of the time before logs may be offered again, and nothing is forgotten for it.
    (shared / "release-0003.safetensors").unlink()
    assert site.fetch("heart-risk").digest == second.digest
    assert site.log("heart-risk").digests == ("a" * 64, second.digest, third.digest)


def test_sites_without_a_log_compare_the_releases_that_they_have(shared, sites):
    key = SigningKey.generate()
    made = publish(shared, 1, key, log=None)
    sites[0].fetch("heart-risk", new_log=True)
    sites[1].fetch("heart-risk", new_log=True)
    publish(shared, 1, key, log=None, without=1)
    sites[2].fetch("heart-risk", new_log=True)
    north, south, east = (site.seen("heart-risk") for site in sites)
    same, text = Seen.from_dict(json.loads(json.dumps(south.as_dict()))).compare(north)
    assert same
    assert "the same releases 1" in text
    assert "has no log" in text
    for known in (None, ReleaseLog(digests=(made.digest,))):
        same, text = replace(north, log=known).compare(east)
        assert not same
        assert "two histories" in text
    assert not north.compare(Seen({2: "a" * 64}, None))[0]
    later = ReleaseLog(digests=(made.digest, "a" * 64))
    assert "the same releases 1" in Seen({}, later).compare(north)[1]


@pytest.mark.parametrize("killed", ["before the file", "before the log, by an earlier version"])
def test_a_fetch_that_was_killed_leaves_no_gap_for_another_history(
    killed, shared, sites, monkeypatch
):
    key, site = SigningKey.generate(), sites[0]
    first = publish(shared, 1, key)
    if killed == "before the file":
        with monkeypatch.context() as patch:
            patch.setattr(releases_module, "move_durably", stop)
            with pytest.raises(Stopped):
                site.fetch("heart-risk")
    else:
        first.save(site.folder / "studies" / "heart-risk" / first.filename)
    publish(shared, 2, key, ReleaseLog(digests=["a" * 64]))
    with pytest.raises(ContributionRejected, match="another release 1 than the one"):
        site.fetch("heart-risk")
    assert site.seen("heart-risk").digests == {1: first.digest}
    publish(shared, 2, key, ReleaseLog(digests=[first.digest]))
    assert site.fetch("heart-risk").sequence == 2
    assert site.log("heart-risk").digests[0] == first.digest


def test_a_hub_that_begins_anew_is_accepted_only_on_request(shared, sites):
    key = SigningKey.generate()
    first = publish(shared, 1, key, ReleaseLog())
    publish(shared, 2, key, ReleaseLog(digests=[first.digest]))
    old = sites[0].fetch("heart-risk").digest
    (shared / "release-0002.safetensors").unlink()
    publish(shared, 1, key, ReleaseLog(), without=1)
    with pytest.raises(ContributionRejected, match="--new-log"):
        sites[0].fetch("heart-risk")
    new = sites[0].fetch("heart-risk", new_log=True)
    assert sites[0].release("heart-risk").digest == new.digest != old
    assert sites[0].log("heart-risk").digests == (new.digest,)
    assert len(list(sites[0].folder.glob("studies/*/before-*/release-0002.safetensors"))) == 1


def submitted(hub, folder, names=("north", "south")):
    """Return sites that have joined a live hub and submitted."""
    made = []
    for i, name in enumerate(names):
        site = Site.init(folder / name, name=name, dataset="ward", budget=Budget(epsilon=3.0))
        site.join(hub.address, hub.invite("heart-risk", "operator")[0])
        site.train("heart-risk", table(300, seed=i), epsilon=1.0)
        site.submit("heart-risk")
        made.append(site)
    return made


def combine(hub):
    """Let this hub or the one that serves its folder combine what is there."""
    with suppress(Refusal):
        Combiner(hub).combine("heart-risk")
    until = time.monotonic() + 60
    row = hub.store.release("heart-risk")
    while row is None or row["change"] != hub.store.study("heart-risk")["changes"]:
        assert time.monotonic() < until
        time.sleep(0.05)
        row = hub.store.release("heart-risk")
    return row


def test_a_site_that_was_away_for_long_fetches_the_log_in_pages(hub, tmp_path):
    """More releases than one lists lie between; an honest hub needs no exception for that."""
    north, _ = submitted(hub, tmp_path)
    first = combine(hub)
    assert north.fetch("heart-risk").sequence == first["sequence"]
    begin, n_between = first["sequence"] + 1, 2300
    between = [
        {**first, "sequence": n, "digest": f"{n:064x}", "state": "superseded", "request": None}
        for n in range(begin, begin + n_between)
    ]
    with hub.store._engines[1].begin() as db:
        db.execute(releases.insert(), between)
    north.train("heart-risk", table(300, seed=7), epsilon=1.0)
    north.submit("heart-risk")
    newest = combine(hub)["sequence"]
    assert newest > n_between
    found = north.fetch("heart-risk")
    assert found.sequence == newest
    assert found.log.before > first["sequence"] + 1000
    log = north.log("heart-risk")
    assert log.length == newest
    assert log.digests[first["sequence"] :][:n_between] == tuple(row["digest"] for row in between)
    assert north.fetch("heart-risk").digest == found.digest


def test_a_hub_that_lies_about_the_log_in_between_is_found_out(hub, tmp_path, monkeypatch):
    north, _ = submitted(hub, tmp_path)
    combine(hub)
    release = north.fetch("heart-risk")
    known, whole = north.log("heart-risk"), ReleaseLog()
    for n in range(600):
        whole = whole.add(known.digests[0] if n == 0 else f"{n:064x}")
    honest = whole.digests

    def far(pages):
        log = replace(release.log, **whole.shorten().as_dict())
        facts = {"log": log, "sequence": whole.length + 1, "digest": release.digest}
        later = SimpleNamespace(**facts, filename="release-0601.safetensors")
        monkeypatch.setattr(HubClient, "fetch_log", lambda _, __, after: pages(after))
        north._check_log("heart-risk", north._reach("heart-risk", known, later), later)

    far(lambda after: honest[after : after + 100])
    far(lambda after: honest[after : after + 1])
    for pages, problem in (
        (lambda after: ["a" * 64, *honest[after + 1 :]], "another release"),
        (lambda after: ["no digest"] * 1000, "another release"),
        (lambda after: honest[after:300], "does not say what was in between"),
        (lambda _: [], "does not say what was in between"),
    ):
        with pytest.raises(ContributionRejected, match=problem):
            far(pages)


def test_a_folder_with_all_releases_closes_the_gap_too(shared, sites, monkeypatch):
    monkeypatch.setattr("consilience.files.log.MOST_LISTED", 2)
    monkeypatch.setattr(ReleaseLog.shorten, "__defaults__", (2,))
    key, log = SigningKey.generate(), ReleaseLog()
    for number in range(1, 7):
        log = log.add(publish(shared, number, key, log).digest)
        if number == 1:
            assert sites[0].fetch("heart-risk").sequence == 1
    assert sites[0].fetch("heart-risk").sequence == 6
    assert sites[0].log("heart-risk") == log


def test_sites_that_compare_their_logs_notice_a_hub_with_two_histories(shared, sites):
    key = SigningKey.generate()
    publish(shared, 1, key, ReleaseLog())
    sites[0].fetch("heart-risk")
    sites[1].fetch("heart-risk")
    publish(shared, 1, key, ReleaseLog(), without=1)  # another file under the same number
    sites[2].fetch("heart-risk")
    north, south, east = (site.log("heart-risk") for site in sites)
    assert compare_logs(north, south) == (True, "Both sites saw the same 1 releases.")
    same, text = compare_logs(north, east)
    assert not same
    assert "two histories" in text
    assert not compare_logs(north, ReleaseLog(before=9, head="a" * 64))[0]


def test_a_site_learns_whether_its_own_contribution_is_in_a_release(shared, sites, tmp_path):
    publish(shared)
    release = sites[0].fetch("heart-risk")
    said = sites[0].describe_own_part("heart-risk", release)
    assert said.startswith("It lists this site's contribution 1. Its numbers are combined")
    late = site_in(tmp_path / "late", shared, "late")
    assert late.describe_own_part("heart-risk", release) == "It lists nothing of this site."
    late.train("heart-risk", table(300, seed=9), epsilon=1.0)
    late.submit("heart-risk")
    assert "does not list this site's contribution 1" in late.describe_own_part(
        "heart-risk", release
    )
    impostor = site_in(tmp_path / "impostor", shared, "north")
    assert "in this site's name" in impostor.describe_own_part("heart-risk", release)
    late.name = "another"
    late_release = publish(shared, 2)
    assert "under another name" in late.describe_own_part("heart-risk", late_release)


@pytest.mark.parametrize(
    "change",
    [{"sequence": 77}, {"size": 9}, {"epsilon": 0.2}],
    ids=lambda change: next(iter(change)),
)
def test_what_a_release_states_of_a_site_is_what_its_own_file_says(shared, sites, change):
    key = SigningKey.generate()
    sealed = publish(shared, 1, key, ReleaseLog()).sealed
    facts = json.loads(json.dumps(dict(sealed.facts)))
    for row in facts["sources"]:
        row["reason"] = None
        if "epsilon" in change:
            row["guarantee"]["epsilon"] = facts["guarantee"]["epsilon"] = 0.2
        elif row["site"] == "north":
            row |= change
    del facts["key"], facts["tensors"]
    Sealed.seal("release", facts, sealed.tensors, key).save(shared / "release-0001.safetensors")
    with pytest.raises(ContributionRejected, match="states another number, size or guarantee"):
        sites[0].fetch("heart-risk")
    assert sites[0].status("heart-risk")["release"] is None


def test_a_release_counts_all_that_a_site_handed_over_to_a_hub(shared, sites):
    """The hub says that the second contribution cost what it cost, as if it were the first."""
    site, joined = sites[0], sites[0]._joined("heart-risk")
    first = Contribution.load(site.contribution("heart-risk"))
    second = Contribution.load(site.train("heart-risk", table(300, seed=5), epsilon=1.0))
    key = SigningKey.generate()
    others = [Contribution.load(file) for file in shared.glob("contribution-south-*")]
    for earlier, fits in (({}, False), ({"north": [first.guarantee]}, True)):
        published = Publication(key, earlier=earlier, log=ReleaseLog())
        release = study().combine([second, *others], publication=published)
        site._write_joined("heart-risk", replace(joined, handed_over=[first.digest]))
        if fits:
            site._check_own_part("heart-risk", release)
            continue
        with pytest.raises(ContributionRejected, match="guarantee for this site's contribution 2"):
            site._check_own_part("heart-risk", release)


# ------------------------------------------------------------------ a hub that lies, careless hands


def other_study(folder, name):
    """Make a shared folder with the same study under another name."""
    folder.mkdir()
    (folder / "study.toml").write_text(study_text().replace("heart-risk", name))
    return folder


def test_an_old_copy_is_noticed_whichever_study_is_trained_next(shared, tmp_path, monkeypatch):
    """One ledger counts what goes to all hubs, so all of them are asked."""
    site = site_in(tmp_path / "north", shared, epsilon=1.0)
    site.join_folder(other_study(tmp_path / "other", "other-one"))
    shutil.copytree(site.folder, tmp_path / "copy")
    site.train("heart-risk", table(200), epsilon=1.0)
    site.submit("heart-risk")
    copy = Site(tmp_path / "copy")
    with pytest.raises(LedgerDamaged, match="hub of 'heart-risk' lists 1"):
        copy.train("other-one", table(200), epsilon=1.0)
    contributions = SharedFolder.contributions

    def gone(place, name):
        if name == "heart-risk":
            raise HubUnavailable("gone")
        return contributions(place, name)

    monkeypatch.setattr(SharedFolder, "contributions", gone)
    with pytest.raises(HubUnavailable, match="--skip heart-risk"):
        copy.train("other-one", table(200), epsilon=1.0)
    assert copy.ledger.charges() == []
    with pytest.raises(SettingsError, match="has not joined a study 'unknown'"):
        copy.train("other-one", table(200), epsilon=1.0, skip=["unknown"])
    plain, skipping = (
        " ".join(copy.preview("other-one", epsilon=1.0, skip=skip).page.as_text().split())
        for skip in ((), ["heart-risk"])
    )
    assert "will not be compared with what these hubs have of this site: heart-risk" in skipping
    assert "will not be compared" not in plain


@pytest.mark.parametrize("exact", [False, True])
def test_a_withdrawal_from_a_folder_leaves_the_proof_of_its_charge(
    exact, shared, trusting, tmp_path
):
    site = site_in(tmp_path / "north", trusting if exact else shared, epsilon=1.0)
    site.allow_exact(reason="yes")
    shutil.copytree(site.folder, tmp_path / "copy")
    epsilon = None if exact else 1.0
    site.train("heart-risk", table(200), epsilon=epsilon)
    place = trusting if exact else shared
    with pytest.raises(SettingsError, match="no contribution of this site"):
        site.withdraw("heart-risk")
    site.submit("heart-risk")
    site.withdraw("heart-risk")
    assert list(place.glob("*.safetensors")) == []
    copy = Site(tmp_path / "copy")
    with pytest.raises(LedgerDamaged, match="site recover"):
        copy.train("heart-risk", table(200), epsilon=epsilon)
    assert copy.recover().entered == 1
    assert copy.ledger.balance("ward").spent == site.ledger.balance("ward").spent
    copy.ledger.verify()
    assert copy.recover() == Recovery(0)
    assert "number 2 of this site" in copy.preview("heart-risk", epsilon=epsilon).page.as_text()
    # A note that another key signed charges nothing.
    note = next(place.glob("*.withdrawn"))
    facts = dict(SealedFile(note, "withdrawal").facts) | {"contribution": "a" * 64}
    del facts["key"], facts["tensors"]
    Sealed.seal("withdrawal", facts, {}, SigningKey.generate()).save(
        place / "contribution-x.withdrawn"
    )
    assert copy.recover().entered == 0
    assert copy.recover().unproved == ("heart-risk",)


def test_no_exact_model_leaves_after_its_owner_forbade_that(trusting, tmp_path):
    site = site_in(tmp_path / "north", trusting)
    site.allow_exact(reason="yes")
    site.train("heart-risk", table(300))
    site.allow_exact(reason="stop", allowed=False)
    with pytest.raises(BudgetExceeded, match=r"lets none leave\. Nothing was sent"):
        site.submit("heart-risk")
    assert list(trusting.glob("contribution-*")) == []
    site.allow_exact(reason="yes again")
    assert site.submit("heart-risk")["state"] == "accepted"


@pytest.mark.parametrize("in_backup", [False, True])
def test_a_recovery_permits_nothing_that_was_forbidden(in_backup, trusting, tmp_path):
    site = site_in(tmp_path / "north", trusting)
    if not in_backup:
        site.backup(tmp_path / "old.sqlite")
    site.allow_exact(reason="yes")
    if in_backup:
        site.backup(tmp_path / "old.sqlite")
    site.train("heart-risk", table(300))
    site.allow_exact(reason="stop", allowed=False)
    for file in site.folder.glob("ledger.sqlite*"):
        file.unlink()
    made = site.recover(tmp_path / "old.sqlite")
    assert (made.entered, made.forgot) == (1, True)
    assert made.decisions[-1].kind == "forbid"
    assert not site.ledger.permits_exact("ward")
    with pytest.raises(BudgetExceeded, match="allow-exact"):
        site.train("heart-risk", table(300, seed=1))
    site.ledger.verify()


def test_a_ledger_that_lacks_only_decisions_is_noticed(trusting, tmp_path):
    site = site_in(tmp_path / "north", trusting)
    site.allow_exact(reason="yes")
    site.backup(tmp_path / "old.sqlite")
    site.allow_exact(reason="stop", allowed=False)
    site.raise_budget(epsilon=5.0, reason="more")  # the last decision is about something else
    roll_back(site, tmp_path / "old.sqlite")
    for command in (
        lambda: site.train("heart-risk", table(300)),
        lambda: site.preview("heart-risk"),
        lambda: commands.show_budget(site.folder),
    ):
        with pytest.raises(LedgerDamaged, match="lacks the data owner's last decision"):
            command()
    made = site.recover()
    assert (made.entered, made.forgot) == (0, True)
    assert not site.ledger.permits_exact("ward")
    assert site.ledger.balance("ward").limit.epsilon == 3.0
    said = commands.recover(folder=site.folder).text  # nothing is missing now
    assert said == "The ledger is in place. 0 charges were missing and entered again."


def test_no_ledger_of_another_site_is_taken(shared, tmp_path):
    site = site_in(tmp_path / "north", shared, epsilon=1.0)
    other = site_in(tmp_path / "other", shared, "other", epsilon=100.0)
    other.backup(tmp_path / "other.sqlite")
    site.train("heart-risk", table(200), epsilon=1.0)
    site.backup(tmp_path / "own.sqlite")
    roll_back(site, tmp_path / "other.sqlite")
    with pytest.raises(LedgerDamaged, match="not one of this site's"):
        site.preview("heart-risk", epsilon=1.0)
    with pytest.raises(LedgerDamaged, match="not one of this site's"):
        site.recover()
    (site.folder / "ledger.sqlite").unlink()
    with pytest.raises(LedgerDamaged, match="not one of this site's"):
        site.recover(tmp_path / "other.sqlite")
    site.recover(limit=Budget(epsilon=1.0))  # a ledger that begins anew is this site's too
    assert site.ledger.balance("ward").left.epsilon == 0
    for file in site.folder.glob("ledger.sqlite*"):
        file.unlink()
    assert site.recover(tmp_path / "own.sqlite").entered == 0


def test_a_vote_has_this_sites_own_model_under_its_digest(tmp_path):
    shared = tmp_path / "votes"
    shared.mkdir()
    (shared / "study.toml").write_text(study_text(aggregator="WeightedVote"))
    found, key = Study.in_folder(shared), SigningKey.generate()
    sites = [site_in(tmp_path / name, shared, name) for name in ("north", "south")]
    parts = []
    for i, site in enumerate(sites):
        parts.append(Contribution.load(site.train("heart-risk", table(300, seed=i), epsilon=1.0)))
        site.submit("heart-risk")
    double = site_in(tmp_path / "double", shared, "north")
    path = double.train("heart-risk", table(300, seed=9), epsilon=1.0, offline=True)
    other = Contribution.load(path)
    honest = found.combine(parts, publication=Publication(key, 1, log=ReleaseLog()))
    forged = found.combine([other, parts[1]], publication=Publication(key, 1, log=ReleaseLog()))
    facts = json.loads(json.dumps(dict(forged.sealed.facts)))
    for row in facts["sources"]:
        if row["site"] == "north":
            row["digest"] = parts[0].digest
    del facts["key"], facts["tensors"]
    file = shared / "release-0001.safetensors"
    Sealed.seal("release", facts, forged.sealed.tensors, key).save(file)
    with pytest.raises(ContributionRejected, match="holds another model in the place"):
        sites[0].fetch("heart-risk")
    assert sites[0].status("heart-risk")["release"] is None
    honest.save(file)
    release = sites[0].fetch("heart-risk")
    said = sites[0].describe_own_part("heart-risk", release)
    assert said == "It lists this site's contribution 1 with the numbers of its file."


def test_releases_that_were_put_aside_stay_and_are_told_of(shared, sites):
    """They are the proof that the hub signed two histories."""
    key, site = SigningKey.generate(), sites[0]
    first = publish(shared, 1, key, ReleaseLog())
    site.fetch("heart-risk")
    sites[1].fetch("heart-risk")
    second = publish(shared, 1, key, ReleaseLog(), without=1)
    sites[2].fetch("heart-risk")
    for _ in range(2):  # the second time there is nothing to accept
        assert site.fetch("heart-risk", new_log=True).digest == second.digest
        kept = [Release.load(file).digest for file in site.folder.rglob("release-*.safetensors")]
        assert sorted(kept) == sorted([first.digest, second.digest])
    third = publish(shared, 2, key, ReleaseLog(digests=["ab" * 32]))
    for release in (first, second, third, first, second):
        for file in shared.glob("release-*"):
            file.unlink()
        release.save(shared / release.filename)
        site.fetch("heart-risk", new_log=True)
    kept = [Release.load(file).digest for file in site.folder.rglob("release-*.safetensors")]
    assert set(kept) == {first.digest, second.digest, third.digest}
    assert site.release("heart-risk").digest == second.digest
    assert "showed another history" in commands.write_log("heart-risk", folder=site.folder).text
    for other in sites[1:]:  # whatever the present logs say
        same, text = site.seen("heart-risk").compare(other.seen("heart-risk"))
        assert not same
        assert "This site was shown two different releases of number 1" in text
        told = Seen.from_dict(json.loads(json.dumps(site.seen("heart-risk").as_dict())))
        assert "The other site, by what it says" in other.seen("heart-risk").compare(told)[1]


def test_a_comparison_says_no_more_than_logs_can_prove():
    log = ReleaseLog(digests=("a" * 64, "b" * 64))
    ours = Seen({}, log)
    assert ours.compare(Seen({2: "b" * 64}, log)) == (True, "Both sites saw the same 2 releases.")
    assert not ours.compare(Seen({2: "c" * 64}, log))[0]  # its files are others than its log says
    same, text = ours.compare(Seen({}, ReleaseLog(digests=("a" * 64, "c" * 64))))
    assert not same
    assert "Logs carry no signature" in text
    genesis = ReleaseLog().head
    for facts in (
        {"log": None, "kept": {"1": "x" * 64}},
        {"log": None, "kept": {"0": "a" * 64}},
        {"log": {"before": 0, "head": "f" * 64, "digests": ["a" * 64]}},
        {"log": {"before": 1 << 20, "head": "f" * 64, "digests": ["a" * 64]}},
        {"log": {"before": 0, "head": genesis, "digests": ["no digest"]}},
        {"log": None, "kept": {}, "aside": [{"log": None, "kept": {"1": 5}}]},
    ):
        with pytest.raises(ValueError, match="no log of releases"):
            Seen.from_dict(facts)


def test_a_fork_is_noticed_wherever_its_files_are(shared, sites):
    """The log after it may begin later: what counts is all that either site was ever shown."""
    key, (north, south, _) = SigningKey.generate(), sites
    first = publish(shared, 1, key, ReleaseLog())
    north.fetch("heart-risk")
    other = publish(shared, 1, key, ReleaseLog(), without=1)
    south.fetch("heart-risk")
    log = ReleaseLog(digests=(other.digest,))
    sealed = publish(shared, 2, key, log).sealed
    facts = {name: each for name, each in sealed.facts.items() if name not in ("key", "tensors")}
    hidden = facts | {"log": log.shorten(0).as_dict()}
    path = shared / "release-0002.safetensors"
    Sealed.seal("release", hidden, sealed.tensors, key).save(path)
    for site in (north, south):  # a log lists what it can
        with pytest.raises(
            ContributionRejected, match="its log's entries are not those of a release"
        ):
            site.fetch("heart-risk", new_log=True)
    # A site of an earlier version has accepted it.
    digest = SealedFile(path, "release").digest
    short = log.shorten(0).add(digest)
    aside = Seen({1: first.digest}, None)
    ours = Seen({2: digest}, short, (aside,))
    theirs = Seen({1: other.digest, 2: digest}, short)
    for one, two in ((ours, theirs), (theirs, ours)):
        same, text = one.compare(two)
        assert not same
        assert "saw different releases, at the latest from number 1 on" in text
    # Both have another first release without a log, and the same log since.
    same, text = Seen({1: first.digest, 2: digest}, short).compare(theirs)
    assert not same
    assert "from number 1 on" in text
    # A history that was put aside and that the other site may not have seen is told of.
    aside = Seen({5: "e" * 64}, None)
    same, text = replace(ours, aside=(aside,)).compare(replace(theirs, kept={2: digest}))
    assert not same
    assert "Of its releases 5 nothing tells whether the other site saw them" in text
    # Two histories that differ in what neither lists are told apart by their heads.
    aside = Seen({}, ReleaseLog(1, "f" * 64, ("a" * 64,)))
    assert not Seen({}, short, (aside,)).compare(Seen({}, short))[0]
    assert Seen({}, short).compare(Seen({}, short)) == (True, "Both sites saw the same 2 releases.")


def test_no_text_of_a_hub_gets_into_the_log(hub, tmp_path, monkeypatch):
    north, _ = submitted(hub, tmp_path)
    combine(hub)
    release, known = north.fetch("heart-risk"), north.log("heart-risk")
    bad = "this is no digest; rm -rf"
    monkeypatch.setattr("consilience.files.log.MOST_LISTED", 0)
    facts = json.loads(json.dumps(dict(release.sealed.facts)))
    del facts["key"], facts["tensors"]
    head = ReleaseLog(digests=(*known.digests, bad)).head_at(2)
    facts |= {"sequence": 3, "log": ReleaseLog(2, head).as_dict()}
    sealed = Sealed.seal("release", facts, release.sealed.tensors, hub.key)
    monkeypatch.setattr(HubClient, "fetch_release", lambda *_: sealed.to_bytes())
    answer = json.dumps({"digests": [bad]}).encode()
    monkeypatch.setattr(HubClient, "request", lambda *_, **__: answer)
    with pytest.raises(ContributionRejected, match="does not say what was in between"):
        north.fetch("heart-risk")
    assert north.log("heart-risk") == known


def test_a_hub_cannot_stretch_the_log_in_between(hub, tmp_path, monkeypatch):
    north, _ = submitted(hub, tmp_path)
    combine(hub)
    release, known = north.fetch("heart-risk"), north.log("heart-risk")
    far = SimpleNamespace(log=ReleaseLog((1 << 20) - 6, "ab" * 32))
    monkeypatch.setattr(HubClient, "fetch_log", lambda *_: time.sleep(0.01) or [release.digest])
    monkeypatch.setattr(releases_module, "MOST_SECONDS_OF_LOG", 0.2)
    began = time.monotonic()
    assert north._reach("heart-risk", known, far).length < 100
    assert time.monotonic() - began < 20


def test_a_release_that_is_listed_is_still_compared_with_its_own_log(shared, sites):
    key, log = SigningKey.generate(), ReleaseLog()
    first = publish(shared, 1, key, log)
    second = publish(shared, 2, key, ReleaseLog(digests=["ab" * 32]))  # after another first one
    third = publish(shared, 3, key, ReleaseLog(digests=[first.digest, second.digest]))
    assert sites[0].fetch("heart-risk").digest == third.digest
    (shared / third.filename).unlink()
    with pytest.raises(ContributionRejected, match="another release 1 than the one"):
        sites[0].fetch("heart-risk")
    assert sites[0].release("heart-risk").digest == third.digest


def test_what_a_hub_may_have_is_counted_whatever_it_answered(hub, tmp_path, monkeypatch):
    north, south = submitted(hub, tmp_path)

    def lost(*_):
        raise HubUnavailable("the disk is away")

    north.train("heart-risk", table(300, seed=8), epsilon=0.5)
    with monkeypatch.context() as patch:
        patch.setattr(HubClient, "submit", lost)
        with pytest.raises(HubUnavailable):
            north.submit("heart-risk")
    north.train("heart-risk", table(300, seed=9), epsilon=0.25)
    north.submit("heart-risk")
    combine(hub)
    release = north.fetch("heart-risk")
    said = north.describe_own_part("heart-risk", release)
    own = next(source for source in release.sources if source.site == "north")
    assert f"It states epsilon = {own.guarantee.epsilon:g} for this site" in said
    assert f"if it has them, epsilon is {own.guarantee.epsilon + 0.5:g}" in said
    south_release = south.fetch("heart-risk")
    assert "for this site" not in south.describe_own_part("heart-risk", south_release)


def test_a_release_with_a_contribution_that_was_withdrawn_is_told_of(shared, sites):
    site, key = sites[0], SigningKey.generate()
    first = publish(shared, 1, key, ReleaseLog())
    site.fetch("heart-risk")
    kept = [Contribution.load(file) for file in sorted(shared.glob("contribution-*-0001.*"))]
    site.withdraw("heart-risk")
    assert site.status("heart-risk")["withdrawn"]
    assert "(withdrawn)" in commands.status(site.folder).text
    release = site.fetch("heart-risk")  # from before that
    assert "Warning" not in site.describe_own_part("heart-risk", release)
    later = Publication(key, 2, log=ReleaseLog(digests=[first.digest]))
    study().combine(kept, publication=later).save(shared / "release-0002.safetensors")
    release = site.fetch("heart-risk")
    assert "Warning: it was withdrawn" in site.describe_own_part("heart-risk", release)


def test_only_what_was_sent_before_a_withdrawal_is_called_withdrawn(shared, sites):
    site, key = sites[0], SigningKey.generate()
    site.train("heart-risk", table(300, seed=8), epsilon=1.0)  # number 2, which is not submitted
    site.withdraw("heart-risk")
    assert site.status("heart-risk")["withdrawn"]
    site.submit("heart-risk")
    assert not site.status("heart-risk")["withdrawn"]
    parts = [Contribution.load(file) for file in sorted(shared.glob("contribution-*.safetensors"))]
    made = study().combine(parts, publication=Publication(key, 1, log=ReleaseLog()))
    made.save(shared / made.filename)
    release = site.fetch("heart-risk")
    assert "contribution 2" in site.describe_own_part("heart-risk", release)
    assert "it was withdrawn" not in site.describe_own_part("heart-risk", release)


def test_a_file_that_returns_to_a_folder_is_no_longer_called_withdrawn(shared, sites):
    site = sites[0]
    site.withdraw("heart-risk")
    site.submit("heart-risk")
    assert not site.status("heart-risk")["withdrawn"]
    publish(shared, 1)
    release = site.fetch("heart-risk")
    assert "it was withdrawn" not in site.describe_own_part("heart-risk", release)


def test_releases_are_in_the_order_of_their_numbers_beyond_9999(shared, sites):
    site, key = sites[0], SigningKey.generate()
    made = publish(shared, 1, key), publish(shared, 2, key)
    for place in (shared, site.folder / "studies" / "heart-risk"):
        for number, release in zip((9999, 10000), made, strict=True):
            release.save(place / f"release-{number}.safetensors")
    hub = site._hub(site._joined("heart-risk"))
    offered = SealedFile(hub.fetch_release("heart-risk"), "release")
    assert offered.digest == made[1].digest
    assert site.release("heart-risk").digest == made[1].digest


def make_release(shared, key):
    """Make a release as `consilience release make` does; return it, and what it states of north."""
    answer = make(shared, key)
    release = Release.load(shared / Path(answer.facts["file"]).name)
    return release, next(source for source in release.sources if source.site == "north")


@pytest.mark.parametrize("turn", ["withdrawn", "returned", "superseded", "rotated", "both"])
def test_a_release_made_in_a_folder_counts_all_that_was_ever_in_it(turn, shared, sites, tmp_path):
    """Two contributions at epsilon 1 cost 2, whatever became of the first one and its key."""
    site, key = sites[0], tmp_path / "coordinator.pem"
    assert make_release(shared, key)[1].guarantee.epsilon == pytest.approx(1.0)
    site.fetch("heart-risk")
    if turn in ("rotated", "both"):
        site.rotate_key()
    if turn in ("withdrawn", "both"):
        site.withdraw("heart-risk")
    site.train("heart-risk", table(300, seed=8), epsilon=1.0)
    site.submit("heart-risk")
    if turn == "returned":
        site.withdraw("heart-risk")
        site.submit("heart-risk")
    release, own = make_release(shared, key)
    assert own.sequence == 2
    assert own.guarantee.epsilon == pytest.approx(2.0) == site.ledger.balance("ward").spent.epsilon
    assert "Warning" not in site.describe_own_part("heart-risk", site.fetch("heart-risk"))
    # A release that forgets the first one is refused, or told of if a relay may not know it.
    newest = [each.newest for each in read_submitted(study(), shared).values()]
    log = ReleaseLog(digests=(*release.log.digests, release.digest))
    publication = Publication(SigningKey.load(key), 3, log=log)
    understated = study().combine(newest, publication=publication)
    understated.save(shared / understated.filename)
    if turn in ("superseded", "rotated"):
        with pytest.raises(ContributionRejected, match="states another number, size or guarantee"):
            site.fetch("heart-risk")
    else:
        text = site.describe_own_part("heart-risk", site.fetch("heart-risk"))
        assert "Warning: it states epsilon = 1 for this site" in text
        assert "epsilon is 2" in text


def test_a_stranger_takes_no_place_of_a_site_in_a_folder(shared, sites, tmp_path):
    site, stranger, place = sites[0], SigningKey.generate(), tmp_path / "coordinator.pem"
    site.rotate_key()
    site.train("heart-risk", table(300, seed=8), epsilon=1.0)
    site.submit("heart-risk")
    proof = next(shared.glob("*.rotated"))
    facts = dict(SealedFile(proof, "rotation").facts)
    theirs = {"new_key": stranger.public, "proof": "00" * 64}
    old = facts.pop("key")
    del facts["tensors"]
    assert make_release(shared, place)[1].sequence == 2
    path = shared / "contribution-north-forged.safetensors"
    forge(site.contribution("heart-risk"), shared, key=stranger, sequence=3)
    with pytest.raises(SettingsError, match="signed with different keys"):
        make(shared, place)
    claim = shared / "rotation-x.rotated"
    for key, forged in ((stranger, facts), (site.key, facts | theirs)):
        Sealed.seal("rotation", forged, {}, key).save(claim)
        with pytest.raises(ContributionRejected, match=r"'rotation-x\.rotated'.* no other key"):
            make(shared, place)
    claim.unlink()
    path.unlink()
    proof.unlink()  # without it, nobody knows that the site changed its key
    with pytest.raises(SettingsError, match="submits once more"):
        make(shared, place)
    site.submit("heart-risk")
    assert Rotation.load(proof).old == old
    make(shared, place)
    note = shared / "contribution-x.withdrawn"
    note.write_bytes(b"nothing")
    with pytest.raises(ContributionRejected, match=r"'contribution-x\.withdrawn'"):
        make(shared, place)


def test_no_proof_of_a_charge_in_a_folder_is_replaced(shared, tmp_path):
    """An old copy of the site's folder was put in place, and one training approved offline."""
    site = site_in(tmp_path / "north", shared, epsilon=1.0)
    shutil.copytree(site.folder, tmp_path / "copy")
    first = Contribution.load(site.train("heart-risk", table(300), epsilon=0.5))
    site.submit("heart-risk")
    copy = Site(tmp_path / "copy")
    copy.train("heart-risk", table(300, seed=5), epsilon=0.5, offline=True)
    with pytest.raises(LedgerDamaged, match=r"Nothing was sent\. .*site recover"):
        copy.submit("heart-risk")
    assert copy.recover().entered == 1
    with pytest.raises(ContributionRejected, match="has contribution 1 of this site already"):
        copy.submit("heart-risk")
    there = [Contribution.load(file).digest for file in shared.glob("contribution-*")]
    assert there == [first.digest]
    with pytest.raises(BudgetExceeded):
        copy.train("heart-risk", table(300), epsilon=0.5, anew=True)
    # Not even a stranger's file is replaced; it keeps nobody from submitting beside it.
    other = site_in(tmp_path / "other", shared, "other")
    path = shared / "contribution-other-0001.safetensors"
    path.write_bytes(b"a stranger's")
    other.train("heart-risk", table(300), epsilon=0.5, offline=True)
    for _ in range(2):
        other.submit("heart-risk")
    assert path.read_bytes() == b"a stranger's"
    assert len(list(shared.glob("contribution-other-*"))) == 2


def test_a_withdrawal_removes_no_file_that_it_leaves_no_note_of(shared, tmp_path):
    """The key was lost, and the ledger moved into a new folder."""
    old = site_in(tmp_path / "old", shared)
    old.train("heart-risk", table(300), epsilon=0.5)
    old.submit("heart-risk")
    site = site_over(old, tmp_path / "new", shared)
    with pytest.raises(SettingsError, match=r"Nothing was changed\..*site recover"):
        site.withdraw("heart-risk")
    assert len(list(shared.glob("contribution-*.safetensors"))) == 1
    assert site.recover() == Recovery(0)  # the ledger sealed its very numbers
    left = forge(old.contribution("heart-risk"), shared)
    text = commands.withdraw("heart-risk", yes=True, folder=site.folder).text
    assert "What no key here signed was left: contribution-north-forged.safetensors" in text
    path = shared / "contribution-north-forged.safetensors"
    assert Contribution.load(path).digest == left.digest
    path.unlink()
    assert len(list(shared.glob("*.withdrawn"))) == 1
    site.train("heart-risk", table(300), epsilon=0.5)  # nothing is unknown here
    site.submit("heart-risk")


@pytest.mark.parametrize("earlier", [False, True])
def test_a_note_of_a_key_that_was_lost_proves_its_charge(earlier, shared, tmp_path):
    """Earlier versions signed notes with the present key, not with that of the file."""
    site = site_in(tmp_path / "north", shared)
    shutil.copytree(site.folder, tmp_path / "copy")
    site.train("heart-risk", table(200), epsilon=1.0)
    site.submit("heart-risk")
    site.rotate_key()
    site.withdraw("heart-risk")
    note, copy = next(shared.glob("*.withdrawn")), Site(tmp_path / "copy")
    if earlier:
        facts = dict(SealedFile(note, "withdrawal").facts)
        del facts["key"], facts["tensors"]
        Sealed.seal("withdrawal", facts, {}, site.key).save(note)
        # Whatever else a note of another key states is not what this site can have spent.
        for change in (
            {"receipt": facts["receipt"] | {"dataset": "another"}},
            {"receipt": None},
            {"study": facts["study"] | {"digest": "a" * 64}},
            {"sequence": 2000},
        ):
            Sealed.seal("withdrawal", facts | change, {}, site.key).save(note)
            answer = commands.recover(lost_key=True, folder=copy.folder)
            assert answer.facts["charges_made_again"] == 0
            assert "--lost-key" not in answer.text
        Sealed.seal("withdrawal", facts, {}, site.key).save(note)
        assert "--lost-key" in commands.recover(folder=copy.folder).text
    assert copy.recover(lost_key=earlier) == Recovery(1)
    assert copy.ledger.balance("ward").spent == site.ledger.balance("ward").spent
    copy.train("heart-risk", table(200), epsilon=1.0)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"whole"])
@pytest.mark.parametrize(
    "damaged", ["contribution-0001.safetensors", "contribution-0001.withdrawn", "study.json"]
)
def test_a_damaged_file_is_named_and_stops_its_own_study_only(
    damaged, content, shared, sites, tmp_path
):
    site = sites[0]
    second = other_study(tmp_path / "second", "stroke-risk")
    site.join_folder(second)
    place = site.folder / "studies" / "heart-risk"
    if damaged.endswith(".withdrawn"):
        (place / damaged).write_bytes(b"")
    whole = (place / damaged).read_bytes()
    (place / damaged).write_bytes(whole[:-100] if content == b"whole" else content)
    text = commands.status(site.folder).text
    assert f"nothing is trained for this study: {damaged}" in text
    site.backup(tmp_path / "copy.sqlite")
    assert commands.show_budget(site.folder).facts["spent"]["epsilon"] == pytest.approx(1.0)
    for command in (
        lambda: site.preview("heart-risk", epsilon=1.0),
        lambda: site.train("heart-risk", table(300), epsilon=1.0),
        lambda: site.submit("heart-risk"),
    ):
        with pytest.raises((SettingsError, ContributionRejected), match=re.escape(damaged)):
            command()
    answer = commands.recover(folder=site.folder)
    assert f"cannot be read: heart-risk/{damaged}" in answer.text
    assert answer.facts["unreadable"] == [f"heart-risk/{damaged}"]
    # What was submitted is here again, so that the comparison before a training finds it.
    skip = ["heart-risk"] if damaged == "study.json" else []
    site.train("stroke-risk", table(300), epsilon=1.0, skip=skip)
    site.submit("stroke-risk")
    if damaged == "study.json":  # it is in no other place
        (place / damaged).write_bytes(whole)
    else:
        (place / damaged).unlink()
    path = site.train("heart-risk", table(300, seed=9), epsilon=1.0)
    assert path.name == "contribution-0002.safetensors"
    assert site.ledger.balance("ward").spent.epsilon == pytest.approx(3.0)
    assert site.recover() == Recovery(0)


def test_a_charge_in_a_study_that_cannot_be_read_is_entered_all_the_same(shared, tmp_path):
    site = site_in(tmp_path / "north", shared)
    site.backup(tmp_path / "old.sqlite")
    site.train("heart-risk", table(300), epsilon=1.0)
    (site.folder / "studies" / "heart-risk" / "study.json").write_bytes(b"")
    roll_back(site, tmp_path / "old.sqlite")
    with pytest.raises(LedgerDamaged, match="site recover"):
        commands.status(site.folder)
    assert site.recover() == Recovery(1, ("heart-risk",), unreadable=("heart-risk/study.json",))
    assert site.ledger.balance("ward").spent.epsilon == pytest.approx(1.0)


def test_a_training_whose_report_was_lost_is_not_paid_for_again(shared, tmp_path):
    site = site_in(tmp_path / "north", shared)
    path = site.train("heart-risk", table(200), epsilon=1.0)
    asked = []
    again = Site(site.folder).train(
        "heart-risk", table(200), epsilon=1.0, approve=lambda shown: asked.append(shown)
    )
    assert (again, asked) == (path, [])
    assert site.ledger.balance("ward").spent.epsilon == pytest.approx(1.0)
    site.submit("heart-risk")
    assert site.train("heart-risk", table(200), epsilon=1.0) != path
    assert site.ledger.balance("ward").spent.epsilon == pytest.approx(2.0)


def test_a_charge_whose_result_was_lost_is_told_of_before_another_is_made(
    shared, tmp_path, monkeypatch
):
    site = site_in(tmp_path / "north", shared)
    session = Ledger._session

    def full(ledger, asked, **more):
        """As on a disk that is full when the result is stored."""
        if asked == "Sealing":
            more["write"] = False
            ledger = replace_path(ledger, tmp_path / "gone" / "ledger.sqlite")
        return session(ledger, asked, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "_session", full)
        with pytest.raises(LedgerDamaged, match="charge was made and stands") as lost:
            site.train("heart-risk", table(200), epsilon=1.0)
    assert "No charge was confirmed" not in str(lost.value)
    assert site.ledger.balance("ward").spent.epsilon == pytest.approx(1.0)
    with pytest.raises(SettingsError, match=r"charged epsilon=1 on .* use --anew"):
        site.train("heart-risk", table(200), epsilon=1.0)
    assert site.ledger.balance("ward").spent.epsilon == pytest.approx(1.0)
    assert site.train("heart-risk", table(200), epsilon=1.0, anew=True)
    assert site.ledger.balance("ward").spent.epsilon == pytest.approx(2.0)


def replace_path(ledger, path):
    other = ledger.within("")
    other.path = path
    return other


def test_a_disk_without_room_is_found_before_the_charge(shared, tmp_path, monkeypatch):
    site = site_in(tmp_path / "north", shared)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 19))
    with pytest.raises(SettingsError, match="no room"):
        site.train("heart-risk", table(200), epsilon=1.0)
    assert site.ledger.charges() == []


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "sparse"])
def test_nothing_in_a_shared_folder_hangs_a_site(kind, shared, sites):
    """Only ordinary files of limited size are read; a pipe would be waited for."""
    site = sites[0]
    made = publish(shared)

    def put(name):
        path = shared / name
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "device":
            path.symlink_to("/dev/zero")
        elif kind == "folder":
            path.mkdir()
        else:
            with path.open("wb") as file:
                file.truncate(40 << 30)

    put("contribution-x.safetensors")
    put("contribution-x.withdrawn")
    assert site.train("heart-risk", table(300, seed=8), epsilon=0.5)
    assert site.fetch("heart-risk").digest == made.digest
    put("release-0009.safetensors")
    assert site.fetch("heart-risk").digest == made.digest
    with pytest.raises(SettingsError, match="no ordinary file, or larger"):
        sites[1].fetch("heart-risk")  # which knows no key of releases yet
    (shared / "study.toml").rename(shared / "study.txt")
    put("study.toml")
    with pytest.raises(SettingsError):
        site.join_folder(shared)


def test_a_site_that_fetches_only_from_a_folder_sends_nothing(shared, tmp_path):
    site = Site.init(tmp_path / "north", name="north", dataset="ward", budget=Budget(epsilon=3.0))
    site.join_folder(shared)
    site.train("heart-risk", table(200), epsilon=1.0)
    site.join_folder(shared, fetch_only=True)
    with pytest.raises(SettingsError, match=r"to fetch only\. Nothing was trained"):
        site.train("heart-risk", table(200), epsilon=0.5)
    with pytest.raises(SettingsError, match=r"to fetch only\. Nothing was sent"):
        site.submit("heart-risk")


def sentences_of_errors(path):
    """Yield the sentences of each error that a module raises, as far as they are written there."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            text = "".join(
                part.value if isinstance(part, ast.Constant) else "x"
                for part in ast.walk(node.exc)
                if isinstance(part, ast.FormattedValue)
                or (isinstance(part, ast.Constant) and isinstance(part.value, str))
            )
            if text.count(" ") > 3:
                yield node.lineno, re.split(r"(?<=[.:]) +(?=[A-Z])", text.strip())


def test_every_error_at_a_site_says_what_to_do_next():
    """An error that ends by saying that nothing was done leaves its reader alone."""
    package = Path(releases_module.__file__).parents[1]
    files = [*package.glob("site/*.py"), package / "cli/site.py", package / "adapters/relay.py"]
    checked = [(file.name, *error) for file in files for error in sentences_of_errors(file)]
    assert len(checked) > 40
    idle = re.compile("Nothing|No |It was not|Got ")
    assert [each[:2] for each in checked if idle.match(each[2][-1])] == []


# ------------------------------------------------------------------ seventh round


def two_folders(tmp_path):
    """Return two shared folders, each with a study of its own."""
    shared = {name: tmp_path / name for name in ("first", "second")}
    for name, place in shared.items():
        place.mkdir()
        (place / "study.toml").write_text(study_text().replace("heart-risk", name))
    return shared


def test_what_was_trained_in_two_copies_of_a_folder_leaves_from_one_of_them(tmp_path):
    """Both copies asked all hubs before they trained, and neither had sent anything."""
    shared = two_folders(tmp_path)
    site = Site.init(tmp_path / "north", name="north", dataset="ward", budget=Budget(epsilon=1.0))
    for place in shared.values():
        site.join_folder(place)
    shutil.copytree(site.folder, tmp_path / "copy")
    site.train("first", table(100), epsilon=1.0)
    copy = Site(tmp_path / "copy")
    copy.train("second", table(100), epsilon=1.0)
    assert copy.submit("second")["not_compared"] == []
    with pytest.raises(
        LedgerDamaged, match=r"(?s)'second' lists 1 .*Nothing was sent.*--skip second"
    ):
        site.submit("first")
    assert not list(shared["first"].glob("contribution-*"))
    site.recover()
    with pytest.raises(BudgetExceeded, match=r"than its owner allowed.*Nothing was sent"):
        site.submit("first")
    assert not list(shared["first"].glob("contribution-*"))
    site.raise_budget(epsilon=2.5, reason="the board knows of both")
    assert site.submit("first")["state"] == "accepted"


def test_a_hub_that_says_nothing_stops_no_submission_elsewhere(tmp_path, capsys):
    shared = two_folders(tmp_path)
    site = Site.init(tmp_path / "north", name="north", dataset="ward", budget=Budget(epsilon=1.0))
    for place in shared.values():
        site.join_folder(place)
    site.train("first", table(100), epsilon=1.0)
    shutil.rmtree(shared["second"])
    answer = commands.submit("first", folder=site.folder)
    assert "second did not say what it has of this site" in answer.text
    assert answer.facts["not_compared"] == ["second"]


def test_a_release_that_another_key_signed_is_neither_fetched_nor_counted(shared, tmp_path):
    sites = [site_in(tmp_path / name, shared, name) for name in ("north", "south")]
    for site in sites:
        site.train("heart-risk", table(100), epsilon=1.0)
        site.submit("heart-risk")
    make(shared, key=tmp_path / "coordinator.pem")
    first = sites[0].fetch("heart-risk")
    publish(shared, 2, log=ReleaseLog(digests=[first.digest]))
    (shared / "release-9999.safetensors").write_text("no release")
    assert sites[0].fetch("heart-risk").digest == first.digest
    with pytest.raises(ContributionRejected, match=r"'release-9999\.safetensors'"):
        make(shared, key=tmp_path / "coordinator.pem")
    (shared / "release-9999.safetensors").unlink()
    with pytest.raises(SettingsError, match=r"'release-0002\.safetensors' .* another key signed"):
        make(shared, key=tmp_path / "coordinator.pem")
    (shared / "release-0002.safetensors").unlink()
    make(shared, key=tmp_path / "coordinator.pem")
    assert sites[0].fetch("heart-risk").log.digests == (first.digest,)


def test_no_key_that_signs_releases_lies_in_the_shared_folder(shared):
    with pytest.raises(SettingsError, match="lies in the shared folder"):
        make(shared, key=shared / "coordinator.pem")
    assert not (shared / "coordinator.pem").exists()


def test_a_file_that_somebody_put_back_stays_withdrawn_until_its_site_sends_it(shared, tmp_path):
    names = ("north", "south", "west")
    sites = {name: site_in(tmp_path / name, shared, name) for name in names}
    for site in sites.values():
        site.train("heart-risk", table(100), epsilon=1.0)
        site.submit("heart-risk")
    file = shared / "contribution-north-0001.safetensors"
    kept = file.read_bytes()
    sites["north"].withdraw("heart-risk")
    file.write_bytes(kept)  # by whoever kept a copy
    answer = make(shared, key=tmp_path / "coordinator.pem")
    assert answer.facts["sites"] == ["south", "west"]
    assert "because they withdrew: “north”" in answer.text
    sites["north"].submit("heart-risk")
    answer = make(shared, key=tmp_path / "coordinator.pem")
    assert answer.facts["sites"] == sorted(names)
    release = sites["north"].fetch("heart-risk")
    assert [source.guarantee.epsilon for source in release.sources] == pytest.approx([1.0] * 3)


def test_a_release_that_leaves_out_a_later_contribution_is_told_of(shared, tmp_path):
    sites = [site_in(tmp_path / name, shared, name) for name in ("north", "south")]
    for site in sites:
        site.train("heart-risk", table(100), epsilon=1.0)
        site.submit("heart-risk")
    sites[0].train("heart-risk", table(100, seed=1), epsilon=1.5)
    sites[0].submit("heart-risk")
    (shared / "contribution-north-0002.safetensors").unlink()  # by whoever can write there
    make(shared, key=tmp_path / "coordinator.pem")
    answer = commands.fetch("heart-risk", folder=sites[0].folder)
    assert "Contribution 2 was handed over later, and is not in this release" in answer.text
    assert "epsilon is 2.5" in answer.text
    said = " ".join(answer.text.split())
    assert "Whose contributions it is made of, as the signer states" in said
    assert "epsilon is to count everything" in said


def test_a_study_that_was_not_joined_is_called_that(shared, tmp_path):
    site = site_in(tmp_path / "north", shared)
    for act in (
        lambda: site.preview("heart", epsilon=1.0),
        lambda: site.release("heart"),
        lambda: site.adapt("heart", table(10)),
    ):
        with pytest.raises(SettingsError, match=r"has not joined a study 'heart' \(joined: heart"):
            act()


def test_no_decision_of_the_data_owner_is_without_a_reason(shared, tmp_path):
    site = site_in(tmp_path / "north", shared)
    for reason in ("", " "):
        with pytest.raises(SettingsError, match=r"reason of a decision .* is empty"):
            site.raise_budget(epsilon=5.0, reason=reason)
        with pytest.raises(SettingsError, match=r"reason of a decision .* is empty"):
            site.allow_exact(reason=reason)
    assert site.ledger.balance("ward").limit.epsilon == 3.0
    assert not site.ledger.permits_exact("ward")
