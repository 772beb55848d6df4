"""Protocol mistakes, planted: each is a real machine with one thing done wrong."""

from collections.abc import Sequence
from dataclasses import replace

from draft_service import events as draft
from draft_service.window import Window
from outrider.ids import Epoch
from outrider.messages import DecodeProgress, DraftCommit, Proposal
from verify_service import events as verify
from verify_service.chain import Chain
from verify_service.intake import Fate, fate_of


class DropsOnAGap(Chain):
    """Drops what does not continue the chain, and says nothing."""

    def _arrived(self, event: verify.Arrived, out: list[verify.Command]) -> None:
        if fate_of(event.message, event.worker_id, self._standing()) is not Fate.GAP:
            super()._arrived(event, out)


class DrawsABonusTooEarly(Chain):
    """Draws a bonus whenever everything that arrived is accepted."""

    def _nothing_follows(self) -> bool:
        return True


class ForgetsWhatWasSeen(Chain):
    """Draws a bonus at the chain's limit, though a commit that moves the limit is under way."""

    def _nothing_follows(self) -> bool:
        return self.committed_len == self._limit


class AcceptsByLength(Chain):
    """Takes what fits by position, whatever its epoch."""

    def _arrived(self, event: verify.Arrived, out: list[verify.Command]) -> None:
        message = replace(event.message, epoch=self.epoch)
        super()._arrived(replace(event, message=message), out)


class WaitsForADrafterThatKnowsNothing(Chain):
    """Waits at once when speculation is switched on again."""

    def _progress(self, event: DecodeProgress) -> None:
        super()._progress(event)
        self._plain_until = 0


class DropsGarbageOnly(Chain):
    """Drops a proposal longer than it knows of, and says nothing."""

    def _take_garbage(self, epoch: Epoch, out: list[verify.Command]) -> None:
        out.append(verify.Count("garbage"))


class KeepsTheChainOfALostStream(Chain):
    """Believes that a new stream carries on where the old one ended."""

    def _broken(self, event: verify.StreamBroken, out: list[verify.Command]) -> None:
        pass


class NumbersItsOwnEpochs(Window):
    """Counts a round of its own when it rolls back, as the verifier does, instead of taking the verifier's number."""

    def _restart(self, commit: DraftCommit, fresh: Sequence[int], out: list[draft.Command]) -> None:
        own = self.epoch
        super()._restart(commit, fresh, out)
        rolled_back = any(isinstance(command, draft.Rewind) for command in out)
        self.epoch = own.next_round() if rolled_back else own


class IgnoresTheEpochOfACommit(Window):
    """Goes on with its chain where a commit happens to agree with it."""

    def _restart(self, commit: DraftCommit, fresh: Sequence[int], out: list[draft.Command]) -> None:
        if fresh and self.ids[self.seen_len :][: len(fresh)] == list(fresh):
            self.seen_len += len(fresh)
        else:
            super()._restart(commit, fresh, out)


class ClaimsTooLowALimit(Window):
    """Says its limit is the window's, though the window shrank under the proposal."""

    def _proposal(self, draft: object) -> Proposal:
        return replace(super()._proposal(draft), limit=self.limit)  # type: ignore[arg-type]
