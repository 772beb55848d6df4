"""Guesses with heads on the target's last hidden state: a few tokens at once, independent of each other.

Head k reads the feature of position t and the embedding of the token at t + 1, and gives the law of token t + 2 + k.
So a proposal right behind the committed text takes as many tokens as there are heads, one that continues a chain only
those that are left, and none is offered without a feature near enough: the verifier then decodes a token, and sends
one.

Which feature a proposal is drawn from is settled when it is planned. No head sees a token of the proposal, and the
count depends on positions alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from draft_service.drafters.features import Features
from draft_service.drafters.growing import Growth, ModeShapes, grow
from draft_service.drafters.products import joining, product
from draft_service.drafters.protocol import DrafterInfo, DraftSession, Failed, Guessed, Outcome, Plan, Work
from draft_service.drafters.sampling import Penalised, Ranked, guess_ranked
from draft_service.window import FOREVER
from outrider.drafting.medusa import MedusaHeads
from outrider.ids import SessionId
from outrider.messages import SparseRow, TargetFeatures
from outrider.shape import Shape

_MIN_ROWS = 2
"""Rows of a product at least: one alone may come out with other bits than one among others."""


@dataclass(slots=True)
class _State:
    """One open session."""

    session: DraftSession
    features: Features
    penalised: Penalised
    source: int = -1
    """Position whose feature the planned proposal is drawn from."""


class MedusaNet:
    """The heads at work: all laws that follow from one feature."""

    def __init__(self, heads: MedusaHeads, embedding: Tensor, dtype: torch.dtype) -> None:
        """Pack the weights.

        Args:
            heads: the network; not changed.
            embedding: [vocab_size, hidden_size], the target's.
            dtype: that is computed in.
        """
        self.num_heads, self.hidden_size, self.dtype = heads.shape.num_medusa_heads, heads.shape.hidden_size, dtype
        self._embedding = embedding.to(dtype)
        self._join = joining(heads, dtype)
        blocks = cast(Sequence[nn.Linear], heads.blocks)
        self._blocks = product(
            torch.cat([block.weight for block in blocks]), dtype, torch.cat([block.bias for block in blocks])
        )
        self._norm = heads.norm_out.to(dtype)
        self._head = product(heads.head.weight, dtype)

    def logits(self, token_id: int, feature: Tensor, first: int, count: int) -> Tensor:
        """Return what heads say of one place.

        Args:
            token_id: the token behind the feature's position.
            feature: [hidden_size]
            first: the first head that is asked.
            count: how many are.

        Returns:
            [count, draft_vocab_size] float32.
        """
        with torch.inference_mode():
            inputs = torch.cat((self._embedding[token_id], feature)).expand(_MIN_ROWS, -1).contiguous()
            joined = self._join(inputs)[:1]
            blocks = self._blocks(joined.expand(_MIN_ROWS, -1).contiguous())[0].view(self.num_heads, -1)
            guesses = self._norm(joined + nn.functional.silu(blocks))
            # All heads in one product of one size, so that a row never depends on how many were asked.
            return self._head(guesses)[first : first + count].float()


class Medusa:
    """The drafter; see the module's head."""

    def __init__(self, net: MedusaNet, ranked: Ranked, info: DrafterInfo, *, tree_nodes: int = 0) -> None:
        """Take over the heads.

        Args:
            net: the heads.
            ranked: the ids that they know.
            info: describes the drafter; asks for the last layer.
            tree_nodes: most tokens of a tree; 0 guesses runs.
        """
        self.info = info
        self._shapes = ModeShapes(tree_nodes)
        self._net, self._ranked = net, ranked
        self._states: dict[SessionId, _State] = {}

    def open(self, session: DraftSession, ids: Sequence[int]) -> None:
        """Begin a session; its features are still to come."""
        features = Features(self._net.hidden_size, self._net.dtype, self.info.context_len)
        self._states[session.session_id] = _State(session, features, Penalised(session.prompt_len, session.grammar))

    def plan(self, session_id: SessionId, ids: Sequence[int], count: int) -> Plan:
        """Offer as many tokens as heads reach from the nearest feature; none where no feature is near."""
        state = self._states[session_id]
        if self._ranked.is_mute(state.session.sampling):
            return Plan(0, FOREVER, "all_banned")
        room = self.info.context_len - len(ids)
        if room <= 0:
            return Plan(0, FOREVER, "context_full")
        source = self._nearest(state, len(ids) - 2)
        if source is None:
            return Plan(0, len(ids) + 1, "no_feature")
        state.source = source
        depth = min(count, room, source + 2 + self._net.num_heads - len(ids))
        parents = self._shapes.parents(state.session.mode, depth)
        return Plan(len(parents) or depth, parents=parents)

    def learn(self, session_id: SessionId, families: Sequence[tuple[int, int]]) -> None:
        """Let the shapes of later trees know; see `GrowsTrees`."""
        state = self._states.get(session_id)
        if state is not None:
            self._shapes.learn(state.session.mode, families)

    def draw(self, batch: Sequence[Work]) -> list[Outcome]:
        """Draw whole proposals at once."""
        return [self._drawn(self._states[work.session_id], work) for work in batch]

    def rewind(self, session_id: SessionId, length: int) -> None:
        """Count again what was said; features are those of committed tokens, and stay."""
        self._states[session_id].penalised.rewind(length)

    def close(self, session_id: SessionId, keep: bool) -> None:
        """Forget the session."""
        self._states.pop(session_id, None)

    def take_features(self, features: TargetFeatures) -> None:
        """Keep the latest features.

        Raises:
            ValueError: they are those of another target.
        """
        state = self._states.get(features.session_id)
        if state is not None:
            state.features.take(features)

    def _nearest(self, state: _State, position: int) -> int | None:
        """Return the last position up to this one that has a feature and a head left for what follows."""
        for source in range(position, max(-1, position - self._net.num_heads), -1):
            if state.features.get(source) is not None:
                return source
        return None

    def _drawn(self, state: _State, work: Work) -> Outcome:
        feature = state.features.get(state.source)
        if not work.count or feature is None:
            return Guessed()
        try:
            return self._draw(state, work, feature)
        except Exception as error:  # one session's row or parameters must not take the others along
            return Failed(error)

    def _draw(self, state: _State, work: Work, feature: Tensor) -> Guessed:
        start, first = len(work.ids), len(work.ids) - state.source - 2
        if work.parents:
            return self._grow(state, work, feature, first)
        logits = self._net.logits(work.ids[state.source + 1], feature, first, work.count)
        tokens: list[int] = []
        rows: list[SparseRow] = []
        for position, law in enumerate(torch.split(logits, 1), start):
            # No head sees a draft, but penalties count those before a token, as the target's do.
            history = None
            if state.session.sampling.uses_history:
                history = state.penalised.at([*work.ids, *tokens])
            guessed = guess_ranked(law, self._ranked, state.session, position, work.epoch, history)
            tokens += guessed.token_ids
            rows += guessed.rows
        return Guessed(tuple(tokens), tuple(rows))

    def _grow(self, state: _State, work: Work, feature: Tensor, first: int) -> Guessed:
        """Draw a whole tree: all nodes of one depth have the law of one head."""
        growth, guessed = Growth(work.epoch, len(work.ids), work.parents), Guessed()
        depth = len(Shape(work.parents).levels)
        logits = self._net.logits(work.ids[state.source + 1], feature, first, depth)
        history = state.penalised.at(work.ids) if state.session.sampling.uses_history else None
        for law in torch.split(logits, 1):
            wide = self._ranked.widened(law).expand(len(growth.level), -1)
            guessed = grow(state.session, growth, wide, history)
        return guessed
