"""Answers that come bit by bit, as server-sent events: evaluations, and the log of a training."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import FastAPI, Query, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from thalweg.errors import ThalwegError, nearest
from thalweg.serve import training
from thalweg.serve.batching import ClosedError, FullError
from thalweg.serve.examples import MEASURED, answered
from thalweg.serve.refusals import JSONBytes, RefusedError, of_library
from thalweg.serve.requests import ANSWERS, COST, WIDTH, Search
from thalweg.tasks.serving import Exam, Plan, Servant

if TYPE_CHECKING:
    from thalweg.serve.library import Shelf
    from thalweg.serve.service import Service

STREAMS = 64
"""Streams at a time; one too many is answered with 429."""
ITEMS = 20_000
"""Questions of an exam at most."""
_CHUNK = 64  # questions that are asked at a time: others get their turn between
_RUNNING = 200  # draws of the bootstrap before the end

TSV_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "text/tab-separated-values": {"schema": {"type": "string"}, "example": "cat\tK AE T\ndog\tD AO G\n"}
        },
    }
} | answered(MEASURED, "text/event-stream")


def event(name: str, data: Any) -> bytes:
    """One server-sent event.

    >>> event("progress", {"done": 1})
    b'event: progress\\ndata: {"done":1}\\n\\n'
    """
    return f"event: {name}\ndata: ".encode() + JSONBytes(data).body + b"\n\n"


class _Streams:
    """Room for so many streams."""

    def __init__(self, most: int = STREAMS):
        self.left = most

    def response(self, events: AsyncIterator[bytes]) -> Response:
        """The events as they come, where there is room for one more stream."""
        if self.left <= 0:
            raise RefusedError(429, "busy", "too many streams are open; try again soon", headers={"Retry-After": "5"})
        return _Stream(self, events)


class _Stream(StreamingResponse):
    """Events that take up room from when they are sent until they end, or their caller goes away."""

    def __init__(self, streams: _Streams, events: AsyncIterator[bytes]):
        super().__init__(events, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})
        self.streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.streams.left -= 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.streams.left += 1


def add_routes(app: FastAPI, service: Service) -> None:
    """The addresses that stream."""
    streams = _Streams()

    @app.post("/v1/evaluate", tags=["models"], openapi_extra=TSV_BODY, response_class=Response)
    async def evaluate(
        request: Request,
        model: Annotated[str | None, Query(max_length=200)] = None,
        k: Annotated[int | None, Query(ge=1, le=ANSWERS)] = None,
        search: Annotated[str | None, Query(max_length=20)] = None,
        width: Annotated[int | None, Query(ge=1, le=WIDTH)] = None,
    ) -> Response:
        """Scores with intervals as they fill in; events `progress`, `records`, `scores`, then `done` or `error`."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "text/tab-separated-values":
            raise RefusedError(415, "media_type", "expected `Content-Type: text/tab-separated-values`")
        shelf, servant = service.shelf(model)
        servant = servant.examined
        options = {"k": k, "search": search, "width": width}
        plan = service.planned(servant, Search(**options).given(), 1)
        exam = await asyncio.to_thread(servant.exam, _text(await request.body()), plan)
        if len(exam.questions) > ITEMS:
            raise RefusedError(
                413, "too_large", f"at most {ITEMS:,} lines can be measured here; use `thalweg evaluate`"
            )
        return streams.response(_examined(service, shelf, servant, exam, plan))

    @app.get("/v1/training", tags=["training"])
    async def runs() -> JSONBytes:
        """The runs of this service that were trained, or are."""
        shelves = [shelf for shelf in service.library.shelves.values() if shelf.folder is not None]
        return JSONBytes({"runs": await asyncio.to_thread(lambda: [training.state_of(shelf) for shelf in shelves])})

    @app.get("/v1/training/{name}", tags=["training"], response_class=Response)
    async def watch(name: str) -> Response:
        """A run's log, from its start and as it grows: an event for each entry, named as that is."""
        known = {each: shelf for each, shelf in service.library.shelves.items() if shelf.folder is not None}
        if name not in known:
            raise RefusedError(
                404, "not_found", f"no such run; {nearest(name, known)}" if known else "no such run", "name"
            )
        return streams.response(training.followed(known[name], service.ending, event))


def _text(body: bytes) -> str:
    try:
        return body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = body[: error.start].count(b"\n") + 1
        raise RefusedError(400, "bad_encoding", f"expected UTF-8, got other bytes on line {line}") from None


async def _examined(service: Service, shelf: Shelf, servant: Servant, exam: Exam, plan: Plan) -> AsyncIterator[bytes]:
    """Ask an exam's questions a chunk at a time, and tell the scores whenever there are half as many again."""
    records: list[Any] = []
    of, chunk, due = len(exam.questions), max(1, min(_CHUNK, COST // plan.weight)), 0
    try:
        while len(records) < of:
            start = len(records)
            asked = list(exam.questions[start : start + chunk])
            records += await _patient(service, shelf, servant, asked, plan)
            marked = [exam.marked(start + n, record) for n, record in enumerate(records[start:])]
            yield event("records", marked)
            yield event("progress", {"done": len(records), "of": of})
            if len(records) >= due or len(records) == of:
                draws = 1000 if len(records) == of else _RUNNING
                found = await asyncio.to_thread(exam.scores, records, resamples=draws)
                scores = {key: score.to_json() for key, score in found.items()}
                yield event("scores", {"items": len(records), "scores": scores})
                due = len(records) + len(records) // 2
        yield event("done", {"items": of})
    except ThalwegError as error:
        refusal = of_library(error)
        yield event("error", {"code": refusal.code, "message": str(refusal), "field": refusal.field})
    except ClosedError:
        yield event("error", {"code": "unavailable", "message": "the service ends", "field": None})


async def _patient(service: Service, shelf: Shelf, servant: Servant, asked: list[Any], plan: Plan) -> list[Any]:
    """Answers to a chunk; where the queue is full the others go first."""
    while True:
        try:
            return await service.ask(shelf, servant, asked, plan)
        except FullError as error:
            await asyncio.sleep(min(1, error.seconds))
