"""What the addresses of an app share: which model is asked, how a question reaches it, how its records come back."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from thalweg.errors import nearest
from thalweg.serve.library import Library, Shelf
from thalweg.serve.metrics import Meters
from thalweg.serve.refusals import JSONBytes, RefusedError, error_response
from thalweg.serve.requests import COST, Predict, body_of
from thalweg.serve.settings import Settings
from thalweg.serve.signals import Ending
from thalweg.tasks.serving import Plan, Servant


class Service:
    """What the app's addresses share: the runs, what is counted, and whether the end has come.

    >>> Service(Settings(runs=("absent",))).library.ready
    {}
    """

    def __init__(self, settings: Settings):
        self.settings, self.ending = settings, Ending()
        self.meters = Meters()
        self.library = Library(settings.runs, device=settings.device, size=settings.size, observe=self.meters.batch)
        self.meters.watch(self.library)

    def shelf(self, name: str | None) -> tuple[Shelf, Servant]:
        """The model of that name; the only one where none is named."""
        ready = self.library.ready
        if name is None and len(ready) == 1:
            name = next(iter(ready))
        if not ready:
            raise RefusedError(404, "not_found", "no model is ready yet; see /v1/training", "model")
        if name is None:
            raise RefusedError(422, "missing", f"name a `model`: {', '.join(ready)}", "model")
        shelf = ready.get(name)
        if shelf is None or shelf.servant is None:
            raise RefusedError(404, "not_found", f"no such model; {nearest(name, ready)}", "model")
        return shelf, shelf.servant

    def planned(self, servant: Servant, options: dict[str, Any], items: int) -> Plan:
        """The plan of a request, within what one request may cost."""
        for option in options:
            if option not in servant.takes:
                raise RefusedError(422, "unknown_field", f"`{option}` is of no use to this model; leave it out", option)
        plan = servant.plan_of(options)
        if plan.weight * items > COST:
            raise RefusedError(
                422,
                "too_costly",
                f"{items} inputs with this search may cost as much as {plan.weight * items:,} plain answers, "
                f"{COST:,} can be; send fewer at a time, or lower the width",
                "inputs",
            )
        return plan

    def ask(self, shelf: Shelf, servant: Servant, questions: list[Any], plan: Plan) -> asyncio.Future[Any]:
        """Records, answered together with other callers' where the plans are equal."""
        key = None if plan.alone else (servant, plan)
        return shelf.batcher.submit(lambda asked: servant.answer(asked, plan), questions, key=key, weight=plan.weight)

    async def predict(self, request: Request) -> Response:
        """Answer the inputs of a request."""
        began = time.perf_counter()
        asked = await body_of(request, Predict)
        shelf, servant = self.shelf(asked.model)
        options = asked.given()
        if asked.attention:
            options["attention"] = True
        plan = self.planned(servant, options, len(asked.inputs))
        for place, text in enumerate(asked.inputs):
            if isinstance(text, str) and len(text) > servant.longest:
                message = f"inputs[{place}]: at most {servant.longest:,} characters, got {len(text):,}; shorten it"
                raise RefusedError(422, "too_long", message, f"inputs[{place}]")
        questions = servant.questions(asked.inputs, asked.features or ())
        records = await unless_gone(request, self.ask(shelf, servant, questions, plan))
        if records is None:
            return Response(status_code=499)  # nobody hears it
        seconds = time.perf_counter() - began
        self.meters.request(shelf.name, len(questions), seconds)
        found: dict[str, Any] = {"model": shelf.name, "records": [record.to_json() for record in records]}
        if asked.attention:
            found["symbols"] = [servant.symbols(record) for record in records]
        return JSONBytes({**found, "milliseconds": round(1000 * seconds, 3)})


PATIENCE = 0.1
"""Seconds before anyone looks whether a caller is still there: most answers come sooner, and looking costs a task."""


async def unless_gone(request: Request, work: asyncio.Future[Any]) -> Any:
    """What the work gives; None, and the work is cancelled, where the caller goes away before that."""
    watching: list[asyncio.Task[None]] = []

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        work.cancel()

    later = asyncio.get_running_loop().call_later(PATIENCE, lambda: watching.append(asyncio.ensure_future(watch())))
    try:
        return await work
    except asyncio.CancelledError:
        if watching and watching[0].done() and not watching[0].cancelled():
            return None
        raise
    finally:
        later.cancel()
        for each in watching:
            each.cancel()


class Shortcut:
    """ASGI middleware that answers predictions itself: the framework's own way to them costs as much as an answer.

    Args:
        app: what answers everything else.
        service: what answers these.
    """

    def __init__(self, app: ASGIApp, service: Service):
        self.app, self.service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        plain = scope["type"] == "http" and scope["path"] == "/v1/predict" and scope["method"] == "POST"
        if not plain or scope["query_string"]:
            await self.app(scope, receive, send)
            return
        try:
            response = await self.service.predict(Request(scope, receive))
        except Exception as error:
            response = error_response(error, "POST /v1/predict")
        await response(scope, receive, send)
