"""How commands that start processes are run: whatever ends them, what they have started ends first."""

import asyncio
import signal
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

from rich.console import Console

notes = Console(stderr=True, highlight=False)

T = TypeVar("T")


def go(command: Coroutine[Any, Any, T]) -> T:
    """Run a command and return its result; Ctrl-C and SIGTERM stop what it has started before it ends.

    Raises:
        SystemExit: one of them did.
    """
    try:
        return asyncio.run(_until_terminated(command))
    except KeyboardInterrupt:
        notes.print("\ninterrupted")
        sys.exit(130)
    except asyncio.CancelledError:
        notes.print("\nterminated")
        sys.exit(143)


async def _until_terminated(command: Coroutine[Any, Any, T]) -> T:
    running = asyncio.ensure_future(command)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    return await running
