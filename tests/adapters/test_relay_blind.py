"""A blind study through a relay: folders of sites, keyholders and a coordinator, and no hub."""

import json

import pytest

from consilience.adapters.relay import Collection, Outbox
from consilience.blind.masked import MaskedFile, Opening
from consilience.blind.papers import Papers
from consilience.blind.roster import Card, Roster
from consilience.errors import ContributionRejected, HubUnavailable, SettingsError
from consilience.files.contribution import Contribution
from consilience.files.release import Release
from consilience.files.sealed import SigningKey
from consilience.keyholder.desk import FolderDesk, desk_of, work
from consilience.keyholder.keyholder import Keyholder
from federation import Consortium
from studies import blind_text, table

NAMES = ("north", "south", "west", "east")
OFFICE, UNIVERSITY = "office", "university"


class BlindRelay(Consortium):
    """Four sites and two keyholders with an outbox each, k = 2 and t = 1."""

    def __init__(self, folder):
        self.keyholders = {
            name: Keyholder.create(folder / name / "keyholder") for name in (OFFICE, UNIVERSITY)
        }
        text = blind_text([each.key.public for each in self.keyholders.values()])
        super().__init__(folder, NAMES, text, epsilon=40.0, delta=1e-4)
        self.places = {name: folder / name / "outbox" / "heart" for name in self.sites}
        for name in self.keyholders:
            self.places[name] = folder / name / "outbox" / "heart"
            self.places[name].mkdir(parents=True)
            (self.places[name] / "study.toml").write_text(text)

    def carry(self, names=None, sent=None):
        """Do what a transport does, once there and back; note every byte that goes to whom."""
        into, key = Collection(self.heart), self.collection.key.public
        for name in names or self.places:
            outbox = Outbox.find(self.places[name].parent, self.study.digest)
            for paper, content in into.papers(name, outbox.paper_names()).items():
                outbox.keep_paper(paper, content, key=key)
                if sent is not None:
                    sent.setdefault(name, []).append((paper, content))
            offer = outbox.offer(into.held(name))
            for content in offer.files.values():
                into.keep(name, content)
            for paper, content in outbox.papers(into.paper_names()).items():
                into.keep_paper(name, paper, content)
            into.settle(name, offer.present)
        return into

    def sign(self):
        """Freeze the roster, have it countersigned, and carry the cards to everybody."""
        self.collection.freeze(dict.fromkeys(NAMES, "the registrar"))
        self.carry()
        for name, keyholder in self.keyholders.items():
            desk = FolderDesk(self.places[name], self.collection.key.public)
            agreed = desk.agree()
            desk.post_card(keyholder.countersign(agreed.roster, agreed.rule, agreed.hub))
            keyholder.remember(self.study.digest, str(self.places[name]))
        self.carry()
        self.carry()

    def work(self):
        """Let both keyholders do what waits in their outboxes; return what they refused."""
        return [text for each in self.keyholders.values() for text in work(each, desk_of).refused]


@pytest.fixture
def blind(tmp_path):
    found = BlindRelay(tmp_path)
    found.sign()
    return found


def test_masked_sums_go_there_and_a_release_of_their_total_comes_back(blind):
    for seed, name in enumerate(NAMES[:3]):
        blind.submit(name, table(300, seed=seed))
    blind.sites["east"].mask_noise("heart-risk")
    blind.sites["east"].submit("heart-risk")
    sent = {}
    into = blind.carry(sent=sent)
    assert set(into.arrived) == set(NAMES)
    blind.carry(sent=sent)
    with pytest.raises(SettingsError, match="4 files wait for keyholders to acknowledge them"):
        into.combine()
    assert blind.work() == []
    assert not Collection(blind.heart).is_settled
    assert not blind.carry(sent=sent).is_settled  # lists the batch, now that all is acknowledged
    blind.carry(sent=sent)
    with pytest.raises(SettingsError, match="is listed and waits for 2 keyholders"):
        Collection(blind.heart).combine()
    assert blind.work() == []
    into = blind.carry(sent=sent)
    assert into.is_settled
    path = into.combine()
    assert Collection(blind.heart).combine() == path  # nothing new
    release = Release.load(path)
    assert release.total.files == 4
    assert {one.site for one in release.sources} == set(NAMES)
    paid = {one.site: one.guarantee.epsilon for one in release.sources}
    assert paid.pop("east") == 0
    assert all(0.8 < epsilon <= 1 for epsilon in paid.values())
    for name in NAMES:
        outbox = Outbox.find(blind.places[name].parent, blind.study.digest)
        outbox.keep(path.read_bytes(), key=blind.collection.key.public)
    assert set(blind.fetched().values()) == {release.digest}
    assert len(blind.fetched()) == 4
    X = blind.study.schema.encode(table(500, seed=7)).X
    right = (release.predict(X) == table(500, seed=7)["ill"].to_numpy()).mean()
    assert right > 0.6
    check_what_was_sent(blind, sent)


def check_what_was_sent(blind, sent):
    """Keyholders are sent facts and never masked numbers; sites only roster and cards."""
    words = [
        Contribution.load(path).sealed.tensors["sum"].tobytes()
        for path in blind.heart.glob("contributions/*/*.safetensors")
    ]
    assert len(words) == 4
    for name, papers in sent.items():
        kinds = {paper.split("-")[0].split(".")[0] for paper, _ in papers}
        if name in blind.keyholders:
            assert {"facts", "batch"} <= kinds
            content = b"".join(content for _, content in papers)
            assert not any(each[:64] in content for each in words)
        else:
            assert kinds <= {"roster", "pad"}
    assert set(sent) >= set(blind.keyholders)


