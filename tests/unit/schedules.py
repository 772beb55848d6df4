"""Random schedules of sessions on one engine, and what each of their texts must be: that of its twin.

Sessions begin alike, arrive in any order, draft with random gammas, run short of room, leave in the middle and come
back for another turn, beside neighbours whose draws nobody can foretell. A twin is the same request alone, without
drafts, on an engine that never takes anything over. Texts are compared with the bits of their log-probabilities.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from outrider.ids import Generation, Mode, TokenClass
from outrider.messages import SamplingParams, Speculation
from outrider.model.runner import ModelRunner
from tests.unit.verify_desk import VOCAB, Client, Desk, Draft, Request
from verify_service.engine import EngineSettings
from verify_service.inbox import CloseSession

DECODE, PROMPT = TokenClass.DECODE, TokenClass.PROMPT
SYSTEM = tuple(at * at % VOCAB for at in range(140))
"""What many prompts begin with: two blocks and a bit."""
POOLS = (5, 8, 40)
"""Blocks of a schedule's pool: hardly enough for one session, too few for all, enough."""
Said = tuple[list[int], list[float]]
"""A text and the log-probability of each of its tokens."""


def said(client: Client) -> Said:
    """Return what a client heard."""
    return client.output, [entry.logprob for verdict in client.verdicts for entry in verdict.logprobs]


def reading(text: list[int], rate: float, dice: random.Random) -> Draft:
    """A drafter that knows the text and says the right token at some rate."""

    def draft(ids: list[int]) -> torch.Tensor:
        right = len(ids) < len(text) and dice.random() < rate
        token = text[len(ids)] if right else dice.randrange(VOCAB)
        return torch.nn.functional.one_hot(torch.tensor(token), VOCAB).double()

    return draft


def guessing(_: list[int]) -> torch.Tensor:
    """A drafter that knows nothing: every token is as likely."""
    return torch.full((VOCAB,), 1.0 / VOCAB, dtype=torch.float64)


@dataclass
class Stage:
    """Where schedules are played, and what each request says when it is alone."""

    make_runner: Callable[[int], ModelRunner]
    make_twin_runner: Callable[[], ModelRunner]
    totals: Counter[str] = field(default_factory=Counter)
    """Counts of the engines, with "schedules", "texts" (compared) and "unseeded" (beside them)."""
    known: dict[tuple[object, ...], Said] = field(default_factory=dict)

    def twin(self, request: Request) -> Said:
        """Return what a request says alone and without taking anything over."""
        key = (request.prompt, request.classes, request.mode)
        if key not in self.known:
            desk = Desk(self.make_twin_runner(), EngineSettings(prefix_reuse=False))
            client = Client(desk, request)
            desk.run([client])
            assert desk.engine.counters["kv_reused_tokens"] == 0
            self.known[key] = said(client)
        return self.known[key]

    def play(self, seed: int, max_tokens: int) -> None:
        """Play one schedule and compare every text that is promised with its twin."""
        schedule = Schedule(self, random.Random(seed), max_tokens)
        schedule.run()
        for client, is_whole in schedule.clients:
            if client.request.mode.needs_rows:
                self.totals["unseeded"] += 1
                continue
            text, logprobs = said(client)
            twin_text, twin_logprobs = self.twin(client.request)
            count = len(twin_text) if is_whole else len(text)
            assert text == twin_text[:count], (seed, client.request)
            assert logprobs == twin_logprobs[:count], (seed, client.request)
            self.totals["texts"] += 1
        self.totals["schedules"] += 1
        self.totals.update(schedule.desk.engine.counters)

    def __str__(self) -> str:
        shown = ("schedules", "texts", "unseeded", "decode_passes", "filled_tokens", "kv_reused_tokens", "preempted")
        return ", ".join(f"{name} {self.totals[name]}" for name in shown)


