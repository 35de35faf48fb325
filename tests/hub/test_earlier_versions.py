"""A hub's folder that an earlier version wrote is verified, shown and worked on."""

import json
import shutil
from pathlib import Path

import pytest

from consilience.files.release import Release
from consilience.hub.api.app import create_app
from consilience.hub.auth import new_token
from consilience.protocol import HEADER, digest, sign_request
from consilience.site.site import Site
from consilience.study.building import begin
from consilience.study.study import Study
from studies import ACCEPTED_ONCE

FOLDER = Path(__file__).parents[1] / "fixtures" / "version-0.1"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())
STUDIES = sorted(EXPECTED["releases"])


@pytest.fixture
def client(tmp_path, tools):
    folder = shutil.copytree(FOLDER / "hub", tmp_path / "hub")
    with tools.Client(create_app(tools.quick(folder))) as client:
        token, _ = new_token(client.app.state.hub.store, "anna", hours=1, kind="test")
        client.headers = {"cookie": f"consilience={token}"}
        yield client


def test_the_log_and_every_file_hold_and_all_pages_are_shown(client, tmp_path):
    hub = client.app.state.hub
    n_entries, _ = hub.store.verify()
    assert n_entries > 50
    assert hub.ledger.verify()
    page = client.get("/studies", headers=client.headers)
    assert page.status_code == 200
    assert all(f"/studies/{study}" in page.text for study in STUDIES)
    for study in STUDIES:
        for path in ("", "/text", "/sites", "/releases/1", "/releases/1/certificate.html"):
            page = client.get(f"/studies/{study}{path}", headers=client.headers)
            assert page.status_code == 200, (study, path, page.text[:300])
        digest = EXPECTED["contributions"][study]["digest"]
        page = client.get(f"/studies/{study}/contributions/{digest}", headers=client.headers)
        assert page.status_code == 200
        assert digest in page.text
        file = client.get(f"/studies/{study}/releases/1/file", headers=client.headers)
        (tmp_path / "release").write_bytes(file.content)
        release = Release.load(tmp_path / "release", key=hub.key.public)
        assert release.digest == EXPECTED["releases"][study]["digest"]
    page = client.get("/audit", headers=client.headers)
    assert page.status_code == 200


def test_a_site_of_then_contributes_again_and_the_hub_combines_old_with_new(client, tmp_path):
    hub, site = client.app.state.hub, Site(shutil.copytree(FOLDER / "site", tmp_path / "site"))
    n_entries, _ = hub.store.verify()
    rows = "".join(
        f"{20 + i % 70},{'fm'[i % 2]},{90 + i % 100},{'no yes'.split()[i % 2]}\n" for i in range(99)
    )
    (tmp_path / "table.csv").write_text(f"age,sex,pressure,ill\n{rows}")
    for study in ("logistic", "tree"):
        # The hub of then is not at its address.
        body = site.train(study, tmp_path / "table.csv", epsilon=1.0, offline=True).read_bytes()
        path = f"/api/studies/{study}/contributions"
        headers = {HEADER: sign_request(site.key, hub.key.public, "POST", path, digest(body))}
        assert client.post(path, content=body, headers=headers).status_code == 201
    for study in ("logistic", "tree"):
        # These labels mean nothing, so that the hub may withhold what it makes of them.
        combiner = client.app.state.combiner
        combiner.run(at_once=True)
        if (withheld := hub.store.study(study))["withheld"]:
            asked = {"request": "0123456789abcdef", "actor": "coordinator:ann"}
            combiner.combine(study, change=withheld["changes"], **asked)
        row, file = hub.release_path(study)
        release = Release.load(file, key=hub.key.public)
        assert (row["sequence"], [source.site for source in release.sources]) == (
            2,
            ["north", "south"],
        )
        north = next(source for source in release.sources if source.site == "north")
        assert north.guarantee.epsilon == pytest.approx(3.0)  # both of its trainings
        page = client.get(f"/studies/{study}/releases/2", headers=client.headers)
        assert page.status_code == 200
    assert hub.store.verify()[0] > n_entries


def test_a_hub_of_then_can_keep_drafts(client):
    store = client.app.state.hub.store
    facts = begin("drafted", "A test.", {"label": "y", "classes": [0, 1], "columns": []})
    draft = store.add_draft("anna", facts, "coordinator:anna")
    page = client.get(f"/drafts/{draft}", headers=client.headers)
    assert "Draft drafted" in page.text
    store.verify()


def test_studies_that_are_refused_today_are_still_listed_and_shown(tools, tmp_path):
    with tools.Client(create_app(tools.quick(tmp_path / "hub"))) as client:
        store = client.app.state.hub.store
        texts = {
            f"old-{i}": text.replace("heart-risk", f"old-{i}")
            for i, (text, _) in enumerate(ACCEPTED_ONCE.values())
        }
        for name, text in texts.items():
            store.add_study(name, Study.from_text(text, stored=True).digest, text, "anna")
    # A hub that starts with them in its database.
    with tools.Client(create_app(tools.quick(tmp_path / "hub"))) as client:
        hub, world = client.app.state.hub, tools.World(client, tmp_path)
        token, _ = new_token(hub.store, "ann", hours=1, kind="test")
        cookie = {"cookie": f"consilience={token}"}
        page = client.get("/studies", headers=cookie)
        assert page.status_code == 200
        for name, text in texts.items():
            assert f"/studies/{name}" in page.text
            for path in ("", "/text", "/sites"):
                assert client.get(f"/studies/{name}{path}", headers=cookie).status_code == 200
            listed = client.get(f"/api/studies/{name}", headers=world.coordinator)
            assert listed.status_code == 200, listed.text
            assert hub.agreed(name).digest == Study.from_text(text, stored=True).digest
            answer = client.post("/api/studies", content=text, headers=world.coordinator)
            assert tools.code(answer) == "study-invalid"
