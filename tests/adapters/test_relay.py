import json
import shutil

import pytest

from consilience import Budget, Ledger
from consilience.adapters import relay
from consilience.adapters.relay import Collection, Outbox
from consilience.errors import BudgetExceeded, ContributionRejected, SettingsError
from consilience.files.contribution import Contribution
from consilience.files.release import Release
from consilience.files.sealed import SigningKey
from federation import Consortium, drawing_study
from studies import records_parts, study_text, table

NAMES = ("north", "south", "west")


@pytest.fixture
def consortium(tmp_path):
    found = Consortium(tmp_path, NAMES, study_text())
    for seed, name in enumerate(NAMES):
        found.submit(name, table(300, seed=seed))
    return found


def outbox(consortium, name):
    return Outbox.find(consortium.nodes[name]["outbox"], consortium.study.digest)


def carry(consortium, names=NAMES, *, collection=None):
    """Do what a transport does: every site's offer, file by file, into the coordinator's folder."""
    into = collection or Collection(consortium.heart)
    for name in names:
        offer = outbox(consortium, name).offer(into.held(name))
        for content in offer.files.values():
            into.keep(name, content)
        into.settle(name, offer.present)
    return into


def back(consortium, path):
    for name in consortium.sites:
        outbox(consortium, name).keep(path.read_bytes(), key=consortium.collection.key.public)


@pytest.fixture
def noisy(tmp_path):
    """A consortium whose coordinator may spend epsilon = 1 on draws of 0.5."""
    found = Consortium(tmp_path, NAMES, *drawing_study())
    for seed, name in enumerate(NAMES):
        found.submit(name, table(300, seed=seed))
    found.collection.allow(Budget(epsilon=1.0, unit="site", neighbours="replace-one"))
    return found


def spent(consortium):
    return Ledger(consortium.heart / "ledger.sqlite").balance(consortium.study.digest).spent.epsilon


def test_files_go_there_and_a_release_comes_back(consortium):
    path = carry(consortium).combine()
    back(consortium, path)
    assert set(consortium.fetched().values()) == {Release.load(path).digest}
    assert len(consortium.fetched()) == 3
    assert {source.site for source in Release.load(path).sources} == set(NAMES)
    assert all(
        site.ledger.balance("ward").spent.epsilon == pytest.approx(1.0)
        for site in consortium.sites.values()
    )


def test_a_release_of_a_study_with_test_records_is_measured_beside_its_baselines(tmp_path):
    for place in ("heart", *(f"{name}/outbox/heart" for name in NAMES)):
        (tmp_path / place).mkdir(parents=True)
        parts = records_parts(tmp_path / place)
    found = Consortium(tmp_path, NAMES, study_text() + parts)
    for seed, name in enumerate(NAMES):
        found.submit(name, table(300, seed=seed))
    quality = Release.load(carry(found).combine()).sealed.facts["quality"]
    assert [row["kind"] for row in quality[:4]] == ["study", "baseline", "baseline", "baseline"]
    methods = [row["method"] for row in quality]
    assert methods[0] == "Average (precision)"
    assert "public records alone" in methods[1:4]


def test_what_was_kept_is_not_asked_for_again_and_nothing_new_makes_no_new_release(consortium):
    first = carry(consortium).combine()
    again = Collection(consortium.heart)
    for name in NAMES:
        offer = outbox(consortium, name).offer(again.held(name))
        assert len(offer.present) == 1
        assert offer.files == {}
    assert again.combine() == first
    assert len(again.releases()) == 1


def test_the_relay_offers_only_submitted_contributions_of_this_study(consortium):
    site, place = consortium.sites["north"], outbox(consortium, "north").folder
    site.train("heart-risk", table(300, seed=9), epsilon=1.0)  # trained, not submitted
    (place / "patients.csv").write_text("age\n40\n")
    (place / "other.safetensors").write_bytes(b"not one of ours")
    other = SigningKey.generate()
    shutil.copy(site.contribution("heart-risk", 1), place / "copy.safetensors")
    (place.parent / "draft").mkdir()
    (place.parent / "draft" / "study.toml").write_text("half a stu")
    assert len(outbox(consortium, "north").offer(()).files) == 1
    with pytest.raises(SettingsError, match="no outbox for the requested study"):
        Outbox.find(place.parent, other.public)


