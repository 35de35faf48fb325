"""The Flower apps in a real deployment: processes, TLS, node authentication, and kills."""

import os
import time

import pytest

from consilience import Budget, Ledger
from consilience.files.release import Release
from federation import BIN, Consortium, Federation, drawing_study, wait_for
from studies import study_text, table

pytestmark = pytest.mark.skipif(
    not (BIN / "flower-superlink").exists() and os.environ.get("CONSILIENCE_NEEDS_FLOWER") != "1",
    reason="Flower has an environment of its own, which is not there: make flower",
)


def released(consortium):
    """Tell whether every outbox holds a release."""
    return all(list(site_outbox(consortium, name).glob("release-*")) for name in consortium.sites)


def site_outbox(consortium, name):
    return consortium.heart.parent / name / "outbox" / "heart"


def kept(consortium):
    return len(list(consortium.heart.glob("contributions/*/*.safetensors")))


def charges(consortium):
    return [len(site.ledger.charges()) for site in consortium.sites.values()]


def test_a_release_comes_back_over_tls_with_node_authentication(tmp_path):
    consortium = Consortium(tmp_path, ("north", "south"), study_text())
    for seed, name in enumerate(consortium.sites):
        consortium.submit(name, table(300, seed=seed))
    with Federation(tmp_path / "flower", consortium.nodes) as federation:
        run = federation.run(
            consortium.app, folder=str(consortium.heart), collect_minutes=3, deliver_minutes=2
        )
        try:
            wait_for(lambda: released(consortium), 180, "the release")
        except AssertionError as late:
            raise AssertionError(f"{late}\n{federation.log(run)}") from None
    (path,) = consortium.collection.releases()
    assert consortium.fetched() == dict.fromkeys(consortium.sites, Release.load(path).digest)
    assert charges(consortium) == [1, 1]
    seen = (tmp_path / "flower" / "state.db").read_bytes() + (
        tmp_path / "flower" / "logs" / "superlink.log"
    ).read_bytes()
    assert b"PRIVATE KEY" not in seen


@pytest.mark.soak
def test_nothing_is_lost_and_nothing_charged_twice_when_supernode_and_superlink_are_killed(
    tmp_path,
):
    consortium = Consortium(tmp_path, ("north", "south", "west"), *drawing_study())
    consortium.collection.allow(Budget(epsilon=1.0, unit="site", neighbours="replace-one"))
    nodes = {
        **consortium.nodes,
        "stranger": {"outbox": str(tmp_path / "nothing"), "coordinator": "0" * 64},
    }
    settings = {"folder": str(consortium.heart), "collect_minutes": 5, "deliver_minutes": 5}
    for seed, name in enumerate(("north", "south")):
        consortium.submit(name, table(300, seed=seed))
    with Federation(tmp_path / "flower", nodes) as federation:
        federation.run(consortium.app, **settings)
        wait_for(lambda: kept(consortium) == 1, 120, "the first contribution", every=0.05)
        federation.kill("superlink")  # in the middle of collecting
        federation.kill("west")  # has not contributed yet
        before = kept(consortium)
        time.sleep(3)
        federation.start("superlink")
        run = federation.run(consortium.app, **settings)
        wait_for(lambda: kept(consortium) == 2, 120, "the second contribution")
        assert before in (1, 2)
        consortium.submit("west", table(300, seed=2))
        federation.start("west")  # came back late, and the run still waits for it
        try:
            wait_for(lambda: consortium.collection.releases(), 180, "the draw", every=0.02)
        except AssertionError as late:
            raise AssertionError(f"{late}\n{federation.log(run)}") from None
        federation.kill("superlink")  # in the middle of delivering
        federation.kill("south")
        drawn = consortium.collection.releases()[0].read_bytes()
        federation.start("superlink")
        federation.start("south")
        run = federation.run(consortium.app, **settings)
        federation.finish(run, 300)
        assert "is at 3 SuperNodes" in federation.log(run)
    (path,) = consortium.collection.releases()
    assert path.read_bytes() == drawn
    assert consortium.fetched() == dict.fromkeys(consortium.sites, Release.load(path).digest)
    ledger = Ledger(consortium.heart / "ledger.sqlite")
    assert [charge.dataset for charge in ledger.charges()] == [consortium.study.digest]
    assert ledger.balance(consortium.study.digest).spent.epsilon == pytest.approx(0.5)
