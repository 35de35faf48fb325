"""Logging in at an identity provider: OpenID Connect, by authorization code with PKCE."""

from __future__ import annotations

import hmac
import ipaddress
import json
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote_plus, urlencode, urlsplit

from consilience.errors import SettingsError
from consilience.protocol import Refusal

if TYPE_CHECKING:
    from joserfc.jwk import KeySet

BACK = "/login/sso/back"  # where the provider sends browsers back to
# Signatures that need the provider's private key: neither "none" nor one by a shared secret.
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512")
MOST_BYTES = 1 << 20  # of an answer of the provider
MOST_TOGETHER = 4  # logins that wait for the provider at the same time
SECONDS = 10.0  # for one answer
LEEWAY = 60  # seconds that the provider's clock may differ
KNOWN_SECONDS = 3600.0  # what the provider says about itself is asked again after that

logger = logging.getLogger("consilience.hub")


@dataclass(frozen=True)
class SignOn:
    """An identity provider, and how it knows this hub."""

    issuer: str
    client_id: str
    url: str  # the hub's own address, as browsers see it
    secret: str | None = field(default=None, repr=False)
    email_domains: tuple[str, ...] = ()  # whose verified addresses name an account
    name: str = "single sign-on"  # what people call it

    def __post_init__(self) -> None:
        for what, address in (("issuer", self.issuer), ("address of the hub", self.url)):
            _check_address(what, address)
        if not self.client_id:
            raise SettingsError(
                "Single sign-on needs the client id that the identity provider gave the hub. "
                "Nothing was started. Pass it as --oidc-client-id."
            )

    @property
    def back(self) -> str:
        """Where the provider sends browsers back to; it must know this address."""
        return self.url.rstrip("/") + BACK


def _check_address(what: str, address: str) -> None:
    if not _is_safe(address):
        raise SettingsError(
            f"The {what} must begin with https://, or be on this machine. Got {address!r}. "
            "Nothing was started."
        )


def _is_safe(address: str) -> bool:
    """Tell whether nobody on the network can read or change what is sent to an address."""
    parts = urlsplit(address)
    host = parts.hostname or ""
    if parts.scheme == "https":
        return bool(host)
    try:
        is_here = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_here = host == "localhost"
    return parts.scheme == "http" and is_here


class Identity(NamedTuple):
    """Whom the provider says that someone is; an address only if the provider verified it."""

    issuer: str
    subject: str
    email: str | None


