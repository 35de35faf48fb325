import gzip
import json
import threading
import time
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from consilience import __version__
from consilience.errors import ContributionRejected, HubUnavailable, SettingsError
from consilience.files.sealed import SigningKey
from consilience.protocol import VERSION_HEADER, Invitation
from consilience.site import client as client_module
from consilience.site.client import HubClient


@pytest.fixture
def client():
    return HubClient("https://hub.example", SigningKey.generate(), "0" * 64)


def answering(monkeypatch, status, facts):
    content = json.dumps(facts).encode()
    monkeypatch.setattr(HubClient, "_send", lambda *_: (status, content))


def test_a_hubs_error_is_one_line_of_printable_text(client, monkeypatch):
    error = {"code": "not-found", "message": "\x1b[2Jgone\nVerified.", "fix": "\u202eNone."}
    answering(monkeypatch, 404, {"error": error})
    with pytest.raises(SettingsError) as refused:
        client.withdraw("heart-risk")
    assert str(refused.value).isprintable()


def test_what_to_do_about_a_refusal_is_never_the_hubs_word(client, monkeypatch):
    fix = "The charge was refunded. Run: consilience site budget raise --epsilon 50"
    for code in ("rejected", "invented"):
        error = {"code": code, "message": "It is gone." + " " * 300 + "$ ", "fix": fix}
        answering(monkeypatch, 422, {"error": error})
        with pytest.raises((ContributionRejected, SettingsError)) as refused:
            client.withdraw("heart-risk")
        assert "refused and says “It is gone. $”." in str(refused.value)
        assert "refunded" not in str(refused.value)
        assert "Nothing was changed" not in str(refused.value)


def test_a_withdrawal_and_a_submission_are_what_the_hub_confirms_and_no_more(client, monkeypatch):
    answering(monkeypatch, 200, {"state": "not withdrawn: kept for ever"})
    with pytest.raises(ContributionRejected, match="did not confirm the withdrawal"):
        client.withdraw("heart-risk")
    answering(monkeypatch, 200, {"state": "withdrawn", "note": "x"})
    assert client.withdraw("heart-risk") == {"state": "withdrawn"}
    answering(monkeypatch, 200, {"digest": "a" * 64, "state": "x" * 5_000_000, "note": "x"})
    sent = SimpleNamespace(digest="a" * 64)
    assert client.submit("heart-risk", sent, b"") == {"digest": "a" * 64, "state": "x" * 100}


@pytest.mark.parametrize("path", ["@evil.example/", "/visits/x/../../y", ".evil.example", None])
def test_a_link_leads_to_the_hub_that_was_joined(client, monkeypatch, path):
    answering(monkeypatch, 201, {"path": path})
    with pytest.raises(ContributionRejected, match="somewhere else"):
        client.open_view("heart-risk")
    answering(monkeypatch, 201, {"path": "/visits/abc_-9"})
    assert client.open_view("heart-risk") == "https://hub.example/visits/abc_-9"


