"""What stands before the app: who may ask, how large a body may be, and the headers of every answer."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
from functools import lru_cache
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from thalweg.serve.refusals import RefusedError

BODY = 2**20
"""Bytes of a body at most."""
LARGE = {"/v1/image": 10 * 2**20, "/v1/predict": 10 * 2**20, "/v1/evaluate": 8 * 2**20}
"""Bytes of a body at most, where files are sent."""
PATIENCE = 30.0
"""Seconds in which a body must have come."""

_OPEN = ("/static/",)  # with those below: what has no secrets and makes no work
_HEADERS = [
    (
        b"content-security-policy",
        b"default-src 'self'; img-src 'self' data: blob:; object-src 'none'; base-uri 'none'; form-action 'none'; "
        b"frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
]


@lru_cache(maxsize=256)
def is_loopback(host: str) -> bool:
    """Whether an address, or a name, is of this machine alone.

    >>> is_loopback("localhost"), is_loopback("127.0.0.2"), is_loopback("::1"), is_loopback("0.0.0.0")
    (True, True, True, False)
    """
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class Guard:
    """ASGI middleware.

    Args:
        app: what is guarded.
        token: what a caller must show, ``Authorization: Bearer TOKEN``; empty asks for none.
        local: whether names other than this machine's own are refused: a page elsewhere on the web could otherwise
            have its name point here and read the answers (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, token: str = "", local: bool = True):
        self.app, self.local = app, local
        self._shown = f"Bearer {token}".encode() if token else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it here."""
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            else:
                await self.app(scope, receive, send)
            return
        fresh = scope["path"].startswith("/static/")

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                cache = b"no-cache" if fresh or scope["path"] == "/" else b"no-store"
                message["headers"] = [*message.get("headers", ()), *_HEADERS, (b"cache-control", cache)]
            await send(message)

        try:
            headers = {name: value for name, value in scope["headers"] if name in _LOOKED_AT}
            self._check(scope, headers)
            if scope["method"] in ("POST", "PUT", "PATCH"):
                body = await _whole(receive, headers, LARGE.get(scope["path"], BODY))
                if body is None:
                    return  # gone before all was said
                receive = _replayed(body, receive)
        except RefusedError as refusal:
            response = refusal.response()
            response.headers["Connection"] = "close"  # the rest of its body is not read
            await response(scope, receive, answer)
            return
        await self.app(scope, receive, answer)

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        host = headers.get(b"host", b"").decode("latin-1")
        if self.local and not is_loopback(_name(host)):
            raise RefusedError(403, "forbidden", "this service answers to this machine's own names alone")
        origin = headers.get(b"origin")
        if origin is not None and origin.decode("latin-1").partition("://")[2] != host:
            raise RefusedError(403, "forbidden", "pages of other origins may not ask")
        path: str = scope["path"]
        if not self._shown or path in ("/", "/health", "/favicon.ico") or path.startswith(_OPEN):
            return
        if not hmac.compare_digest(headers.get(b"authorization", b""), self._shown):
            raise RefusedError(
                401,
                "unauthorised",
                "expected `Authorization: Bearer TOKEN` with the service's token",
                headers={"WWW-Authenticate": "Bearer"},
            )


_LOOKED_AT = {b"host", b"origin", b"authorization", b"content-length"}


def _name(host: str) -> str:
    """A Host header without its port."""
    return host.partition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]


async def _whole(receive: Receive, headers: dict[bytes, bytes], most: int) -> bytes | None:
    """The body, within its time and size; None where the caller has gone."""
    declared = headers.get(b"content-length", b"0")
    if declared.isdigit() and int(declared[:20]) > most:
        raise _too_large(most)
    parts, size = [], 0
    try:
        async with asyncio.timeout(PATIENCE):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                part = message.get("body", b"")
                size += len(part)
                if size > most:
                    raise _too_large(most)
                parts.append(part)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise RefusedError(408, "timeout", f"the body must come within {PATIENCE:.0f} s") from None


def _too_large(most: int) -> RefusedError:
    return RefusedError(413, "too_large", f"a body may have {most:,} bytes here; send less at a time")


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The body in one piece, then what else the caller does: go away."""
    messages: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return messages.pop() if messages else await receive()

    return replayed
