"""Unusual targets and draft workers for black-box cases: scripted, padded, wrong at chosen places, blind, hostile."""

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draft_service.app import DraftApp
from draft_service.config import DraftSettings
from draft_service.drafters.causal_lm import CausalLm
from draft_service.drafters.protocol import Drafter, DrafterInfo, DraftSession, Guessed, Outcome, Plan, Work
from draft_service.loading import Loaded as LoadedDrafter
from outrider.client import Client
from outrider.ids import Mode, SessionId
from outrider.messages import SamplingParams
from outrider.model.toy import ToyLanguage, ToyRunner, ToyTokenizer
from outrider.model.vocabulary import HasVocabulary, vocabulary
from outrider.sampling import one_hot_row, probabilities, sparse_row
from tests.integration.cluster_bench import Bench, Running
from verify_service.app import VerifyApp
from verify_service.config import VerifySettings
from verify_service.loading import Loaded as LoadedTarget

SIZE = len(ToyTokenizer())
LANGUAGE = ToyLanguage(SIZE, 7, 2, 2.0)
"""The language of `cluster_bench`."""
VOCABULARY = vocabulary(ToyTokenizer())


# --- targets ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Script(ToyLanguage):
    """Says a fixed text behind the prompt, whatever it was told."""

    script: tuple[int, ...] = ()
    prompt_len: int = 0

    def probs(self, context: Sequence[int]) -> Tensor:
        """Return a one-hot law; the script starts again at its end."""
        law = torch.zeros(self.vocab_size, dtype=torch.float64)
        law[self.script[(len(context) - self.prompt_len) % len(self.script)]] = 1.0
        return law


@dataclass(frozen=True)
class Padded(ToyLanguage):
    """A language whose padding, behind the tokenizer's ids, has nearly all mass."""

    own: ToyLanguage = LANGUAGE

    def probs(self, context: Sequence[int]) -> Tensor:
        """Return the own law scaled down, and padding behind it."""
        law = torch.full((self.vocab_size,), 0.99 / (self.vocab_size - self.own.vocab_size), dtype=torch.float64)
        law[: self.own.vocab_size] = 0.01 * self.own.probs(context)
        return law


@dataclass(frozen=True)
class WrongAt(ToyLanguage):
    """Agrees with another language except at chosen positions, where its likeliest token is the next one."""

    own: ToyLanguage = LANGUAGE
    positions: frozenset[int] = frozenset()

    def probs(self, context: Sequence[int]) -> Tensor:
        """Return the other language's law, shifted by one id at the chosen positions."""
        law = self.own.probs(context)
        return law.roll(1) if len(context) in self.positions else law


# --- draft workers ------------------------------------------------------------------------------------------------


class Blind:
    """Proposes what a function says of the ids so far, whatever the parameters; rows, if wanted, are one-hot."""

    def __init__(self, says: Callable[[Sequence[int]], int]) -> None:
        self.info = DrafterInfo("blind", "", SIZE, 4096)
        self._says = says
        self._modes: dict[SessionId, Mode] = {}

    def open(self, session: DraftSession, ids: Sequence[int]) -> None:
        self._modes[session.session_id] = session.mode

    def plan(self, session_id: SessionId, ids: Sequence[int], count: int) -> Plan | None:
        return Plan(count)

    def draw(self, batch: Sequence[Work]) -> list[Outcome]:
        return [self._outcome(work) for work in batch]

    def _outcome(self, work: Work) -> Outcome:
        if not work.count:
            return Guessed()
        token = self._says(work.ids)
        rows = (one_hot_row(token),) if self._modes[work.session_id].needs_rows else ()
        return Guessed((token,), rows)

    def rewind(self, session_id: SessionId, length: int) -> None:
        pass

    def close(self, session_id: SessionId, keep: bool) -> None:
        self._modes.pop(session_id, None)


class OtherParameters(CausalLm):
    """Draws with parameters of its own instead of the request's, and reports the rows it drew from, or others."""

    def __init__(self, language: ToyLanguage, own: SamplingParams, *, lies: bool = False) -> None:
        super().__init__(ToyRunner(language), vocab_len=SIZE, kind="toy")
        self._language, self._own_parameters, self._lies = language, own, lies

    def open(self, session: DraftSession, ids: Sequence[int]) -> None:
        super().open(replace(session, sampling=self._own_parameters), ids)

    def draw(self, batch: Sequence[Work]) -> list[Outcome]:
        outcomes = super().draw(batch)
        return [self._told(work, outcome) for work, outcome in zip(batch, outcomes, strict=True)]

    def _told(self, work: Work, outcome: Outcome) -> Outcome:
        """Report the row of the request's parameters where lies are told."""
        if not self._lies or not isinstance(outcome, Guessed) or not outcome.rows:
            return outcome
        law = probabilities(self._language.probs(work.ids).log()[None], SamplingParams(), SIZE)[0]
        row = sparse_row(law)
        return replace(outcome, rows=(row,)) if outcome.token_ids[0] in row.token_ids else outcome


# --- putting them together ----------------------------------------------------------------------------------------


def language_drafter(language: ToyLanguage) -> CausalLm:
    """Return a drafter that speaks a language."""
    return CausalLm(ToyRunner(language), vocab_len=SIZE, kind="toy")


@asynccontextmanager
async def cluster(
    store_url: str,
    target: ToyLanguage = LANGUAGE,
    drafters: Collection[Drafter] = (),
    *,
    spoken: HasVocabulary | None = None,
    **settings: object,
) -> AsyncIterator[Client]:
    """Serve a target and drafters in this process.

    Args:
        store_url: of the session store.
        target: what the verifier speaks.
        drafters: one draft worker for each.
        spoken: tokenizer that the draft workers say they have; the verifier's unless given.
        **settings: of the orchestrator.
    """
    async with Bench(store_url) as bench:
        runner = ToyRunner(target)
        verifier = VerifyApp(VerifySettings(model="toy"), lambda *_: LoadedTarget(runner, VOCABULARY, ToyTokenizer()))
        workers: list[Running] = []
        for drafter in drafters:
            tokenizer = spoken or ToyTokenizer()
            loaded = LoadedDrafter(drafter, vocabulary(tokenizer), tokenizer=tokenizer)
            workers.append(await bench._run(DraftApp(DraftSettings(), lambda *_, loaded=loaded: loaded)))
        _, _, client = await bench.orchestrator([await bench._run(verifier)], workers, **settings)
        yield client