def test_a_newer_contribution_supersedes_and_the_earlier_one_still_counts(consortium):
    carry(consortium).combine()
    consortium.submit("north", table(300, seed=7), epsilon=0.5)
    path = carry(consortium).combine()
    found = {source.site: source for source in Release.load(path).sources}
    assert path.name == "release-0002.safetensors"
    assert found["north"].sequence == 2
    assert found["north"].guarantee.epsilon == pytest.approx(1.5, rel=1e-6)
    assert found["south"].guarantee.epsilon == pytest.approx(1.0, rel=1e-6)


def test_a_withdrawal_takes_the_site_out_of_what_follows(consortium):
    carry(consortium).combine()
    consortium.sites["west"].withdraw("heart-risk")
    after = carry(consortium)
    assert set(after.arrived) == {"north", "south"}
    assert {source.site for source in Release.load(after.combine()).sources} == {"north", "south"}
    consortium.sites["south"].withdraw("heart-risk")
    with pytest.raises(
        SettingsError, match=r"1 of 3 have contributed. Nothing was combined or charged"
    ):
        carry(consortium).combine()


def test_only_listed_sites_with_their_own_keys_are_taken(consortium):
    sites = json.loads((consortium.heart / "sites.json").read_text())
    (consortium.heart / "sites.json").write_text(
        json.dumps({**sites, "north": SigningKey.generate().public})
    )
    with pytest.raises(ContributionRejected, match=r"not in sites\.json"):
        carry(consortium, ["north"])
    (consortium.heart / "sites.json").write_text(json.dumps({"south": sites["south"]}))
    with pytest.raises(ContributionRejected, match=r"not in sites\.json"):
        carry(consortium, ["north"])
    (consortium.heart / "sites.json").write_text('{"north": "no key"}')
    with pytest.raises(SettingsError, match=r"sites\.json must name every site"):
        carry(consortium, ["north"])
    assert not list(consortium.heart.glob("contributions/*/*"))


