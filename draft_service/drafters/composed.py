"""Several drafters as one: the first that has something to offer makes the whole proposal.

The rule, in full: at the begin of a proposal the drafters are asked in their order, and the first that offers a token
draws all of it. Each answers from the ids before the proposal alone, so who draws, and how many, is settled before a
token of it is drawn. Those ids may be a chain that nobody has judged yet; they may decide, for they lie before the
proposal: whether a position is tested, with which row, depends on the tokens before it and never on the one at it.
Within a proposal the drafter does not change.

A drafter that was not asked falls behind, and catches up when it is asked again, in steps of its own size: then nobody
offers anything until it has, for the one behind it in the order may only speak after it has passed. All forget together
what is rewound.

A session may name one of them (`DraftSession.drafter`): then the others are not opened for it at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from draft_service.drafters.protocol import (
    Drafter,
    DrafterInfo,
    DraftSession,
    Failed,
    GrowsTrees,
    Guessed,
    Outcome,
    Plan,
    TakesFeatures,
    Work,
)
from draft_service.window import FOREVER
from outrider.errors import FailedPrecondition
from outrider.ids import SessionId
from outrider.messages import TargetFeatures


@dataclass(slots=True)
class _State:
    """One session: who may draft for it, and who does."""

    parts: list[Drafter]
    at_work: list[Drafter] = field(default_factory=list)
    """Who draws the proposal under way, or catches up before there can be one; empty: all catch up."""


class Composed:
    """The drafter of drafters; see the module's head."""

    def __init__(self, parts: Sequence[Drafter]) -> None:
        """Take over drafters.

        Args:
            parts: in the order in which they are asked, of one vocabulary, each kind once.

        Raises:
            ValueError: kinds or vocabularies contradict that, or two want the target's hidden states.
        """
        self._parts = list(parts)
        self.info = _joined([part.info for part in parts])
        self._states: dict[SessionId, _State] = {}

    def open(self, session: DraftSession, ids: Sequence[int]) -> None:
        """Open all drafters that the session allows.

        Raises:
            FailedPrecondition: it allows one that is not here.
        """
        parts = [part for part in self._parts if session.drafter in ("", self.info.kind, part.info.kind)]
        if not parts:
            raise FailedPrecondition(f"drafter {session.drafter!r} is not one of {', '.join(self.info.drafters)}")
        self._states[session.session_id] = _State(parts)
        for part in parts:
            part.open(session, ids)

    def plan(self, session_id: SessionId, ids: Sequence[int], count: int) -> Plan | None:
        """Ask one after the other; without an offer, the verifier is let go until one may have something."""
        state, until_len, reason = self._states[session_id], FOREVER, ""
        for part in state.parts:
            plan = part.plan(session_id, ids, count)
            if plan is None or plan.count:
                state.at_work = [part]
                return None if plan is None else replace(plan, drafter=part.info.kind)
            if plan.until_len <= until_len:
                until_len, reason = plan.until_len, plan.reason
        state.at_work = []
        return Plan(0, until_len, reason)

    def draw(self, batch: Sequence[Work]) -> list[Outcome]:
        """Give each drafter its share of the batch; one that fails takes nobody else's along.

        Raises:
            Exception: all drafters that had something to do failed.
        """
        outcomes: list[list[Outcome]] = [[] for _ in batch]
        errors, asked = list[Exception](), 0
        for part in self._parts:
            share = [index for index, work in enumerate(batch) if self._takes_part(part, work)]
            if not share:
                continue
            asked += 1
            try:
                found = part.draw([batch[index] for index in share])
            except Exception as error:  # told to the sessions of this part, or raised if there is no other
                errors.append(error)
                found = [Failed(error) for _ in share]
            for index, outcome in zip(share, found, strict=True):
                outcomes[index].append(outcome)
        if errors and len(errors) == asked:
            raise errors[0]
        return [_together(each) for each in outcomes]

    def rewind(self, session_id: SessionId, length: int) -> None:
        """Rewind all."""
        for part in self._states[session_id].parts:
            part.rewind(session_id, length)

    def close(self, session_id: SessionId, keep: bool) -> None:
        """Close all."""
        state = self._states.pop(session_id, None)
        for part in state.parts if state is not None else ():
            part.close(session_id, keep)

    def take_features(self, features: TargetFeatures) -> None:
        """Hand hidden states to the one that wants them, if it drafts for their session."""
        state = self._states.get(features.session_id)
        for part in state.parts if state is not None else ():
            if isinstance(part, TakesFeatures):
                part.take_features(features)

    def learn(self, session_id: SessionId, families: Sequence[tuple[int, int]]) -> None:
        """Let the one hear that has drawn the session's last proposal."""
        state = self._states.get(session_id)
        for part in state.at_work if state is not None else ():
            if isinstance(part, GrowsTrees):
                part.learn(session_id, families)

    def _takes_part(self, part: Drafter, work: Work) -> bool:
        """Whether a drafter has to do with a session's work: to draw it, or to catch up."""
        state = self._states[work.session_id]
        return part in (state.at_work or state.parts)


def _together(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the one outcome of a proposal, or what several have made of catching up."""
    if len(outcomes) == 1:
        return outcomes[0]
    failed = [outcome for outcome in outcomes if isinstance(outcome, Failed)]
    caught_up = all(isinstance(outcome, Guessed) and outcome.caught_up for outcome in outcomes)
    return failed[0] if failed else Guessed(caught_up=caught_up)


def _joined(infos: Sequence[DrafterInfo]) -> DrafterInfo:
    """Describe several drafters as one.

    Raises:
        ValueError: as `Composed.__init__`.
    """
    kinds = tuple(info.kind for info in infos)
    if not kinds or len(set(kinds)) < len(kinds):
        raise ValueError(f"{len(kinds)} drafters ({', '.join(kinds)}): must be one or more of different kinds")
    if len({info.vocab_len for info in infos}) > 1:
        raise ValueError(f"vocabularies of {', '.join(str(info.vocab_len) for info in infos)} ids: must be the same")
    wanting = [info for info in infos if info.feature_layers]
    if len(wanting) > 1:
        raise ValueError(f"{len(wanting)} drafters want the target's hidden states: at most one can have them")
    return DrafterInfo(
        kind=",".join(kinds),
        model=next((info.model for info in infos if info.model), ""),
        vocab_len=infos[0].vocab_len,
        context_len=max(info.context_len for info in infos),
        dtype=next((info.dtype for info in infos if info.dtype), ""),
        exactness="bitwise" if all(info.exactness == "bitwise" for info in infos) else "distribution",
        fingerprint=next((info.fingerprint for info in infos if info.fingerprint), ""),
        feature_layers=wanting[0].feature_layers if wanting else (),
        feature_size=wanting[0].feature_size if wanting else 0,
        drafters=kinds,
    )