class Schedule:
    """Random sessions on one engine."""

    def __init__(self, stage: Stage, dice: random.Random, max_tokens: int) -> None:
        self.stage, self.dice, self.max_tokens = stage, dice, max_tokens
        self.desk = Desk(stage.make_runner(dice.choice(POOLS)))
        self.clients: list[tuple[Client, bool]] = []
        self.generations: Counter[str] = Counter()
        self.waiting = [self.request(f"s{index}") for index in range(dice.randint(2, 4))]
        self.waiting += [self.unseeded(f"u{index}") for index in range(dice.randint(0, 2))]
        dice.shuffle(self.waiting)

    def run(self) -> None:
        """Play it to its end; at rest all blocks are back."""
        live: list[Client] = []
        for _ in range(3_000):
            if self.waiting and self.dice.random() < 0.2:
                live.append(self.open(self.waiting.pop()))
            for client in live:
                client.act()
            self.desk.step()
            for client in [client for client in live if client.done or self.leaves(client)]:
                live.remove(client)
                self.clients.append((client, client.done))
                if not client.done:
                    self.desk.post(CloseSession(client.ticket, keep_kv=True))
                if len(self.clients) < 4 and not client.request.mode.needs_rows:
                    self.waiting.append(self.turn(client))
            if not live and not self.waiting:
                break
        self.desk.step()
        assert not live
        counters = self.desk.engine.counters
        assert not counters["failed_sessions"]
        assert not counters["kv_unbalanced"]
        assert self.desk.runner.free_blocks == self.desk.runner.info.num_blocks

    def leaves(self, client: Client) -> bool:
        return bool(client.output) and self.dice.random() < 0.01

    def open(self, request: Request) -> Client:
        draft = self.drafter(request) if self.dice.random() < 0.8 else None
        client = Client(self.desk, request, draft, eager=self.dice.random(), seed=self.dice.randrange(100))
        assert not client.errors
        return client

    def drafter(self, request: Request) -> Draft:
        if request.mode.needs_rows:
            return guessing
        twin_text, _ = self.stage.twin(request)
        return reading([*request.prompt, *twin_text], self.dice.choice((0.0, 0.6, 0.9, 1.0)), self.dice)

    def request(self, name: str) -> Request:
        """One of a few prompts, so that twins are known and sessions begin alike."""
        mode = Mode.COUPLED if self.dice.random() < 0.5 else Mode.GREEDY
        prompt = self.prompt()
        return self.asking(name, mode, prompt, (PROMPT,) * len(prompt))

    def unseeded(self, name: str) -> Request:
        """A neighbour with fresh draws."""
        prompt = self.prompt()
        mode = self.dice.choice((Mode.REJECTION, Mode.BLOCK))
        return self.asking(name, mode, prompt, (PROMPT,) * len(prompt))

    def prompt(self) -> tuple[int, ...]:
        """Begin as others do, or, so that room runs short, with another token."""
        first = self.dice.choice(((), (), (1,), (2,)))
        last = (self.dice.randrange(3),) * self.dice.randint(0, 2)
        return first + SYSTEM[: self.dice.choice((20, 58, 62, 64, 65, 122, 128, 140))] + last

    def asking(self, name: str, mode: Mode, prompt: tuple[int, ...], classes: tuple[TokenClass, ...]) -> Request:
        gamma = self.dice.randint(1, 12)
        self.generations[name] += 1
        key = {Mode.GREEDY: b"", Mode.COUPLED: bytes(16)}.get(mode, self.dice.randbytes(16))
        return Request(
            name, prompt, mode, SamplingParams(temperature=0.0 if mode is Mode.GREEDY else 1.0), key,
            self.max_tokens, Speculation(gamma, gamma, gamma * self.dice.randint(1, 3)),
            num_logprobs=0, generation=Generation(self.generations[name], 0), classes=classes,
        )  # fmt: skip

    def turn(self, client: Client) -> Request:
        """The next turn: everything said so far, with its classes, and a question."""
        prompt_len, log = len(client.request.prompt), tuple(client.committed)
        classes = (*client.request.classes[: prompt_len - 1], *(DECODE,) * (len(log) - prompt_len + 1))
        question = (5, 6, self.dice.randrange(2))
        mode = Mode.COUPLED if self.dice.random() < 0.5 else Mode.GREEDY
        return self.asking(client.request.session_id, mode, log + question, classes + (PROMPT,) * 3)
