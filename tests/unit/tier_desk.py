"""Engines with a tier, driven on the test's own thread by the real clock, and ways to hurt the tier's server."""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

from outrider.ids import Generation, TokenClass
from outrider.model.runner import BLOCK_LEN, BlockLayout, ModelRunner
from outrider.tier.identity import identify
from outrider.tier.speeds import Speeds
from outrider.tier.tier import BlockTier, TierSettings
from tests.unit.verify_desk import VOCAB, ClassesMatter, Client, Desk, Request
from verify_service.engine import Engine, EngineSettings
from verify_service.restoring import Tier

DECODE, PROMPT = TokenClass.DECODE, TokenClass.PROMPT


class StoredClasses(ClassesMatter):
    """The toy whose rows depend on classes, with the classes among a block's bytes."""

    @property
    def layout(self) -> BlockLayout:
        return BlockLayout("int64", 2, 2, 2 * super().layout.num_bytes)

    def copy_out(self, block: int, into: memoryview) -> None:
        half = len(into) // 2
        super().copy_out(block, into[:half])
        held = self._classes[block * BLOCK_LEN : (block + 1) * BLOCK_LEN]
        into[half:] = b"".join(value.to_bytes(8, "little") for value in held)

    def copy_in(self, block: int, data: memoryview) -> None:
        half = len(data) // 2
        super().copy_in(block, data[:half])
        held = [int.from_bytes(data[half + 8 * at : half + 8 * at + 8], "little") for at in range(BLOCK_LEN)]
        self._classes[block * BLOCK_LEN : (block + 1) * BLOCK_LEN] = held


class TierDesk(Desk):
    """A verifier's engine with a tier; computing is said to be slow, unless a test says otherwise."""

    def __init__(self, runner: ModelRunner, settings: TierSettings, prefill_s: float = 1.0) -> None:
        self.tier = Tier(BlockTier(identify(runner, b"same").identity, settings), Speeds(prefill_s))
        super().__init__(runner)

    def make_engine(self, settings: EngineSettings) -> Engine:
        return Engine(self.runner, VOCAB, settings, tier=self.tier)

    def step(self, dt_s: float = 0.01) -> bool:
        """Step; give the tier's threads a moment when there is nothing to do."""
        did = super().step(dt_s)
        if not did:
            time.sleep(0.0003)
        return did

    def count(self, name: str, label: str = "") -> float:
        return self.tier.blocks.tally.of(name, label)

    def until(self, condition: Callable[[], bool], limit_s: float = 60.0) -> None:
        """Step until something is so."""
        end_s = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < end_s, self.tier.blocks.tally.counts()
            self.step()

    def settle(self) -> None:
        """Step until everything is stored."""
        self.until(lambda: not self.step() and not self.tier.blocks.in_flight_bytes)

    def die(self) -> None:
        """Decode nothing any more; what was computed is stored."""
        assert self.engine.restorer is not None
        while self.engine.restorer.store_one():
            assert self.tier.blocks.has_room
        assert self.tier.blocks.close(60.0)


@dataclass
class Cluster:
    """Verifiers with pools of their own and one tier."""

    make_runner: Callable[[], ModelRunner]
    settings: TierSettings
    desks: list[TierDesk] = field(default_factory=list)

    def verifier(self, prefill_s: float = 1.0, **changes: object) -> TierDesk:
        desk = TierDesk(self.make_runner(), replace(self.settings, **changes), prefill_s)  # type: ignore[arg-type]
        self.desks.append(desk)
        return desk

    def close(self) -> None:
        for desk in self.desks:
            desk.tier.blocks.close(1.0)


def moved(client: Client, generation: int = 2) -> Request:
    """What an orchestrator asks of another verifier: the whole log with its classes."""
    ask = client.request
    prompt_len, log = ask.prompt_len or len(ask.prompt), tuple(client.committed)
    classes = (*(PROMPT,) * (prompt_len - 1), *(DECODE,) * (len(log) - prompt_len + 1))
    return replace(ask, prompt=log, classes=classes, prompt_len=prompt_len, generation=Generation(generation))


def kv_bytes(desk: Desk, token_ids: Sequence[int], classes: Sequence[TokenClass]) -> list[bytes]:
    """Return the bytes of a text's full blocks; all of them have to be known."""
    access = desk.runner.block_access
    blocks = []
    for key in access.keys(token_ids, classes):
        block = bytearray(access.layout.num_bytes)
        assert access.read(key, memoryview(block))
        blocks.append(bytes(block))
    return blocks


class Wire:
    """A Unix socket in front of a server's, which stops passing answers on after so many bytes, as a dead network."""

    def __init__(self, url: str, path: str, freeze_after: int) -> None:
        self.url = f"unix://{path}"
        self.left = freeze_after
        self._target = urlsplit(url).path
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        self._open: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX)
            far.connect(self._target)
            self._open += [near, far]
            threading.Thread(target=self._pass, args=(near, far, False), daemon=True).start()
            threading.Thread(target=self._pass, args=(far, near, True), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, counted: bool) -> None:
        try:
            while data := source.recv(4096):
                if counted:
                    data, self.left = data[: max(0, self.left)], self.left - len(data)
                sink.sendall(data)
        except OSError:
            return

    def close(self) -> None:
        for each in self._open:
            # Closing alone would wake nobody; its other end may have gone already.
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
