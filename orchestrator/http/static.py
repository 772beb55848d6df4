"""The web page's files; what keeps a browser from loading or running anything else is `orchestrator.http.guard`'s."""

from collections.abc import MutableMapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

HEADERS = {
    "cross-origin-resource-policy": "same-origin",
    # Asked for again each time, so that a page of one version never runs with scripts of another.
    "cache-control": "no-cache",
}


METHODS = ("GET", "HEAD")


class Page(StaticFiles):
    """Serves the folder of the page."""

    async def get_response(self, path: str, scope: MutableMapping[str, Any]) -> Response:
        """Return a file with the headers.

        Raises:
            HTTPException: there is no such file, or it may not be asked for this way.
        """
        # A file that is not there is the first thing to say, whatever should be done with it.
        response = await super().get_response(path, {**scope, "method": "GET"})
        if scope["method"] not in METHODS:
            raise HTTPException(405, headers={"allow": ", ".join(METHODS)})
        response.headers.update(HEADERS)
        return response
