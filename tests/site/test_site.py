import json
import shutil

import pytest

from consilience import Budget, Ledger
from consilience.errors import BudgetExceeded, ContributionRejected, SettingsError
from consilience.files.contribution import Contribution
from consilience.files.sealed import SigningKey
from consilience.hub.hub import Hub, Settings
from consilience.site.client import HubClient
from consilience.site.site import Site
from consilience.study.collect import Publication
from consilience.study.study import Study
from forks import HubProcess
from studies import ACCEPTED_ONCE, study, study_text, table


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


def publish(shared, sequence=1, key=None):
    found = study()
    parts = [
        Contribution.load(file) for file in sorted(shared.glob("contribution-*-0001.safetensors"))
    ]
    published = Publication(key or SigningKey.generate(), sequence)
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
    assert [file.name for file in shared.glob("contribution-*")] == [
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

    def stopped(*_):
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
    site.train("heart-risk", table(200), epsilon=1.0)
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
    with pytest.raises(ContributionRejected, match="another key"):
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
    assert site.recover(tmp_path / "backup.sqlite") == 1
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
        patch.setattr(Ledger, "charge", stop)
        with pytest.raises(Stopped):
            site.recover(tmp_path / "backup.sqlite")
    with pytest.raises(SettingsError, match="ledger is gone"):
        site.preview("heart-risk", epsilon=0.5)
    assert site.recover(tmp_path / "backup.sqlite") == 1
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
        assert site.key.public == old != hub.store.sites("heart-risk")[0]["key"]
        site.train(
            "heart-risk", table(100), epsilon=1.0
        )  # completes it first: what the old key signs is lost
        assert site.submit("heart-risk")["state"] == "accepted"
        new = site.key.public
        assert new != old
        assert new == site.key.public == hub.store.sites("heart-risk")[0]["key"]
        assert SigningKey.load(site.folder / f"key.{old[:16]}.pem").public == old
        assert site.fetch("heart-risk") is None
        hub.revoke("heart-risk", "north", "operator")
        with pytest.raises(SettingsError, match="replaced or revoked"):
            site.rotate_key()
    finally:
        server.kill()
        server.end()
        hub.close()


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
