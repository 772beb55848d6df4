"""`python -m draft_service`: run a draft worker until SIGTERM.

Exit status: 0 after an orderly stop, 1 when the drafter could not be loaded or broke, 2 for a setting that is not
allowed.
"""

import asyncio
import logging
import sys

from draft_service.app import DraftApp
from draft_service.config import DraftSettings
from outrider.errors import InvalidRequest, OutriderError
from outrider.rpc import serve_until_terminated
from outrider.telemetry import configure_logging, metrics_endpoint

LAST_WORDS_S = 0.5
"""How long streams may take to tell their peers why the process ends."""

log = logging.getLogger("draft_service")


async def serve(settings: DraftSettings) -> None:
    """Run a draft worker until it is told to stop.

    Raises:
        OutriderError: it could not go on.
    """
    app = DraftApp(settings)
    with metrics_endpoint(app.metrics.registry, settings.metrics_port):
        await app.start()
        try:
            await _until_terminated(app, settings.grace_s)
        finally:
            await app.server.stop(LAST_WORDS_S)


async def _until_terminated(app: DraftApp, grace_s: float) -> None:
    running = asyncio.create_task(app.run())
    serving = asyncio.create_task(serve_until_terminated(app.server, app.drain, grace_s))
    try:
        await asyncio.wait({running, serving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (running, serving):
            task.cancel()
        results = await asyncio.gather(running, serving, return_exceptions=True)
    for error in results:
        if isinstance(error, Exception):
            raise error


def main() -> int:
    """Read the settings, run, and return the exit status."""
    try:
        settings = DraftSettings.load()
    except InvalidRequest as error:
        print(error, file=sys.stderr)
        return 2
    configure_logging(settings.log_level, settings.log_format)
    try:
        asyncio.run(serve(settings))
    except (OutriderError, OSError) as error:  # OSError: the metrics port is taken
        log.critical("the draft worker ends: %s", error)
        return 1
    except ExceptionGroup as group:
        log.critical("the draft worker ends: %s", "; ".join(str(error) for error in group.exceptions))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
