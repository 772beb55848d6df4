"""What the three services' `__main__` share: settings in, one application run until SIGTERM, an exit status out.

Exit status: 0 after an orderly stop, 1 when the service could not go on, 2 for a setting that is not allowed.
"""

import asyncio
import gc
import logging
import sys
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import uvloop

from outrider.config import ServiceSettings
from outrider.errors import InvalidRequest, OutriderError
from outrider.loop_gauge import LoopGauge
from outrider.redaction import redacted
from outrider.rpc import RpcServer, serve_until_terminated
from outrider.telemetry import configure_logging, metrics_endpoint

LAST_WORDS_S = 0.5
"""How long streams may take to tell their peers why the process ends."""
THRESHOLDS = (10_000, 5, 5)
"""When garbage is collected: at so many new objects; older ones with every so manieth collection of the younger."""

SettingsT = TypeVar("SettingsT", bound=ServiceSettings)


class Application(Protocol):
    """A service."""

    @property
    def server(self) -> RpcServer:
        """Its server; serving after `start`."""
        ...

    @property
    def metrics(self) -> Any:
        """Its metrics; `registry` is exposed."""
        ...

    async def start(self) -> None:
        """Serve, at first perhaps health alone."""
        ...

    async def run(self) -> None:
        """Work until it ends by itself or is cancelled."""
        ...

    async def drain(self) -> None:
        """Take nothing new, and return when what runs is over."""
        ...


def run_service(name: str, settings_type: type[SettingsT], make: Callable[[SettingsT], Application]) -> int:
    """Read the settings, run until told to stop, and return the exit status.

    Args:
        name: what the service calls itself in its log.
        settings_type: which environment variables it knows.
        make: makes the application from its settings.
    """
    try:
        settings = settings_type.load()
    except InvalidRequest as error:
        print(redacted(str(error)), file=sys.stderr)
        return 2
    configure_logging(settings.log_level, settings.log_format)
    log = logging.getLogger(name)
    try:
        uvloop.run(_serve(settings, make))
    except OutriderError as error:
        log.critical("%s ends: %s", name, error)
        return 2 if isinstance(error, InvalidRequest) else 1
    except ExceptionGroup as group:
        log.critical("%s ends: %s", name, "; ".join(map(str, group.exceptions)))
        return 1
    return 0


async def _serve(settings: SettingsT, make: Callable[[SettingsT], Application]) -> None:
    app = make(settings)
    app.metrics.registry.register(LoopGauge(asyncio.get_running_loop()))
    with metrics_endpoint(app.metrics.registry, settings.metrics_port, settings.metrics_host):
        await app.start()
        try:
            await _until_terminated(app, settings.grace_s)
        finally:
            await app.server.stop(LAST_WORDS_S)


async def _until_terminated(app: Application, grace_s: float) -> None:
    settling = asyncio.create_task(_settle(app.server))
    running = asyncio.create_task(app.run())
    serving = asyncio.create_task(serve_until_terminated(app.server, app.drain, grace_s))
    try:
        await asyncio.wait({running, serving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        tasks = running, serving, settling
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for error in results:
        if isinstance(error, Exception):
            raise error


async def _settle(server: RpcServer) -> None:
    """Leave what the process was started with out of the collection of garbage, once all of it is there.

    Python collects its oldest generation only once what is new has grown to a quarter of what is not. Beside the half a
    million objects of the model libraries that is tens of megabytes of calls that are over, and the collection a pause
    of a second for the event loop; without those objects it is neither.

    What a pass's verdicts make and drop again within milliseconds is thousands of objects. Python's own threshold, 700,
    has them collected in the middle, and taken for old a few times a second: then the streams that wait, a quarter of
    a million objects where they are five hundred, are looked through for a tenth of a second every few seconds.
    """
    await server.served.wait()
    gc.freeze()
    gc.collect()  # from here on a quarter of little is little
    gc.set_threshold(*THRESHOLDS)
