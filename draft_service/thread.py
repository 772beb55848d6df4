"""The model thread: the only one that touches the drafter.

Orders wait in a queue and are taken between token steps. Reports go to the event loop, all of a step at once. Whether
the thread is stuck inside the drafter can be read from outside (`busy_s`): a thread that hangs cannot say so.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from draft_service.drafters.protocol import Drafter
from draft_service.metrics import DraftMetrics
from draft_service.orders import Order, Report
from draft_service.worker import DraftWorker
from outrider.threads import tell

log = logging.getLogger(__name__)


class WorkerThread:
    """Runs a `DraftWorker` until it is stopped or its drafter is broken."""

    def __init__(
        self,
        drafter: Drafter,
        metrics: DraftMetrics,
        on_reports: Callable[[Sequence[Report]], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        """Make a thread that does not run yet; needs a running event loop, on which it is told and tells.

        Args:
            drafter: taken over.
            metrics: where to count.
            on_reports: called on the event loop with reports, in order.
            on_death: called on the event loop when the thread ends by an error.
        """
        self._loop = asyncio.get_running_loop()
        self._on_reports, self._on_death = on_reports, on_death
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        worker = self._worker = DraftWorker(drafter, self._post, metrics)
        metrics.outstanding_window.set_function(lambda: worker.outstanding_window)
        # A daemon, so that a drafter that hangs cannot keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="drafter", daemon=True)
        self._busy_since_s: float | None = None

    def start(self) -> None:
        """Run."""
        self._thread.start()

    def submit(self, order: Order) -> None:
        """Give an order; never blocks, from any thread."""
        self._orders.put(order)

    @property
    def busy_s(self) -> float:
        """Seconds since the thread began what it is doing; 0 while it waits for orders."""
        since_s = self._busy_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    async def stop(self, timeout_s: float = 5.0) -> bool:
        """End the thread after what it is doing; return whether it did end in time."""
        self._orders.put(None)
        await asyncio.to_thread(self._thread.join, timeout_s)
        return not self._thread.is_alive()

    # -- on the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._serve_orders():
                self._busy_since_s = time.monotonic()
                if self._worker.has_work:
                    self._worker.step()
        except BaseException as error:  # whatever ends this thread must be seen: the process cannot draft any more
            log.critical("the model thread ends", exc_info=error)
            tell(self._loop, self._on_death, error)
        finally:
            self._busy_since_s = None

    def _serve_orders(self) -> bool:
        """Take all waiting orders, and wait for one when there is nothing else to do; False: stop."""
        idle = not self._worker.has_work
        if idle:
            self._busy_since_s = None
        while True:
            try:
                order = self._orders.get(block=idle)
            except queue.Empty:
                return True
            if order is None:
                return False
            idle = False
            self._busy_since_s = time.monotonic()
            self._worker.handle(order)

    def _post(self, reports: Sequence[Report]) -> None:
        tell(self._loop, self._on_reports, reports)