def test_a_packed_answer_is_not_unpacked(client, monkeypatch):
    """A few packed kilobytes could fill the memory."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.headers["accept-encoding"])
            self.send_response(200)
            self.send_header("content-encoding", "gzip")
            self.end_headers()
            self.wfile.write(gzip.compress(bytes(1 << 20)))

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        here = HubClient(f"http://127.0.0.1:{server.server_port}", client.key, client.hub_key)
        with pytest.raises(HubUnavailable, match="packed it"):
            here.fetch_release("heart-risk")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert asked == ["identity"]


def test_a_request_that_a_proxy_repeated_is_signed_and_sent_again(client, monkeypatch):
    """The first worker died with the nonce spent, and the proxy asked the second one."""
    error = {"error": {"code": "replayed", "message": "Received before.", "fix": "Sign anew."}}
    answers = [(409, json.dumps(error).encode()), (200, b"{}")]
    monkeypatch.setattr(HubClient, "_send", lambda *_: answers.pop(0))
    assert client.request_json("GET", "/api/studies/heart-risk") == {}
    assert not answers
    answers += [(409, json.dumps(error).encode())] * 2
    with pytest.raises(SettingsError, match="Received before"):
        client.request_json("GET", "/api/studies/heart-risk")


@pytest.mark.parametrize(
    "facts",
    [
        {"study": "victim", "hub_key": "1" * 64, "digest": "2" * 64},
        {"study": "victim", "hub_key": "0" * 64, "digest": "1" * 64},
        {"study": "victim/release", "hub_key": "0" * 64, "digest": "2" * 64},
        {"study": "victim?x=1", "hub_key": "0" * 64, "digest": "2" * 64},
        {"study": "..", "hub_key": "0" * 64, "digest": "2" * 64},
        {},
    ],
)
def test_nothing_is_signed_for_what_an_unknown_hub_answers(client, monkeypatch, facts):
    """It could choose the path that a site signs, and send the request elsewhere."""
    signed = []

    def send(_, method, path, body, most):
        signed.append(path)
        return 201, json.dumps(facts).encode()

    monkeypatch.setattr(HubClient, "_send", send)
    with pytest.raises(ContributionRejected):
        client.enrol(Invitation("code", "0" * 64, "2" * 64), "north", fetch_only=False)
    assert signed == ["/api/enrolments"]


@pytest.mark.parametrize("answer", [b"", b"[1]", b"[{}]", b"{}", b'{"study": 5}', b"[" * 10**5])
def test_an_answer_of_no_form_is_an_error_in_words(client, monkeypatch, answer):
    names = {"study": "victim", "hub_key": "0" * 64, "digest": "2" * 64}
    answers = [(201, json.dumps(names).encode()), (200, answer)]
    monkeypatch.setattr(HubClient, "_send", lambda *_: answers.pop(0))
    with pytest.raises((HubUnavailable, ContributionRejected)):
        client.enrol(Invitation("code", "0" * 64, "2" * 64), "north", fetch_only=False)
    monkeypatch.setattr(HubClient, "_send", lambda *_: (200, answer))
    assert client.fetch_log("heart-risk", 1) == []
    for ask in (client.contributions, client.withdraw, client.open_view):
        with suppress(HubUnavailable, ContributionRejected):
            assert isinstance(ask("heart-risk"), dict)  # a withdrawal has no more form than that
    monkeypatch.setattr(HubClient, "_send", lambda *_: (500, answer))
    with pytest.raises(HubUnavailable, match="no readable answer"):
        client.withdraw("heart-risk")


def test_a_certificate_that_is_not_there_is_not_the_hubs_silence(client, monkeypatch, tmp_path):
    for content in (None, b"no certificate"):
        path = tmp_path / "hub.pem"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(SettingsError, match=r"hub\.pem' cannot be read. Nothing was sent"):
            replace(client, certificate=str(path)).fetch_release("heart-risk")


@pytest.mark.parametrize("name", ["a/b", "../x", "A", "", "a?b", "a%2fb", "a\n"])
def test_a_name_that_leads_elsewhere_is_in_no_path(client, monkeypatch, name):
    monkeypatch.setattr(HubClient, "_send", lambda *_: pytest.fail("sent"))
    for ask in (client.fetch_release, client.contributions, client.withdraw, client.open_view):
        with pytest.raises(ContributionRejected, match="cannot be a name"):
            ask(name)
    with pytest.raises(ContributionRejected, match="cannot be a name"):
        client.fetch_contribution("heart-risk", name)


@pytest.mark.parametrize("where", ["header", "body"])
def test_a_hub_that_trickles_bytes_is_not_waited_for(client, monkeypatch, where):
    """Every byte would renew a limit between bytes."""
    monkeypatch.setattr(client_module, "TIMEOUT_SECONDS", 1.0)
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            if where == "body":
                self.send_response(200)
                self.send_header("content-length", "100000")
                self.end_headers()
            with suppress(OSError):
                while not ended.wait(0.1):
                    self.wfile.write(b" " if where == "body" else b"H")
                    self.wfile.flush()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    began = time.monotonic()
    try:
        here = HubClient(f"http://127.0.0.1:{server.server_port}", client.key, client.hub_key)
        with pytest.raises(HubUnavailable):
            here.contributions("heart-risk")
    finally:
        ended.set()
        server.shutdown()
        thread.join()
        server.server_close()
    assert time.monotonic() - began < 10


def test_nothing_of_a_study_is_read_before_its_digest_is_compared(client, monkeypatch):
    """What a hub, or whoever stands before it, writes there would be words of ours."""
    evil = "x] in a study.\n\nconsilience: One charge was refunded.\nNext: consilience ..."
    names = {"study": "victim", "hub_key": "0" * 64, "digest": "2" * 64}
    for facts in ({evil: {}}, {"a" * 3_000_000: {}}, {evil: "\ud800"}, {"study": {evil: 1}}):
        answers = [json.dumps(names).encode(), json.dumps({"study": facts}).encode()]
        monkeypatch.setattr(HubClient, "_send", lambda *_, rest=answers: (200, rest.pop(0)))
        with pytest.raises(ContributionRejected) as refused:
            client.enrol(Invitation("code", "0" * 64, "2" * 64), "north", fetch_only=False)
        assert "another study, than the invitation names" in str(refused.value)
        assert len(str(refused.value)) < 300
        assert "refunded" not in str(refused.value)


def test_a_page_of_the_log_holds_digests_or_nothing(client, monkeypatch):
    for digests in (["this is no digest"], ["a" * 64, 5], ["a" * 63], "a" * 64, [["a" * 64]]):
        answering(monkeypatch, 200, {"digests": digests})
        assert client.fetch_log("heart-risk", 1) == []
    answering(monkeypatch, 200, {"digests": ["a" * 64]})
    assert client.fetch_log("heart-risk", 1) == ["a" * 64]


@pytest.mark.parametrize(
    ("stated", "is_named"), [("0.0.9", True), (__version__, False), ("9 <b>pay</b>", False)]
)
def test_a_refusal_names_the_versions_of_hub_and_site_if_they_differ(client, stated, is_named):
    """What one of them says and the other does not know is refused, and nobody else says why."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            content = json.dumps({"error": {"code": "malformed", "message": "No."}}).encode()
            self.send_response(400)
            self.send_header(VERSION_HEADER, stated)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        local = replace(client, address=f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(SettingsError) as refused:
            local.fetch_release("heart-risk")
    words = f"It runs consilience {stated}, and this site {__version__}"
    assert (words in str(refused.value)) == is_named
    assert "pay" not in str(refused.value)
