"""`python -m orchestrator`: run an orchestrator until SIGTERM.

Exit status: 0 after an orderly stop, 1 when it could not go on, 2 for a setting that is not allowed.
"""

import asyncio
import logging
import sys

from orchestrator.app import OrchestratorApp
from orchestrator.config import OrchestratorSettings
from outrider.errors import InvalidRequest, OutriderError
from outrider.rpc import serve_until_terminated
from outrider.telemetry import configure_logging, metrics_endpoint

LAST_WORDS_S = 0.5
"""How long streams may take to tell clients why the process ends."""

log = logging.getLogger("orchestrator")


async def serve(settings: OrchestratorSettings) -> None:
    """Run an orchestrator until it is told to stop.

    Raises:
        OutriderError: it could not go on.
    """
    app = OrchestratorApp(settings)
    with metrics_endpoint(app.metrics.registry, settings.metrics_port):
        await app.start()
        running = asyncio.create_task(app.run())
        serving = asyncio.create_task(serve_until_terminated(app.server, app.drain, settings.grace_s))
        try:
            await asyncio.wait({running, serving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (serving, running):
                task.cancel()
            results = await asyncio.gather(running, serving, return_exceptions=True)
            await app.server.stop(LAST_WORDS_S)
        for error in results:
            if isinstance(error, Exception):
                raise error


def main() -> int:
    """Read the settings, run, and return the exit status."""
    try:
        settings = OrchestratorSettings.load()
    except InvalidRequest as error:
        print(error, file=sys.stderr)
        return 2
    configure_logging(settings.log_level, settings.log_format)
    try:
        asyncio.run(serve(settings))
    except (OutriderError, ExceptionGroup) as error:
        log.critical("the orchestrator ends: %s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
