"""Every error as one JSON form: ``{"error": {"code", "message", "field"}}``, never a path or a traceback."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from pydantic_core import PydanticSerializationError, to_json
from starlette.exceptions import HTTPException
from starlette.responses import Response

from thalweg.errors import CheckpointError, InfeasibleError, OutOfMemoryError, ThalwegError, WriteError
from thalweg.serve.batching import ClosedError, FullError

logger = logging.getLogger("thalweg.serve")

FORM = {
    "description": "Refused: what was expected, and the field that is to blame where there is one.",
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "properties": {
                    "error": {
                        "type": "object",
                        "properties": {
                            "code": {"type": "string"},
                            "message": {"type": "string"},
                            "field": {"type": ["string", "null"]},
                        },
                        "required": ["code", "message", "field"],
                    }
                },
                "required": ["error"],
            },
            "example": {"error": {"code": "invalid", "message": "k: must be less than or equal to 50", "field": "k"}},
        }
    },
}
"""What OpenAPI says of every error."""

# Characters of a message; one that quotes what it was given is cut.
LONGEST = 300

CODES = {
    400: "bad_request",
    401: "unauthorised",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "timeout",
    413: "too_large",
    415: "media_type",
    422: "invalid",
    429: "busy",
    500: "internal",
    503: "unavailable",
}
"""What an error of each status is called where nothing more is known."""


class RefusedError(Exception):
    """A request that is not served: a status, a code, one line, and the field that is to blame.

    >>> str(RefusedError(413, "too_large", "at most 1 MiB"))
    'at most 1 MiB'
    """

    def __init__(
        self, status: int, code: str, message: str, field: str | None = None, headers: Mapping[str, str] | None = None
    ):
        super().__init__(message)
        self.status, self.code, self.field, self.headers = status, code, field, dict(headers or {})

    def response(self) -> JSONBytes:
        """What goes over the wire."""
        return refused(self.status, self.code, str(self), self.field, self.headers)


class JSONBytes(Response):
    """JSON as UTF-8; what is no Unicode, such as half a surrogate pair, is escaped, and what is no number is null."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The bytes of JSON values."""
        try:
            return to_json(content, inf_nan_mode="null")  # six times as fast as the standard library
        except PydanticSerializationError:
            return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def refused(
    status: int, code: str, message: str, field: str | None = None, headers: Mapping[str, str] | None = None
) -> JSONBytes:
    """An error as a response.

    >>> refused(404, "not_found", "no such model", "model").body
    b'{"error":{"code":"not_found","message":"no such model","field":"model"}}'
    """
    line = " ".join(message.split())
    line = line if len(line) <= LONGEST else f"{line[: LONGEST - 4]} ..."
    return JSONBytes({"error": {"code": code, "message": line, "field": field}}, status, dict(headers or {}))


def of_validation(error: ValidationError | RequestValidationError) -> RefusedError:
    """The first thing that is wrong with a body or a query, in a line."""
    first = error.errors()[0]
    kind, place = str(first["type"]), first["loc"]
    if kind == "json_invalid":
        return RefusedError(400, "bad_json", f"expected JSON in UTF-8: {_reason(first)}")
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in _shown(place)).lstrip(".")
    if kind == "extra_forbidden":
        return RefusedError(
            422, "unknown_field", f"`{field[:80]}` is not a field of this request; leave it out", field[:80]
        )
    code = "too_long" if "too_long" in kind else "missing" if kind == "missing" else "invalid"
    return RefusedError(422, code, f"{field or 'the body'}: {_reason(first)}", field or None)


def _shown(place: tuple[Any, ...]) -> tuple[Any, ...]:
    """Where it is, without the names that a choice of types adds."""
    kept = place[1:] if place and place[0] in ("body", "query", "path") else place
    return tuple(part for part in kept if isinstance(part, int) or re.fullmatch(r"[A-Za-z_][\w-]*", str(part)))[:3]


def _reason(error: Mapping[str, Any]) -> str:
    message = str(error["msg"]).replace("Input should be", "must be").replace("Value error, ", "")
    return message[:1].lower() + message[1:]


def known_query(request: Request) -> None:
    """Refuse what an address of the API does not take after its question mark: a slip would go unnoticed."""
    route = request.scope["route"]
    for name in request.query_params if route.path.startswith("/v1/") else ():
        if name not in {each.alias for each in route.dependant.query_params}:
            raise RefusedError(
                422, "unknown_field", f"`{name[:80]}` is not a parameter of this address; leave it out", name[:80]
            )


def of_library(error: ThalwegError) -> RefusedError:
    """An error that a caller can mend; what the machine lacks is not theirs to mend."""
    if isinstance(error, OutOfMemoryError):
        return RefusedError(503, "unavailable", "not enough memory for this request; lower k, the width or the samples")
    if isinstance(error, CheckpointError | WriteError):
        return RefusedError(500, "internal", "the model cannot be used; its owner finds the reason in the log")
    return RefusedError(422, "infeasible" if isinstance(error, InfeasibleError) else "refused", str(error))


def error_response(error: Exception, place: str) -> JSONBytes:
    """What is said of an error; one that is a defect, or the owner's to mend, is logged with its place."""
    match error:
        case RefusedError():
            return error.response()
        case ValidationError() | RequestValidationError():
            return of_validation(error).response()
        case FullError():
            return refused(429, "busy", str(error), headers={"Retry-After": str(error.seconds)})
        case ClosedError():
            return refused(503, "unavailable", "the service ends; ask again in a moment", headers={"Retry-After": "1"})
        case HTTPException():
            said = {404: "there is nothing here; see /openapi.json", 405: "this address takes another method"}
            message = said.get(error.status_code, str(error.detail))
            return refused(error.status_code, CODES.get(error.status_code, "error"), message, headers=error.headers)
        case ThalwegError():
            refusal = of_library(error)
            if refusal.status >= 500:
                logger.error("%s: %s", place, error)
            return refusal.response()
    logger.error("%s failed", place, exc_info=error)
    return refused(500, "internal", "something went wrong here; it is in the service's log")


def handle_errors(app: FastAPI) -> None:
    """Make every error of an app a JSON object."""

    async def handler(request: Request, error: Exception) -> Response:
        return error_response(error, f"{request.method} {request.url.path}")

    for kind in (
        *(RefusedError, ThalwegError, ValidationError, RequestValidationError, HTTPException, FullError, ClosedError),
        Exception,
    ):
        app.add_exception_handler(kind, handler)
