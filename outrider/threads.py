"""From threads to the event loop of the process: words to it, and work that must not hold it up."""

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import TypeVar

log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


def tell(loop: asyncio.AbstractEventLoop, action: Callable[..., None], *args: object) -> None:
    """Have something done on an event loop, from any thread; where it is closed already, nobody is left to be told."""
    try:
        loop.call_soon_threadsafe(action, *args)
    except RuntimeError as error:
        log.debug("the event loop is gone: %s", error)


async def on_own_thread(work: Callable[[], ResultT]) -> ResultT:
    """Return what blocking work returns, or raise what it raises.

    The thread is a daemon: work that hangs, as in a download, does not keep a process alive that is told to stop.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[ResultT] = loop.create_future()

    def settle(finish: Callable[[], None]) -> None:
        if not done.done():
            finish()

    def run() -> None:
        try:
            result = work()
        except Exception as error:
            failed = error
            tell(loop, settle, lambda: done.set_exception(failed))
        else:
            tell(loop, settle, lambda: done.set_result(result))

    threading.Thread(target=run, name="own-thread", daemon=True).start()
    return await done
