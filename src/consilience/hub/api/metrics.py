"""What surrounds every request: a rate for each address, counters for Prometheus, headers."""

from __future__ import annotations

import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Mapping

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from consilience.hub.api.log import request_id, requests
from consilience.hub.auth import Buckets, network_of
from consilience.hub.combining import Combiner
from consilience.hub.dashboard.visits import answer_refusal
from consilience.protocol import VERSION, VERSION_HEADER, Refusal

_METHODS = ("GET", "POST", "PUT", "DELETE", "HEAD")


class Metrics:
    """Counters of this worker since it started."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, int]] = Counter()
        self.seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
        self.received = 0

    def text(self, counts: Mapping[tuple[str, str], int], combiner: Combiner) -> str:
        """Return everything in the format that Prometheus reads."""
        requests = {
            f'{{method="{method}",route="{route}",status="{status}"}}': str(n)
            for (method, route, status), n in sorted(self.requests.items())
        }
        seconds = {
            f'{{method="{method}",route="{route}"}}': f"{spent:.6f}"
            for (method, route), spent in sorted(self.seconds.items())
        }
        rows = {
            f'{{table="{table}",state="{state}"}}': str(n)
            for (table, state), n in sorted(counts.items())
        }
        measured = {
            "requests_total counter": requests,
            "request_seconds_total counter": seconds,
            "received_bytes_total counter": {"": str(self.received)},
            "combined_total counter": {"": str(combiner.combined)},
            "combining_seconds_total counter": {"": f"{combiner.seconds:.6f}"},
            "rows gauge": rows,
        }
        lines = []
        for name, values in measured.items():
            lines.append(f"# TYPE consilience_{name}\n")
            at = name.split()[0]
            lines += [f"consilience_{at}{labels} {n}\n" for labels, n in values.items()]
        return "".join(lines)


class Gate:
    """Limit each address, count each answer, and add the headers that every answer has."""

    def __init__(self, app: ASGIApp, metrics: Metrics, buckets: Buckets) -> None:
        self.app, self.metrics, self.buckets = app, metrics, buckets

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        began, status = time.perf_counter(), 500
        number = secrets.token_hex(8)
        request_id.set(number)
        # Every answer is whole: whoever asks for a part that there is not gets no other shape.
        scope["headers"] = [one for one in scope["headers"] if one[0] != b"range"]

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [one for one in message.get("headers", ()) if one[0] != b"accept-ranges"]
                message["headers"] = headers
                headers.append((b"x-content-type-options", b"nosniff"))
                headers.append((b"x-request-id", number.encode()))
                if scope["scheme"] == "https":
                    headers.append((b"strict-transport-security", b"max-age=31536000"))
                if scope["path"].startswith("/api/"):
                    headers.append((b"cache-control", b"no-store"))
                    headers.append((VERSION_HEADER.encode(), VERSION.encode()))
            await send(message)

        try:
            if scope["path"] != "/healthz":
                self.buckets.take(network_of((scope.get("client") or ("nowhere",))[0]))
            if "\0" in scope["path"]:  # no name has it, and PostgreSQL cannot be asked for it
                raise Refusal("not-found", "There is nothing at this address.")
            await self.app(scope, receive, send_with_headers)
        except Refusal as refusal:
            await answer_refusal(Request(scope), refusal)(scope, receive, send_with_headers)
        finally:
            route = getattr(scope.get("route"), "path", "")
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self.metrics.requests[method, route, status] += 1
            seconds = time.perf_counter() - began
            self.metrics.seconds[method, route] += seconds
            facts = {"method": method, "route": route, "status": status}
            requests.info("request", extra={"facts": {**facts, "seconds": round(seconds, 4)}})
