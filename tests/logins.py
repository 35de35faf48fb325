"""Logging in to a hub at an identity provider: a browser that tests look into, and the hub."""

import base64
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import httpx

from consilience.hub.api.app import create_app
from consilience.hub.signon import SignOn

CLIENT, SECRET = "hub", "a secret: 50%+1"


def encode(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode().rstrip("=")


class Browser:
    """Keeps cookies with their paths."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.cookies: dict[str, tuple[str, str]] = {}

    def headers(self, path: str) -> dict[str, str]:
        sent = [f"{n}={value}" for n, (value, at) in self.cookies.items() if path.startswith(at)]
        return {"cookie": "; ".join(sent)}

    def get(self, address: str) -> httpx.Response:
        parts = urlsplit(address)
        at = parts.path + (f"?{parts.query}" if parts.query else "")
        answer = self.client.get(at, headers=self.headers(parts.path), follow_redirects=False)
        for line in answer.headers.get_list("set-cookie"):
            name, _, rest = line.partition("=")
            value, path = rest.split(";")[0].strip('"'), re.search(r"[Pp]ath=([^;]+)", line)
            self.cookies[name] = (value, path[1] if path else "/")
            if not value:
                del self.cookies[name]
        return answer

    def post(self, path: str, page: str, **fields: str) -> httpx.Response:
        token = re.search(r'name="token" value="([0-9a-f]{64})"', self.get(page).text)
        assert token is not None
        data = {"token": token[1], **fields}
        headers = self.headers(path)
        return self.client.post(path, data=data, headers=headers, follow_redirects=False)

    def begin(self, target: str = "/studies") -> str:
        answer = self.get(f"/login/sso?next={quote(target)}")
        assert answer.status_code == 303, answer.text
        return str(answer.headers["location"])


def make_world(provider: Any, folder: Path, tools: Any, *domains: str) -> Any:
    sign_on = SignOn(provider.issuer, CLIENT, "http://localhost:8440", SECRET, domains)
    return tools.Client(create_app(replace(tools.quick(folder / "hub", None), sign_on=sign_on)))


@contextmanager
def open_world(provider: Any, folder: Path, tools: Any) -> Iterator[Any]:
    """A hub that knows a person of the provider as bea."""
    with make_world(provider, folder, tools) as client:
        world = tools.World(client, folder)
        world.provider = provider
        world.hub.store.add_account("bea", "none", "operator")
        world.hub.store.bind("bea", provider.issuer, "s-1", "operator")
        yield world


def try_login(world: Any, subject: str = "s-1") -> tuple[Browser, httpx.Response]:
    browser = Browser(world.client)
    return browser, browser.get(world.provider.let_in(browser.begin(), subject))
