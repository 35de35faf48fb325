import json

import pytest

from consilience.errors import ContributionRejected, SettingsError
from consilience.files.sealed import SigningKey
from consilience.site.client import HubClient


@pytest.fixture
def client():
    return HubClient("https://hub.example", SigningKey.generate())


def answering(monkeypatch, status, facts):
    content = json.dumps(facts).encode()
    monkeypatch.setattr(HubClient, "_send", lambda *_: (status, content))


def test_a_hubs_error_is_one_line_of_printable_text(client, monkeypatch):
    error = {"code": "not-found", "message": "\x1b[2Jgone\nVerified.", "fix": "\u202eNone."}
    answering(monkeypatch, 404, {"error": error})
    with pytest.raises(SettingsError) as refused:
        client.fetch_study("heart-risk")
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("path", ["@evil.example/", "/visits/x/../../y", ".evil.example", None])
def test_a_link_leads_to_the_hub_that_was_joined(client, monkeypatch, path):
    answering(monkeypatch, 201, {"path": path})
    with pytest.raises(ContributionRejected, match="somewhere else"):
        client.open_view("heart-risk")
    answering(monkeypatch, 201, {"path": "/visits/abc_-9"})
    assert client.open_view("heart-risk") == "https://hub.example/visits/abc_-9"