class Provider:
    """An identity provider: asks it, and believes only what it signed for this hub."""

    def __init__(self, settings: SignOn) -> None:
        self.settings = settings
        self._lock, self._places = threading.Lock(), threading.BoundedSemaphore(MOST_TOGETHER)
        self._facts: dict[str, Any] | None = None
        self._keys: KeySet | None = None
        self._facts_until = self._keys_from = 0.0

    def address_of_login(self, state: str, nonce: str, verifier: str) -> str:
        """Return where someone logs in; the provider sends them back with `state` and a code."""
        from authlib.oauth2.client import OAuth2Client

        settings = self.settings
        scope = "openid email" if settings.email_domains else "openid"
        client = OAuth2Client(None, settings.client_id, code_challenge_method="S256")
        address: str = client.create_authorization_url(
            self._endpoint("authorization_endpoint"),
            state,
            verifier,
            redirect_uri=settings.back,
            scope=scope,
            nonce=nonce,
        )[0]
        return address

    def address_of_logout(self) -> str | None:
        """Return where someone ends the provider's own session, if it says where."""
        if not self._discover().get("end_session_endpoint"):
            return None
        asked = {
            "client_id": self.settings.client_id,
            "post_logout_redirect_uri": self.settings.url.rstrip("/") + "/login",
        }
        at = self._endpoint("end_session_endpoint")
        return f"{at}{'&' if '?' in at else '?'}{urlencode(asked)}"

    def identify(self, code: str, nonce: str, verifier: str) -> Identity:
        """Return whom a code stands for, or refuse. The provider takes each code once."""
        from authlib.oidc.core import CodeIDToken
        from joserfc.errors import JoseError

        settings = self.settings
        answer = self._ask_token(code, verifier)
        token = answer.get("id_token")
        if not isinstance(token, str):
            raise _distrust("there is no ID token")
        try:
            header, claims = self._read_token(token)
            options: dict[str, Any] = {
                "iss": {"essential": True, "value": settings.issuer},
                "aud": {"essential": True, "value": settings.client_id},
            }
            params: dict[str, Any] = {"nonce": nonce, "client_id": settings.client_id}
            params["access_token"] = answer.get("access_token")
            CodeIDToken(claims, header, options, params).validate(int(time.time()), LEEWAY)
        except JoseError as problem:
            claim = getattr(problem, "claim", None)
            why = type(problem).__name__.removesuffix("Error")
            raise _distrust(f"{why}: {claim}" if claim else why) from None
        except (ValueError, TypeError, KeyError):
            raise _distrust("it cannot be read") from None
        subject = claims["sub"]
        if not (isinstance(subject, str) and 1 <= len(subject) <= 255 and subject.isprintable()):
            raise _distrust("it names nobody")
        return Identity(settings.issuer, subject, self._verified_email(claims))

    def _verified_email(self, claims: Mapping[str, object]) -> str | None:
        email = claims.get("email")
        if claims.get("email_verified") is not True or not isinstance(email, str):
            return None
        name, at, domain = email.lower().rpartition("@")
        known = {each.lower() for each in self.settings.email_domains}
        return f"{name}@{domain}" if at and name and domain in known else None

    # ----------------------------------------------------------------------------- keys and tokens

    def _read_token(self, token: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return header and claims of a token that one of the provider's keys signed.

        A provider may change its keys at any time: before a token is refused, they are read again.
        """
        from joserfc import jwt
        from joserfc.errors import BadSignatureError, InvalidKeyIdError

        try:
            read = jwt.decode(token, self._known_keys(again=False), ALGORITHMS)
        except (BadSignatureError, InvalidKeyIdError):
            read = jwt.decode(token, self._known_keys(again=True), ALGORITHMS)
        return read.header, read.claims

    def _known_keys(self, *, again: bool) -> KeySet:
        from joserfc.jwk import KeySet

        with self._lock:
            age = time.monotonic() - self._keys_from
            if self._keys is not None and age < KNOWN_SECONDS and not again:
                return self._keys
        stated = self._ask("GET", self._endpoint("jwks_uri"))
        keys = KeySet.import_key_set({"keys": stated["keys"]})
        with self._lock:
            self._keys, self._keys_from = keys, time.monotonic()
        return keys

    def _ask_token(self, code: str, verifier: str) -> dict[str, Any]:
        from authlib.oauth2.auth import ClientAuth

        settings, at = self.settings, self._endpoint("token_endpoint")
        known = self._discover().get("token_endpoint_auth_methods_supported")
        if settings.secret is None:
            how = "none"
        elif isinstance(known, list) and "client_secret_basic" not in known:
            how = "client_secret_post"
        else:
            how = "client_secret_basic"
        body = urlencode(
            {
                "grant_type": "authorization_code",
                "code": code,
                "redirect_uri": settings.back,
                "code_verifier": verifier,
            }
        )
        headers = {"content-type": "application/x-www-form-urlencoded"}
        name, secret = settings.client_id, settings.secret
        if how == "client_secret_basic":  # RFC 6749, 2.3.1: both are form-encoded first
            name, secret = quote_plus(name), quote_plus(secret or "")
        client = ClientAuth(name, secret, how)
        _, headers, body = client.prepare("POST", at, headers, body)
        return self._ask("POST", at, headers, body)

    # --------------------------------------------------------------------------------- the provider

    def _endpoint(self, name: str) -> str:
        address = self._discover().get(name)
        if not isinstance(address, str) or not _is_safe(address):
            raise _absent(f"its {name} is missing or not on HTTPS")
        return address

    def _discover(self) -> dict[str, Any]:
        """Return what the provider says about itself."""
        from authlib.oidc.discovery import get_well_known_url

        with self._lock:
            if self._facts is not None and time.monotonic() < self._facts_until:
                return self._facts
        facts = self._ask("GET", get_well_known_url(self.settings.issuer, external=True))
        if not hmac.compare_digest(
            str(facts.get("issuer")).encode(), self.settings.issuer.encode()
        ):
            raise _absent("it calls itself by another issuer than the settings do")
        with self._lock:
            self._facts, self._facts_until = facts, time.monotonic() + KNOWN_SECONDS
        return facts

    def _ask(
        self,
        method: str,
        address: str,
        headers: Mapping[str, str] | None = None,
        content: str | None = None,
    ) -> dict[str, Any]:
        import httpx

        if not self._places.acquire(blocking=False):
            raise Refusal("too-many", "Too many people are logging in at this moment.")
        try:
            with (
                httpx.Client(timeout=SECONDS, follow_redirects=False) as client,
                client.stream(method, address, headers=headers, content=content) as answer,
            ):
                body = bytearray()
                for piece in answer.iter_bytes():
                    body += piece
                    if len(body) > MOST_BYTES:
                        raise _absent("its answer is too large")
            if 400 <= answer.status_code < 500 and method == "POST":
                raise _distrust("the provider refused the code")
            facts = json.loads(body) if answer.is_success else None
        except (httpx.HTTPError, ValueError):
            raise _absent("it cannot be reached, or its answer cannot be read") from None
        finally:
            self._places.release()
        if not isinstance(facts, dict):
            raise _absent(f"it answered with {answer.status_code}")
        return facts


def _absent(why: str) -> Refusal:
    logger.error("The identity provider cannot be used: %s.", why)
    return Refusal("unavailable", "The identity provider cannot be used at the moment.")


def _distrust(why: str) -> Refusal:
    logger.warning("A login by the identity provider was refused: %s.", why)
    return Refusal("not-authenticated", "What the identity provider sent is not valid.")
