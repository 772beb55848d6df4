"""Drafters driven directly, as the worker would, for tests."""

from collections.abc import Callable, Sequence

import torch

from draft_service.drafters.causal_lm import CausalLm
from draft_service.drafters.protocol import Drafter, DraftSession, Failed, Guessed, Plan, Work
from outrider.ids import Epoch, Generation, Mode, SessionId
from outrider.messages import SamplingParams, SparseRow
from outrider.model.toy import ToyLanguage, ToyRunner

KEY = bytes(range(16))
EPOCH = Epoch(Generation(1, 1), 0)
VOCAB = 24
TARGET = ToyLanguage(VOCAB, seed=5, order=3)

torch.set_num_threads(1)


def session(
    name: str = "s",
    mode: Mode = Mode.GREEDY,
    sampling: SamplingParams | None = None,
    key: bytes = KEY,
    prompt_len: int = 4,
) -> DraftSession:
    if sampling is None:
        sampling = SamplingParams(temperature=0.0 if mode is Mode.GREEDY else 1.0)
    return DraftSession(SessionId(name), mode, sampling, b"" if mode is Mode.GREEDY else key, prompt_len)


def toy(language: ToyLanguage = TARGET, vocab_len: int = VOCAB, **runner: int) -> tuple[CausalLm, ToyRunner]:
    made = ToyRunner(language, **{"context_len": 512, "num_blocks": 64, **runner})  # type: ignore[arg-type]
    return CausalLm(made, vocab_len=vocab_len), made


def prompt(length: int, start: int = 1) -> list[int]:
    return [(start + index * index * 7) % VOCAB for index in range(length)]


def planned(drafter: Drafter, name: str, ids: Sequence[int], count: int) -> Plan:
    """Plan, catching up first where the drafter has to."""
    for _ in range(100):
        plan = drafter.plan(SessionId(name), ids, count)
        if plan is not None:
            return plan
        drafter.draw([Work(SessionId(name), EPOCH, ids, 0)])
    raise AssertionError("the drafter never catches up")


def draw(
    drafter: Drafter, name: str, ids: list[int], count: int, epoch: Epoch = EPOCH
) -> tuple[list[int], list[SparseRow]]:
    """Draw a whole proposal at the end of `ids`, which are not changed; return tokens and rows."""
    text, rows = list(ids), list[SparseRow]()
    assert planned(drafter, name, text, count) == Plan(count)
    while len(text) < len(ids) + count:
        [outcome] = drafter.draw([Work(SessionId(name), epoch, text, len(ids) + count - len(text))])
        guessed = guesses(outcome)
        text.extend(guessed.token_ids)
        rows.extend(guessed.rows)
    return text[len(ids) :], rows


def guesses(outcome: Guessed | Failed) -> Guessed:
    assert isinstance(outcome, Guessed), outcome
    return outcome


def continued(language: ToyLanguage, ids: Sequence[int], count: int, choose: Callable[..., int]) -> list[int]:
    """Return the text's continuation by the language, each token chosen from its law and position."""
    text = list(ids)
    for _ in range(count):
        text.append(choose(language.probs(text), len(text)))
    return text[len(ids) :]


def likeliest(law: torch.Tensor, position: int) -> int:
    return int(law.argmax())
