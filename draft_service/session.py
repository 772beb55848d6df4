"""One session as the model thread sees it: its window, what is under way, and what was measured."""

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from draft_service.drafters.protocol import Work
from draft_service.events import Begin, Draw
from draft_service.window import Window
from outrider.ids import Generation, SessionId
from outrider.messages import DraftStatus

RECENT_TOKENS = 64
"""Token steps that the reported time is the median of."""


class SessionKey(NamedTuple):
    """Names one opening of a session on this worker."""

    session_id: SessionId
    generation: Generation


@dataclass(slots=True)
class Session:
    """State of one open session; touched by the model thread only."""

    key: SessionKey
    window: Window
    verifier_address: str
    drafter: str
    """Kind; of several, the one whose proposal was planned last."""
    ready: bool = False
    """Whether the drafter has caught up with the prompt once."""
    behind: bool = False
    """Whether the drafter may have something to compute ahead of its next guess."""
    begun_s: float = 0.0
    """When the proposal under way was begun."""
    planning: Begin | None = None
    """A proposal that waits for the drafter to catch up."""
    drawing: Draw | None = None
    """A proposal being drawn, with the tokens it still lacks."""
    num_drafted: int = 0
    num_discarded: int = 0
    reported_at_s: float = 0.0
    num_reported: int = 0
    """Of `num_drafted`, as last reported."""
    _token_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_TOKENS))

    @property
    def wants_work(self) -> bool:
        """Whether a token step would do something for this session."""
        catches_up = self.planning is not None or self.behind or not self.ready
        return self.drawing is not None or catches_up or self.window.wants_time

    @property
    def work(self) -> Work | None:
        """Its share of the next token step; None if it has none."""
        window = self.window
        if self.drawing is not None:
            return Work(self.key.session_id, window.epoch, window.ids, self.drawing.count, self.drawing.parents)
        if self.planning is not None or self.behind or not self.ready:
            return Work(self.key.session_id, window.epoch, window.ids, 0)
        return None

    def drop_stale(self) -> None:
        """Forget work for a proposal that the window has given up."""
        if self.planning is not None and self.planning.ticket != self.window.ticket:
            self.planning = None
        if self.drawing is not None and self.drawing.ticket != self.window.ticket:
            self.drawing = None

    def drew(self, num: int, step_s: float) -> None:
        """Note that a token step of `step_s` seconds, shared with others, gave this session `num` tokens."""
        self.num_drafted += num
        self._token_s.append(step_s / num)

    def grew(self, num: int, step_s: float) -> None:
        """Note that a token step of a tree took so long: for as much a run would have got one token further.

        Args:
            num: tokens of the tree, all of them in its last step, 0 in the others.
            step_s: of the step.
        """
        self.num_drafted += num
        self._token_s.append(step_s)

    def status(self, missing_from: int = -1) -> DraftStatus:
        """Return what was measured so far."""
        return DraftStatus(
            ready=self.ready,
            draft_s_per_token=median(self._token_s) if self._token_s else 0.0,
            num_drafted=self.num_drafted,
            num_discarded=self.num_discarded,
            drafter=self.drafter,
            missing_from=missing_from,
        )
