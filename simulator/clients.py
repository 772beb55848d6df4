"""A client in simulated time: it asks for one generation after the other, and checks every token."""

from typing import Protocol

from orchestrator.figures import Round
from outrider.errors import OutriderError
from outrider.generation import Chunk
from outrider.ids import SessionId
from simulator.clock import Clock
from simulator.orchestrator import TimedOrchestrator
from simulator.results import Tally, Told
from simulator.setting import Setting
from simulator.text import continuation, prompt

CLIENT_RETRY_S = 0.5
"""Pause between two tries."""


class Served(Protocol):
    """What a client needs of its cluster."""

    setting: Setting
    clock: Clock
    tally: Tally

    def orchestrator_for(self, number: int) -> TimedOrchestrator:
        """Return an orchestrator that lives."""
        ...

    def gone(self, client: "Client") -> None:
        """A client has had all its turns."""
        ...


class Broken(AssertionError):
    """A simulated client got another text than was written: a defect of the machines, or of the simulation."""


class Client:
    """Asks for one generation after the other, and checks every token."""

    def __init__(self, cluster: Served, number: int) -> None:
        self._cluster, self._number = cluster, number
        self._turn = 0
        self._session = 0
        self._fence = 0
        self._expected: tuple[int, ...] = ()
        self._prompt: tuple[int, ...] = ()
        self._logged_len = 0
        self.told = Told(0.0)

    def begin(self) -> None:
        """Begin the next generation."""
        load = self._cluster.setting.load
        if load.turns and self._turn >= load.turns:
            self._cluster.gone(self)
            return
        self._session = self._turn * load.sessions + self._number
        self._turn += 1
        self._prompt = prompt(self._session, load.prompt)
        self._expected = continuation(self._prompt[-1], load.tokens)
        self._logged_len, self._fence = load.prompt, 0
        self.told = Told(self._cluster.clock.now_s)
        self._cluster.tally.told.append(self.told)
        self.ask()

    def ask(self) -> None:
        """Begin, or resume, at any orchestrator, from what is in the log."""
        load = self._cluster.setting.load
        log = self._prompt + self._expected[: self._logged_len - load.prompt]
        # What the log holds and the client has not been shown is shown first, as a resumption does.
        self._fence += 1
        orchestrator = self._cluster.orchestrator_for(self._session + self._fence)
        self._show(self._logged_len - load.prompt - self.told.num_tokens)
        if len(log) == load.prompt + load.tokens:
            self.ended(True)
            return
        try:
            session = (SessionId(f"s{self._session}"), self._fence)
            orchestrator.begin(session, log, load.prompt, load.prompt + load.tokens, self)
        except OutriderError:
            self._cluster.tally.counts["refused"] += 1
            self._cluster.clock.after(CLIENT_RETRY_S, self.ask)

    # -- what it hears -----------------------------------------------------------------------------------------------

    def took(self, chunk: Chunk) -> None:
        """Tokens arrive: the next ones, and the right ones."""
        at = self.told.num_tokens
        start, ids = self._cluster.setting.load.prompt + at, chunk.token_ids
        if chunk.start != start or ids != self._expected[at : at + len(ids)]:
            raise Broken(f"session {self._session} was shown {ids} at {chunk.start}, with {at} tokens before it")
        self._show(len(ids))

    def _show(self, count: int) -> None:
        if count > 0:
            self._cluster.tally.deliver(self.told, count, self._cluster.clock.now_s)

    def logged(self, length: int) -> None:
        """The log is so long."""
        self._logged_len = max(self._logged_len, length)

    def noted(self, committed: Round) -> None:
        """A verdict was committed."""
        self._cluster.tally.note(committed, self._cluster.clock.now_s)

    def moved(self) -> None:
        """A worker was lost."""
        self.told.moved = True

    def ended(self, whole: bool) -> None:
        """The generation is over."""
        tally, load = self._cluster.tally, self._cluster.setting.load
        if not whole:
            tally.counts["failed"] += 1
            self._cluster.clock.after(CLIENT_RETRY_S, self.ask)
            return
        if self.told.num_tokens != load.tokens:
            raise Broken(f"session {self._session} ended with {self.told.num_tokens} of {load.tokens} tokens")
        self.told.done = True
        tally.finished += 1
        self.begin()

    def orphaned(self) -> None:
        """Its orchestrator is gone, and it has noticed."""
        self.told.moved = True
        self.ask()
