"""The HTTP application: routes, error responses, static files."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.staticfiles import StaticFiles

from paclm import __version__
from paclm.errors import CuratorError, ServiceError
from paclm.server import completions, corpus, stats, student, telemetry
from paclm.server.access import AccessMiddleware, AnyCaller, TheService, route_of
from paclm.server.openapi import ANSWER_HEADERS, Health, Model, Models, describe, described
from paclm.server.refusals import Refused, database_unavailable, error_body, stopping
from paclm.server.service import Service

STATIC = Path(__file__).parent / "static"


def create_app(service: Service) -> FastAPI:
    """The application over a service; it starts and closes the service."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.close()

    app = FastAPI(
        title="paclm",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # those pages load scripts from elsewhere
        redoc_url=None,
        openapi_url=None,  # served below, with a key like everything else
        redirect_slashes=False,
        telemetry={  # FastAPI's own would send queries, and messages of errors
            "tracing": False,
            "metrics": False,
            "logs": False,
            "auto_configure": False,
        },
    )
    app.state.service = service
    app.openapi = lambda: describe(app, service.setup.model_id, completions.BODIES)  # type: ignore[method-assign]
    of_promise = {
        "half": (completions.half_router, stats.router),
        "corpus": (corpus.router,),
        "student": (student.router,),
    }
    for router in (completions.router, *of_promise[service.promise]):
        app.include_router(router)
    _add_small_routes(app)
    if STATIC.is_dir():
        app.mount("/static", StaticFiles(directory=STATIC), name="static")
    app.add_exception_handler(Refused, _refuse)
    app.add_exception_handler(ServiceError, _refuse_without_database)
    app.add_exception_handler(CuratorError, _refuse_when_stopped)
    app.add_exception_handler(HTTPException, _refuse_http)
    if service.setup.settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=service.setup.settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", "idempotency-key"],
            expose_headers=[*ANSWER_HEADERS, "x-request-id", "retry-after"],
        )
    app.add_middleware(AccessMiddleware, service=service)
    return app


def _add_small_routes(app: FastAPI) -> None:
    @app.get("/v1/models", **described(Models, set()))
    async def models(_: AnyCaller, service: TheService) -> Response:
        """The one model of this workspace."""
        return JSONResponse({"object": "list", "data": [_model(service)]})

    @app.get("/v1/models/{model_id:path}", **described(Model, {404}))
    async def model(model_id: str, _: AnyCaller, service: TheService) -> Response:
        """The model, by name."""
        if model_id != service.setup.model_id:
            raise Refused(404, f"This server has one model, {service.setup.model_id}.", code="model_not_found")
        return JSONResponse(_model(service))

    @app.head("/health", include_in_schema=False)
    @app.get("/health", responses={200: {"model": Health}, 503: {"model": Health}}, response_model=None)
    async def health(service: TheService) -> Response:
        """Whether requests are answered now; reports nothing else."""
        is_serving = service.state == "serving"
        return JSONResponse({"status": "ok" if is_serving else service.state}, 200 if is_serving else 503)

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi(_: AnyCaller) -> Response:
        """This document."""
        return JSONResponse(app.openapi())

    @app.get("/", include_in_schema=False)
    async def dashboard() -> Response:
        """The dashboard page; it shows no figures until the admin key is entered."""
        return FileResponse(STATIC / "index.html")


def _model(service: Service) -> dict[str, object]:
    return {"id": service.setup.model_id, "object": "model", "created": service.setup.created, "owned_by": "paclm"}


async def _refuse(request: Request, refusal: Exception) -> Response:
    assert isinstance(refusal, Refused)
    if refusal.reason is None:  # an answer that broke off: `Answer` has logged it
        return refusal.response()
    service: Service = request.app.state.service
    service.metrics.count_refusal(refusal.reason)
    if request.state.trace is not None:
        request.state.trace.error = refusal.code
    telemetry.write(
        telemetry.Entry(
            event="refused",
            request=request.state.request_id,
            key=getattr(request.state, "key_name", None),
            route=route_of(request.url.path),
            status=refusal.status,
            code=refusal.code,
        )
    )
    return refusal.response()


async def _refuse_without_database(request: Request, error: Exception) -> Response:
    telemetry.log_error("database", error)
    return await _refuse(request, database_unavailable())


async def _refuse_when_stopped(request: Request, _: Exception) -> Response:
    return await _refuse(request, stopping())


async def _refuse_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    sentences = {404: "Not found. The API is under /v1.", 405: "This path does not allow that method."}
    message = sentences.get(error.status_code, "The request cannot be answered.")
    if error.status_code == 404 and f"{request.url.path}/".startswith("/v1/"):  # perhaps another endpoint of OpenAI's
        message = (
            "Of OpenAI's API only completions, chat completions, responses and models are offered; see /openapi.json."
        )
    return JSONResponse(error_body(error.status_code, message), error.status_code, error.headers)
