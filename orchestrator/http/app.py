"""The ASGI application: routes, errors, the page.

`orchestrator.http.server` serves it, `orchestrator.http.guard` stands before it.
"""

from pathlib import Path

from fastapi import FastAPI
from starlette.staticfiles import StaticFiles

from orchestrator.http import errors, health
from orchestrator.http.front import Front

PAGE = Path(__file__).parent / "page"
"""The web page's files, served at / where they are."""


def make_app(front: Front) -> FastAPI:
    """Return the application.

    Args:
        front: what it answers with.
    """
    # Its own pages of documentation would load scripts from elsewhere; the schema is at /openapi.json.
    app = FastAPI(title="Outrider", version="1", docs_url=None, redoc_url=None, description=__doc__ or "")
    app.state.front = front
    errors.install(app)
    app.include_router(health.router)
    if PAGE.is_dir():
        app.mount("/", StaticFiles(directory=PAGE, html=True), name="page")
    return app
