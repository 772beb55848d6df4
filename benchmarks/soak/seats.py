"""The clients of a soak: each plays one conversation after the other, in its own way every time."""

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.soak.hearing import Cut, Heard, difference
from benchmarks.soak.ledger import Ledger
from benchmarks.soak.script import Conversation, speculating
from outrider.client import Client
from outrider.errors import NotFound, OutriderError
from outrider.generation import GenerationRequest
from outrider.ids import FinishReason

CUTS = 0.3
"""Share of generations that their client leaves before the end."""
RETURNS = 0.5
"""Share of those that it comes back to."""

Twins = Mapping[tuple[int, int], Heard]
"""By number of the conversation and index of the turn."""


@dataclass(slots=True)
class Seat:
    """One client that is never without a generation, until it is time."""

    client: Client
    conversations: Sequence[Conversation]
    twins: Twins
    drafters: Sequence[str]
    """Kinds that may be asked for."""
    ledger: Ledger
    dice: random.Random
    until_s: float
    """On the monotonic clock."""
    _heard: Heard = field(default_factory=Heard)
    """The generation that was begun last."""

    async def run(self) -> None:
        """Play until it is time; what goes wrong is noted, and the next conversation is begun."""
        while time.monotonic() < self.until_s:
            conversation = self.dice.choice(self.conversations)
            self._heard = Heard()
            try:
                await self._play(conversation)
            except (OutriderError, RuntimeError) as error:
                self.ledger.blame(f"conversation {conversation.number} ({conversation.law}): {error!r}")
            await self._forget(self._heard)

    async def _play(self, conversation: Conversation) -> None:
        """Play the turns, up to one that is left."""
        for index, turn in enumerate(conversation.turns):
            request = speculating(turn, self.drafters, self.dice)
            if index:
                request = replace(request, session_id=self._heard.session_id)
                self.ledger.counts["second turns"] += 1
            heard = self._heard = Heard(session_id=request.session_id)
            await self._hear(request, heard)
            self.ledger.note(heard)
            self._compare(conversation, index, request, heard)
            if heard.reason not in (FinishReason.STOP, FinishReason.LENGTH):
                break

    async def _hear(self, request: GenerationRequest, heard: Heard) -> None:
        """Hear a generation, perhaps in two calls, perhaps not to its end."""
        cut = None
        if self.dice.random() < CUTS:
            cut = Cut(self.dice.randint(0, 30), self.dice.choice((0.02, 0.2, 1.0, 3.0, 8.0, 30.0)))
        if await heard.listen(self.client.generate(request), cut):
            return
        self.ledger.counts["left in the middle" if heard.token_ids else "left before the first token"] += 1
        if heard.prompt_len and self.dice.random() < RETURNS:
            self.ledger.counts["came back"] += 1
            await heard.listen(self.client.resume(heard.session_id, heard.next_position))

    def _compare(self, conversation: Conversation, index: int, request: GenerationRequest, heard: Heard) -> None:
        where = f"conversation {conversation.number}, turn {index + 1} ({conversation.law}, {request.speculation}, "
        where += f"{request.drafter or 'any drafter'}, {heard.calls} calls)"
        if heard.reason not in (None, FinishReason.STOP, FinishReason.LENGTH):
            self.ledger.blame(f"{where} ended as {heard.reason}")
        if len(heard.token_ids) > (request.max_tokens or 0):
            self.ledger.blame(f"{where}: {len(heard.token_ids)} tokens of {request.max_tokens}")
        if not conversation.has_twins:
            self.ledger.counts["texts without a twin"] += 1
            return
        how_far = "whole" if heard.finished else "up to where they were left"
        self.ledger.counts[f"texts compared, {how_far}"] += 1
        parting = difference(heard, self.twins[conversation.number, index])
        if parting:
            self.ledger.counts["texts that differ"] += 1
            self.ledger.blame(f"{where} differs: {parting}")

    async def _forget(self, heard: Heard) -> None:
        """Delete a session; one that was left before its first word has a name that nobody was told."""
        if not heard.session_id:
            return
        try:
            await self.client.delete(heard.session_id)
        except NotFound:
            self.ledger.blame(f"session {heard.session_id} was gone before it was deleted")
        except OutriderError as error:
            self.ledger.blame(f"session {heard.session_id} cannot be deleted: {error!r}")