def test_an_altered_file_is_refused_and_leaves_nothing(consortium):
    (content,) = outbox(consortium, "north").offer(()).files.values()
    for place in (20, len(content) // 2, len(content) - 3):
        altered = bytearray(content)
        altered[place] ^= 1
        with pytest.raises(ContributionRejected):
            Collection(consortium.heart).keep("north", bytes(altered))
    assert not list(consortium.heart.glob("contributions/*/*"))


def test_a_second_contribution_with_a_number_that_was_used_is_refused(
    consortium, tmp_path, monkeypatch
):
    into = carry(consortium)
    found = consortium.sites["north"]
    learner = Contribution.load(found.contribution("heart-risk")).learner
    monkeypatch.setattr("consilience.files.sealed.software", lambda: "9.9.9")
    twin = Contribution.make(
        learner, study=consortium.study.reference, site="north", sequence=1, key=found.key
    )
    twin.save(tmp_path / "twin.safetensors")
    with pytest.raises(ContributionRejected, match="another contribution 1 of 'north'"):
        into.keep("north", (tmp_path / "twin.safetensors").read_bytes())
    (content,) = outbox(consortium, "north").offer(()).files.values()
    into.keep("elsewhere", content)  # the very same through another SuperNode
    assert into.arrived["north"] == "north"


@pytest.mark.parametrize("change", ["key", "study", "bytes", "number"])
def test_a_release_that_does_not_hold_never_reaches_the_outbox(consortium, change):
    path = carry(consortium).combine()
    content, key = path.read_bytes(), consortium.collection.key.public
    place = outbox(consortium, "north")
    if change == "key":
        key = SigningKey.generate().public
    if change == "study":
        text = study_text(privacy="min_sites = 3")
        (place.folder / "study.toml").write_text(text)
        place = Outbox(place.folder, type(consortium.study).from_text(text))
    if change == "bytes":
        content = content[:-1] + bytes([content[-1] ^ 1])
    if change == "number":
        place.keep(content, key=key)
        consortium.submit("south", table(300, seed=5))
        later = Collection(consortium.heart)
        for file in later.releases():
            file.unlink()
        content = carry(consortium, collection=later).combine().read_bytes()
    with pytest.raises(ContributionRejected):
        place.keep(content, key=key)
    kept = list(place.folder.glob("release-*"))
    assert len(kept) == (change == "number")
    assert not list(place.folder.glob(".release*"))


def test_many_files_come_in_several_answers(consortium, monkeypatch):
    consortium.submit("north", table(300, seed=3), epsilon=0.5)
    consortium.submit("north", table(300, seed=4), epsilon=0.5)
    place, into = outbox(consortium, "north"), Collection(consortium.heart)
    monkeypatch.setattr(relay, "MOST_AT_ONCE", 1)
    numbers = []
    while files := place.offer(into.held("north")).files:
        (content,) = files.values()
        numbers.append(into.keep("north", content).sequence)
    assert numbers == [1, 2, 3]


def test_two_runs_at_once_are_refused(consortium):
    with (
        consortium.collection.alone(),
        pytest.raises(SettingsError, match="Another run is collecting"),
    ):
        with Collection(consortium.heart).alone(seconds=0.0):
            pass
    with Collection(consortium.heart).alone():
        pass


def test_a_draw_is_charged_once_however_often_it_is_asked_for(noisy):
    path = carry(noisy).combine("first")
    assert spent(noisy) == pytest.approx(0.5)
    assert Collection(noisy.heart).combine("first") == path
    noisy.submit("north", table(300, seed=8))  # a change alone draws nothing
    assert carry(noisy).combine("first") == path
    assert spent(noisy) == pytest.approx(0.5)
    second = carry(noisy).combine("second")
    assert second.name == "release-0002.safetensors"
    assert spent(noisy) == pytest.approx(1.0)
    with pytest.raises(BudgetExceeded):
        carry(noisy).combine("third")
    assert spent(noisy) == pytest.approx(1.0)


def test_a_draw_that_stopped_before_its_release_was_written_goes_on_without_a_second_charge(
    noisy, monkeypatch
):
    into = carry(noisy, ["north", "south"])
    with monkeypatch.context() as patch:
        patch.setattr(Release, "save", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            into.combine("first")
    assert spent(noisy) == pytest.approx(0.5)
    path = carry(noisy).combine("first")  # west came since, and has to wait for the next request
    assert {source.site for source in Release.load(path).sources} == {"north", "south"}
    assert spent(noisy) == pytest.approx(0.5)
    assert len(Ledger(noisy.heart / "ledger.sqlite").charges()) == 1


def test_a_draw_with_a_site_that_withdrew_is_neither_made_nor_sent_again(noisy):
    carry(noisy).combine("first")
    noisy.sites["west"].withdraw("heart-risk")
    with pytest.raises(SettingsError, match="withdrawn since"):
        carry(noisy).combine("first")
    with pytest.raises(SettingsError, match="lower-case letters"):
        carry(noisy).combine("../first")
    assert spent(noisy) == pytest.approx(0.5)


def test_a_draw_that_is_never_finished_leaves_the_log_whole(noisy, monkeypatch):
    """A draw beyond the budget, or of a site that withdrew, must not use up a number."""
    carry(noisy).combine("first")
    noisy.submit("west", table(300, seed=9))
    with monkeypatch.context() as patch:
        patch.setattr(
            relay, "collect", lambda *_, **__: (_ for _ in ()).throw(BudgetExceeded("no"))
        )
        with pytest.raises(BudgetExceeded):
            carry(noisy).combine("never")
    path = carry(noisy).combine("second")
    assert path.name == "release-0002.safetensors"
    log = Release.load(path).log
    assert log is not None
    assert log.length == 1
    back(noisy, path)
    noisy.fetched()  # every site finds that it continues what it saw
    assert Collection(noisy.heart).combine("second") == path
    # The unfinished one can still be asked for; it gets the next number.
    noisy.collection.allow(Budget(epsilon=2.0, unit="site", neighbours="replace-one"))
    third = Release.load(Collection(noisy.heart).combine("never"))
    assert (third.sequence, third.log.length) == (3, 2)


def test_draws_that_an_earlier_version_numbered_beforehand_are_recognised(noisy):
    first = carry(noisy).combine("first")
    draws = noisy.heart / "draws"
    plan = json.loads((draws / "first.json").read_text())
    for number, request in enumerate(("first", "stopped"), start=1):
        old = {"members": plan["members"], "sequence": number}
        (draws / f"{request}.json").write_text(json.dumps(old))
    second = Collection(noisy.heart).combine("second")
    assert second.name == "release-0002.safetensors"
    assert Release.load(second).log.length == 1
    assert Collection(noisy.heart).combine("first") == first
    with pytest.raises(BudgetExceeded):  # the number was another's meanwhile: drawn, not returned
        Collection(noisy.heart).combine("stopped")
    assert spent(noisy) == pytest.approx(1.0)
