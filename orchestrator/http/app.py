"""The ASGI application: routes, errors, the page.

`orchestrator.http.server` serves it, `orchestrator.http.guard` stands before it.
"""

from pathlib import Path

from fastapi import FastAPI
from starlette.routing import Route

from orchestrator.http import answering, errors, health, live
from orchestrator.http.front import Front
from orchestrator.http.static import Page

PAGE = Path(__file__).parent / "page"
"""The web page's files, served at / where they are."""

ABOUT = "OpenAI's API, and a view of the cluster. A large language model, served faster by drafts; its text is its own."
"""What the schema says of all this."""


def make_app(front: Front) -> FastAPI:
    """Return the application.

    Args:
        front: what it answers with.
    """
    # Its own pages of documentation would load scripts from elsewhere; the schema is at /openapi.json.
    app = FastAPI(title="Outrider", version="1", docs_url=None, redoc_url=None, description=ABOUT)
    app.state.front, app.state.live = front, live.Live(front)
    errors.install(app)
    routers = (health.router, answering.router, live.router)
    for router in routers:
        app.include_router(router)
    everywhere = (*app.routes, *(route for router in routers for route in router.routes))
    app.state.routes = [route for route in everywhere if isinstance(route, Route)]
    if PAGE.is_dir():
        app.mount("/", Page(directory=PAGE, html=True), name="page")
    return app
