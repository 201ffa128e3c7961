"""The app: what each address answers. Computation is elsewhere; here requests become questions and records JSON."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Query, Request
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

import thalweg
from thalweg.serve import playground, streaming
from thalweg.serve.examples import GROWN, INFERRED, PREDICTED, answered
from thalweg.serve.guard import Guard
from thalweg.serve.library import Shelf, set_aside
from thalweg.serve.refusals import FORM, JSONBytes, RefusedError, handle_errors, known_query
from thalweg.serve.requests import Chain, Memory, Predict, Search, Tree, body_of, limits, schema_of
from thalweg.serve.service import Service, Shortcut, unless_gone
from thalweg.serve.settings import Settings
from thalweg.serve.signals import listening

PAGE = Path(__file__).parent / "page"


class _Fronted(FastAPI):
    """An app behind :class:`Guard` and :class:`Shortcut`, before the framework's own layers, which cost more time."""

    front: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.front(scope, receive, send)

    def stand_behind(self, service: Service) -> None:
        guarded = service.settings
        self.front = Guard(Shortcut(super().__call__, service), token=guarded.token, local=guarded.local)


def create_app(settings: Settings) -> FastAPI:
    """The ASGI app that serves some runs; their models are loaded when it starts.

    >>> create_app(Settings(runs=("absent",))).title
    'Thalweg'
    """
    service = Service(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        settings.limit_threads()
        if not service.library.ready:
            await asyncio.to_thread(service.library.open)
        set_aside()
        with listening(service.ending, service.library):
            yield
        service.ending.come()
        await asyncio.to_thread(service.library.close)

    app = _Fronted(
        title="Thalweg",
        version=thalweg.__version__,
        summary="Models over HTTP: answers with probabilities, and what they are made of.",
        lifespan=lifespan,
        dependencies=[Depends(known_query)],
        responses={"4XX": FORM},
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    handle_errors(app)
    _add_facts(app, service)
    _add_models(app, service)
    _add_playground(app)
    streaming.add_routes(app, service)
    _add_page(app)
    app.stand_behind(service)
    return app


def _add_facts(app: FastAPI, service: Service) -> None:
    @app.get("/health", tags=["service"])
    async def health() -> dict[str, Any]:
        """Whether it is well, and which models are ready."""
        return {"status": "ok", "version": thalweg.__version__, "models": list(service.library.ready)}

    @app.get("/metrics", tags=["service"], response_class=Response)
    async def metrics() -> Response:
        """Counts and times for Prometheus."""
        body, kind = service.meters.exposition()
        return Response(body, headers={"Content-Type": kind})

    @app.get("/v1/models", tags=["models"])
    async def models() -> JSONBytes:
        """What can be asked, and how."""
        ready = service.library.ready.values()
        bounds = [limits(each.servant.longest if each.servant else 0) for each in ready]
        found = [{**each.facts, "limits": bound} for each, bound in zip(ready, bounds, strict=True)]
        return JSONBytes({"models": found})


def _add_models(app: FastAPI, service: Service) -> None:
    @app.post("/v1/predict", tags=["models"], openapi_extra=schema_of(Predict) | answered(PREDICTED))
    async def predict(request: Request) -> Response:
        """Answers, best first, with probabilities: the records of `thalweg predict --format jsonl`."""
        return await service.predict(request)

    @app.post("/v1/tree", tags=["models"], openapi_extra=schema_of(Tree) | answered(GROWN))
    async def tree(request: Request) -> Response:
        """What a beam looked at for one input, kept, finished and dropped."""
        asked = await body_of(request, Tree)
        shelf, servant = service.shelf(asked.model)
        plan = service.planned(servant, asked.given(), 1)
        question = servant.questions([asked.input], [asked.features] if asked.features else [])[0]
        return await _alone(request, shelf, lambda: servant.tree(question, plan, exact=asked.exact))

    @app.post("/v1/image", tags=["models"], openapi_extra=IMAGE_BODY)
    async def image(
        request: Request,
        model: Annotated[str | None, Query(max_length=200)] = None,
        k: Annotated[int | None, Query(ge=1, le=50)] = None,
    ) -> Response:
        """Classes of an image file, and what in it spoke for the first."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if not (kind.startswith("image/") or kind == "application/octet-stream"):
            raise RefusedError(
                415, "media_type", "expected an image file as the body: `Content-Type: image/png` or the like"
            )
        shelf, servant = service.shelf(model)
        plan = service.planned(servant, Search(k=k).given(), 1)
        data = await request.body()
        return await _alone(request, shelf, lambda: servant.look(data, plan))


async def _alone(request: Request, shelf: Shelf, work: Callable[[], dict[str, Any]]) -> Response:
    """What one call gives, made in the model's own thread."""
    found = await unless_gone(request, shelf.batcher.submit(lambda asked: [each() for each in asked], [work]))
    return Response(status_code=499) if found is None else JSONBytes({"model": shelf.name, **found[0]})


IMAGE_BODY = {
    "requestBody": {
        "required": True,
        "content": {kind: {"schema": {"type": "string", "format": "binary"}} for kind in ("image/png", "image/jpeg")},
    }
}


def _add_playground(app: FastAPI) -> None:
    @app.get("/v1/memory", tags=["playground"])
    async def digits(count: Annotated[int, Query(ge=1, le=200)] = 10) -> JSONBytes:
        """The digits that a memory stores."""
        return JSONBytes(await asyncio.to_thread(playground.stored, count))

    @app.post("/v1/memory", tags=["playground"], openapi_extra=schema_of(Memory))
    async def memory(request: Request) -> JSONBytes:
        """A spoilt digit, retrieved step by step."""
        asked = await body_of(request, Memory)
        return JSONBytes(await asyncio.to_thread(playground.retrieved, asked))

    @app.post("/v1/chain", tags=["playground"], openapi_extra=schema_of(Chain) | answered(INFERRED))
    async def chain(request: Request) -> JSONBytes:
        """Marginals, best paths and samples of a small lattice."""
        asked = await body_of(request, Chain)
        return JSONBytes(await asyncio.to_thread(playground.inferred, asked))


def _add_page(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        index = PAGE / "index.html"
        if not index.exists():
            return JSONBytes({"about": "Thalweg", "see": "/openapi.json"})
        return FileResponse(index, media_type="text/html; charset=utf-8")

    app.mount("/static", StaticFiles(directory=PAGE, check_dir=False), name="static")
