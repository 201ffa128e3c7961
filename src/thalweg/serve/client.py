"""A client for Python programs; needs nothing but the standard library."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlencode, urlsplit


class ServiceError(Exception):
    """What a service refused: its ``status``, the ``code`` of the error and the ``field`` that is to blame."""

    def __init__(self, status: int, code: str, message: str, field: str | None = None):
        super().__init__(message)
        self.status, self.code, self.field = status, code, field


class Client:
    """A connection to a service, kept open between requests; for one thread at a time.

    Args:
        address: as ``thalweg serve`` prints it.
        token: where the service asks for one.
        timeout: seconds to wait for an answer.
        patience: seconds to go on asking a service that is busy, as it says when to come back.

    >>> Client("ftp://localhost")
    Traceback (most recent call last):
    ...
    ValueError: expected an address such as http://127.0.0.1:8000, got `ftp://localhost`
    """

    def __init__(
        self, address: str = "http://127.0.0.1:8000", *, token: str = "", timeout: float = 60.0, patience: float = 30.0
    ):
        parts = urlsplit(address)
        kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
        if parts.scheme not in kinds or not parts.hostname:
            raise ValueError(f"expected an address such as http://127.0.0.1:8000, got `{address}`")
        self._connect = lambda: kinds[parts.scheme](parts.hostname or "", parts.port, timeout=timeout)
        self._open: http.client.HTTPConnection | None = None
        self._root, self._patience = parts.path.rstrip("/"), patience
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def predict(self, inputs: str | Sequence[Any], *, model: str | None = None, **options: Any) -> list[dict[str, Any]]:
        """Records of some inputs, or of one text; options as those of ``/v1/predict``: ``k``, ``search``, ..."""
        asked = {"inputs": [inputs] if isinstance(inputs, str) else list(inputs), **options}
        if model is not None:
            asked["model"] = model
        body = json.dumps(asked).encode()
        return json.loads(self._ask("POST", "/v1/predict", body, "application/json").read())["records"]

    def models(self) -> list[dict[str, Any]]:
        """What can be asked."""
        return json.loads(self._ask("GET", "/v1/models").read())["models"]

    def evaluate(self, data: str | Path, **options: Any) -> Iterator[tuple[str, Any]]:
        """Events of an evaluation as they come, name and data: ``progress``, ``records``, ``scores``, ``done``.

        Args:
            data: a TSV file, or its text; options: ``model``, ``k``, ``search``, ``width``.
        """
        body = data.read_bytes() if isinstance(data, Path) else data.encode()
        query = urlencode({key: value for key, value in options.items() if value is not None})
        address = f"/v1/evaluate?{query}" if query else "/v1/evaluate"
        name = ""
        for line in self._ask("POST", address, body, "text/tab-separated-values"):
            field, _, value = line.decode().rstrip("\n").partition(": ")
            if field == "event":
                name = value
            elif field == "data":
                yield name, json.loads(value)

    def close(self) -> None:
        """End the connection; the next request opens another."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, method: str, address: str, body: bytes = b"", media: str = "") -> http.client.HTTPResponse:
        """The answer to a request; one that is refused is a :class:`ServiceError`."""
        headers = {**self._headers, **({"Content-Type": media} if media else {})}
        until = time.monotonic() + self._patience
        while True:
            answer = self._send(method, self._root + address, body, headers)
            if answer.status < 400:
                return answer
            text = answer.read()
            wait = int(answer.headers.get("Retry-After", "1")) if answer.status == 429 else 0
            if not wait or time.monotonic() + wait > until:
                raise _refused(answer.status, text)
            time.sleep(wait)

    def _send(self, method: str, address: str, body: bytes, headers: dict[str, str]) -> http.client.HTTPResponse:
        fresh = self._open is None
        connection = self._open = self._open or self._connect()
        try:
            connection.request(method, address, body or None, headers)
            return connection.getresponse()
        except (http.client.HTTPException, OSError):
            self.close()
            if fresh:
                raise
        # A service may close a connection that was idle; asking twice for the same answer does no harm.
        return self._send(method, address, body, headers)


def _refused(status: int, text: bytes) -> ServiceError:
    try:
        told = json.loads(text)["error"]
        return ServiceError(status, told["code"], told["message"], told.get("field"))
    except (ValueError, KeyError, TypeError):
        return ServiceError(status, "error", f"the service answered with status {status}")
