"""A source of workers for tests."""

import asyncio
from collections.abc import Sequence

from outrider.errors import StoreUnavailable
from outrider.messages import WorkerDescription


class Registry:
    """Takes a moment to answer, can go away, and counts who asks."""

    def __init__(self, *workers: WorkerDescription) -> None:
        self.all, self.num_asked, self.away = list(workers), 0, False

    async def workers(self, role: str) -> Sequence[WorkerDescription]:
        self.num_asked += 1
        await asyncio.sleep(0)
        if self.away:
            raise StoreUnavailable("nobody answers")
        return [each for each in self.all if each.role == role]
