"""From the engine's thread to the streams: all at once, in time, and no stream at another's cost."""

import asyncio
from collections.abc import Sequence

import pytest

from outrider.errors import Internal, OutriderError
from outrider.model.runner import Feed, Rows
from outrider.model.toy import ToyLanguage, ToyRunner
from outrider.rpc import Stream
from tests.unit.verify_desk import VOCAB, Client, Desk, Request, noisy_draft
from verify_service.engine import Engine, EngineSettings
from verify_service.outlet import Handover, Outlet


class Post:
    """Counts what clients were sent, and what of it has left."""

    def __init__(self) -> None:
        self.num_sent = 0
        self.parcels: list[int] = []

    def flush(self) -> None:
        if self.num_sent > sum(self.parcels):
            self.parcels.append(self.num_sent - sum(self.parcels))

    @property
    def is_empty(self) -> bool:
        return self.num_sent == sum(self.parcels)


class PostRunner(ToyRunner):
    """Wants everything to have left before it makes anybody wait."""

    def __init__(self, post: Post) -> None:
        super().__init__(ToyLanguage(VOCAB, seed=5), row_classes=(8, 64))
        self.post = post

    def forward(self, feeds: Sequence[Feed]) -> list[Rows]:
        assert self.post.is_empty
        return super().forward(feeds)


class PostDesk(Desk):
    """A desk whose engine's messages leave by a post."""

    def __init__(self) -> None:
        self.post_office = Post()
        super().__init__(PostRunner(self.post_office))

    def make_engine(self, settings: EngineSettings) -> Engine:
        return Engine(self.runner, VOCAB, settings, self.clock, flush=self.post_office.flush)


class PostClient(Client):
    """A client whose messages are counted."""

    desk: PostDesk

    def receive(self, item: object) -> None:
        self.desk.post_office.num_sent += 1
        super().receive(item)  # type: ignore[arg-type]


@pytest.mark.parametrize("drafted", [False, True], ids=["plain", "drafted"])
def test_what_a_step_says_has_left_before_the_model_runs_and_when_the_step_ends(drafted: bool) -> None:
    desk = PostDesk()
    draft = noisy_draft(0.4) if drafted else None
    clients = [PostClient(desk, Request(f"s{number}", (number,)), draft, eager=1.0) for number in range(12)]
    for _ in range(400):
        for client in clients:
            client.act()
        desk.step()
        assert desk.post_office.is_empty
        if all(client.done for client in clients):
            break
    assert all(len(client.output) == 40 for client in clients), "none was failed with a pass"
    assert max(desk.post_office.parcels) >= 12, "verdicts of one pass left one by one"


async def test_a_message_that_cannot_be_encoded_ends_its_own_stream_alone() -> None:
    def encode(item: int) -> int:
        return 1 // item

    handover = Handover()
    streams = [Stream[int, int](encode, int) for _ in range(2)]
    broken, sound = (Outlet[int](stream, handover) for stream in streams)
    broken.send(0)
    sound.send(1)
    sound.send(None)
    handover.flush()
    async with asyncio.timeout(5):
        assert await sound.ended is None
        error: OutriderError | None = await broken.ended
    assert isinstance(error, Internal)
    assert streams[1]._outbox.qsize() == 1
