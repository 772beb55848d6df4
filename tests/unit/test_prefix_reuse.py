"""KV taken over from other sessions changes no bit: random schedules on one engine, each text beside its twin.

Sessions begin alike, arrive at random, draft with random gammas, run short of room, leave in the middle and come back
for another turn. A twin is the same request alone, on an engine that never takes anything over.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest
import torch

from outrider.ids import Generation, Mode, TokenClass
from outrider.messages import SamplingParams, Speculation
from outrider.model.prefix import chained_key
from outrider.model.probe import calibrate
from outrider.model.runner import ModelRunner
from outrider.model.tiny import random_model
from outrider.model.toy import ToyLanguage, ToyRunner
from outrider.model.transformers_runner import TransformersRunner
from tests.unit.verify_desk import VOCAB, ClassesMatter, Client, Desk, Draft, Request
from verify_service.engine import EngineSettings
from verify_service.inbox import CloseSession

DECODE, PROMPT = TokenClass.DECODE, TokenClass.PROMPT
SYSTEM = tuple(at * at % VOCAB for at in range(140))
"""What many prompts begin with: two blocks and a bit."""
Said = tuple[list[int], list[float]]
"""A text and the log-probability of each of its tokens."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def said(client: Client) -> Said:
    return client.output, [entry.logprob for verdict in client.verdicts for entry in verdict.logprobs]


def reading(text: list[int], rate: float, dice: random.Random) -> Draft:
    """A drafter that knows the text and says the right token at some rate."""

    def draft(ids: list[int]) -> torch.Tensor:
        right = len(ids) < len(text) and dice.random() < rate
        token = text[len(ids)] if right else dice.randrange(VOCAB)
        return torch.nn.functional.one_hot(torch.tensor(token), VOCAB).double()

    return draft


@dataclass
class Stage:
    """Where schedules are played, and what each request says when it is alone."""

    make_runner: Callable[[int], ModelRunner]
    make_twin_runner: Callable[[], ModelRunner]
    totals: Counter[str] = field(default_factory=Counter)
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
        """Play one schedule and compare every text with its twin."""
        schedule = Schedule(self, random.Random(seed), max_tokens)
        schedule.run()
        for client, is_whole in schedule.clients:
            text, logprobs = said(client)
            twin_text, twin_logprobs = self.twin(client.request)
            count = len(twin_text) if is_whole else len(text)
            assert text == twin_text[:count], (seed, client.request)
            assert logprobs == twin_logprobs[:count], (seed, client.request)
        self.totals.update(schedule.desk.engine.counters)


class Schedule:
    """Random sessions on one engine."""

    def __init__(self, stage: Stage, dice: random.Random, max_tokens: int) -> None:
        self.stage, self.dice, self.max_tokens = stage, dice, max_tokens
        self.desk = Desk(stage.make_runner(dice.choice((5, 8, 40))))
        self.clients: list[tuple[Client, bool]] = []
        self.generations: Counter[str] = Counter()
        self.waiting = [self.request(f"s{index}") for index in range(dice.randint(2, 4))]

    def run(self) -> None:
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
                if len(self.clients) < 4:
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
        twin_text, _ = self.stage.twin(request)
        rate = self.dice.choice((0.0, 0.6, 0.9, 1.0))
        draft = reading([*request.prompt, *twin_text], rate, self.dice) if self.dice.random() < 0.8 else None
        client = Client(self.desk, request, draft, eager=self.dice.random(), seed=self.dice.randrange(100))
        assert not client.errors
        return client

    def request(self, name: str) -> Request:
        """One of a few prompts, so that twins are known and sessions begin alike."""
        last = (self.dice.randrange(3),) * self.dice.randint(0, 2)
        prompt = SYSTEM[: self.dice.choice((20, 64, 65, 128, 140))] + last
        return self.asking(name, prompt, (PROMPT,) * len(prompt))

    def asking(self, name: str, prompt: tuple[int, ...], classes: tuple[TokenClass, ...]) -> Request:
        coupled = self.dice.random() < 0.5
        gamma = self.dice.randint(1, 12)
        self.generations[name] += 1
        return Request(
            name, prompt, Mode.COUPLED if coupled else Mode.GREEDY, SamplingParams(temperature=1.0 if coupled else 0.0),
            bytes(16) if coupled else b"", self.max_tokens, Speculation(gamma, gamma, gamma * self.dice.randint(1, 3)),
            num_logprobs=0, generation=Generation(self.generations[name], 0), classes=classes,
        )  # fmt: skip

    def turn(self, client: Client) -> Request:
        """The next turn: everything said so far, with its classes, and a question."""
        prompt_len, log = len(client.request.prompt), tuple(client.committed)
        classes = (*client.request.classes[: prompt_len - 1], *(DECODE,) * (len(log) - prompt_len + 1))
        question = (5, 6, self.dice.randrange(2))
        return self.asking(client.request.session_id, log + question, classes + (PROMPT,) * 3)


def toys(*, classes_differ: bool) -> Stage:
    language = ToyLanguage(VOCAB, seed=5)

    def make(num_blocks: int = 64) -> ModelRunner:
        if classes_differ:
            return ClassesMatter(num_blocks, language)
        return ToyRunner(language, num_blocks=num_blocks)

    return Stage(make, make)


@pytest.mark.parametrize("classes_differ", [False, True])
def test_a_hundred_random_schedules_on_the_toy_say_what_their_twins_say(classes_differ: bool) -> None:
    """With the other half, 200."""
    stage = toys(classes_differ=classes_differ)
    for seed in range(100):
        stage.play(seed, max_tokens=20)
    assert stage.totals["kv_reused_tokens"] > stage.totals["filled_tokens"] / 4
    assert stage.totals["preempted"] > 0


def test_a_key_that_leaves_classes_out_changes_some_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the same schedules, and a planted mistake."""
    monkeypatch.setattr("outrider.model.kv.chained_key", lambda parent, ids, _: chained_key(parent, ids, b""))
    stage = toys(classes_differ=True)
    with pytest.raises(AssertionError):
        for seed in range(100):
            stage.play(seed, max_tokens=20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("forced", [False, True], ids=["as probed", "classes forced apart"])
def test_random_schedules_on_a_transformer_say_what_their_twins_say(dtype: torch.dtype, forced: bool) -> None:
    runners: dict[int, TransformersRunner] = {}

    def make(num_blocks: int = 40) -> ModelRunner:
        """One runner per size; what earlier schedules left in it is taken over by later ones."""
        if num_blocks not in runners:
            runner = TransformersRunner(random_model(dtype=dtype), name="tiny", num_blocks=num_blocks)
            calibrate(runner)
            assert runner.info.exactness == "bitwise"
            if forced:
                runner.set_classes(replace(runner.classes, classes_differ=True), "forced")
            runners[num_blocks] = runner
        return runners[num_blocks]

    stage = Stage(make, lambda: make(41))
    for seed in range(5):
        stage.play(seed, max_tokens=20)
    assert stage.totals["kv_reused_tokens"] > stage.totals["filled_tokens"] / 4