def open_all(blind):
    """Carry, acknowledge, list, open: everything that waits."""
    for _ in range(2):
        blind.carry()
        blind.carry()
        blind.work()
        Collection(blind.heart).gather()
        blind.carry()
    blind.work()
    return blind.carry()


def test_a_withdrawal_takes_the_whole_batch_out_and_the_rest_can_come_again(blind):
    for seed, name in enumerate(NAMES):
        blind.submit(name, table(300, seed=seed))
    first = open_all(blind).combine()
    assert len(Release.load(first).sources) == 4
    blind.sites["east"].withdraw("heart-risk")
    with pytest.raises(SettingsError, match="is open yet"):
        blind.carry().combine()
    for seed, name in enumerate(NAMES[:3]):
        blind.submit(name, table(300, seed=seed), epsilon=0.5)
    second = Release.load(open_all(blind).combine())
    assert sorted(one.site for one in second.sources) == ["north", "south", "west"]
    assert all(one.guarantee.epsilon > 1 for one in second.sources)  # both files were paid for


def test_nothing_is_taken_before_the_roster_is_frozen_or_of_another_key(tmp_path, blind):
    blind.submit("north", table(300, seed=1))
    outbox = Outbox.find(blind.places["north"].parent, blind.study.digest)
    (content,) = outbox.offer(()).files.values()
    elsewhere = BlindRelay(tmp_path / "other")
    with pytest.raises(ContributionRejected):
        Collection(elsewhere.heart).keep("north", content)
    listed = {name: site.key.public for name, site in blind.sites.items()}
    (elsewhere.heart / "sites.json").write_text(json.dumps(listed))
    (elsewhere.heart / "study.toml").write_text((blind.heart / "study.toml").read_text())
    with pytest.raises(ContributionRejected, match="not frozen yet"):
        Collection(elsewhere.heart).keep("north", content)
    with pytest.raises(HubUnavailable, match="not frozen yet"):
        elsewhere.submit("north", table(300, seed=1))


def test_the_coordinator_takes_papers_of_keyholders_only(blind):
    """A relay, or whoever speaks for one, may send anything."""
    for seed, name in enumerate(NAMES):
        blind.submit(name, table(300, seed=seed))
    open_all(blind)
    into, papers = Collection(blind.heart), Papers(blind.heart)
    (batch,), stranger = papers.batches(), SigningKey.generate()
    opening = papers.openings(batch)[0]
    own = opening.pads
    cards = {card.key: card for card in papers.cards()}
    office = blind.keyholders[OFFICE]
    other = Roster.make(blind.study.reference, [("north", "1" * 64, "nobody")], stranger)
    roster = papers.roster
    name = f"opening-{batch.digest}-{office.key.public}.safetensors"
    hostile = [
        (f"pad-holder-{stranger.public}.safetensors", Card.make(roster, "1" * 64, stranger)),
        (f"pad-holder-{office.key.public}.safetensors", Card.make(other, "1" * 64, office.key)),
        ("roster.safetensors", other),
        (name, Opening.make(batch, own[:-1], 1, "0" * 64, office.key)),
        (name, Opening.make(batch, own + 1, 1, "0" * 64, office.key)),
        (f"pad-holder-{office.key.public}.safetensors", Card.make(roster, "1" * 64, office.key)),
        (f"pad-holder-{office.key.public}.safetensors", cards[roster.sealed.key]),
        ("../contributions.safetensors", opening),
    ]
    before = {path: path.read_bytes() for path in papers.place.iterdir()}
    for name, paper in hostile:
        with pytest.raises((ContributionRejected, SettingsError)):
            into.keep_paper("stranger", name, paper.sealed.to_bytes())
    assert {path: path.read_bytes() for path in papers.place.iterdir()} == before
    assert not into.is_keyholder("stranger")
    assert set(into.papers("stranger", ())) == {"roster.safetensors", *map(card_name, cards)}


def card_name(key):
    return f"pad-holder-{key}.safetensors"


def test_an_outbox_takes_papers_of_its_coordinator_only(blind):
    outbox, key = Outbox(blind.places["north"], blind.study), blind.collection.key.public
    stranger = SigningKey.generate()
    other = Roster.make(blind.study.reference, [("north", "1" * 64, "nobody")], stranger)
    roster = Papers(blind.heart).roster
    again = Roster.make(blind.study.reference, [("x", "1" * 64, "nobody")], blind.collection.key)
    blind.submit("north", table(300, seed=1))
    file = MaskedFile.of(Contribution.load(next(outbox.folder.glob("contr*"))).sealed)
    acknowledged = blind.keyholders[OFFICE].acknowledge(file)
    for name, paper in (
        ("roster.safetensors", other),
        ("roster.safetensors", again),
        (card_name(stranger.public), Card.make(roster, "1" * 64, stranger)),
        (f"acknowledgement-{file.digest}-{acknowledged.key}.safetensors", acknowledged),
    ):
        with pytest.raises((ContributionRejected, SettingsError)):
            outbox.keep_paper(name, paper.sealed.to_bytes(), key=key)
    assert Papers(outbox.folder).roster.digest == roster.digest
    assert len(outbox.paper_names()) == 4  # the roster and three cards
