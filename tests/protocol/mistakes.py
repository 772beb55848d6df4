"""Protocol mistakes, planted: each is a real machine with one thing done wrong."""

from collections.abc import Sequence
from dataclasses import replace

from draft_service import events as draft
from draft_service.window import Window
from outrider.ids import Epoch
from outrider.messages import DecodeProgress, DraftCommit, Proposal, RollbackHint
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
        return self.committed_len == self._waiting.limit


class AcceptsByLength(Chain):
    """Takes what fits by position, whatever its epoch."""

    def _arrived(self, event: verify.Arrived, out: list[verify.Command]) -> None:
        message = replace(event.message, epoch=self.epoch)
        super()._arrived(replace(event, message=message), out)


class WaitsForADrafterThatKnowsNothing(Chain):
    """Waits at once when speculation is switched on again."""

    def _progress(self, event: DecodeProgress) -> None:
        super()._progress(event)
        self._patience.plain_until = 0


class DropsGarbageOnly(Chain):
    """Drops a proposal longer than it knows of, and says nothing."""

    def _blame(self, name: str, out: list[verify.Command], *, resets: bool = True) -> None:
        if name == "garbage":
            out.append(verify.Count(name))
        else:
            super()._blame(name, out, resets=resets)


class KeepsTheChainOfALostStream(Chain):
    """Believes that a new stream carries on where the old one ended."""

    def _broken(self, event: verify.StreamBroken, out: list[verify.Command]) -> None:
        pass


class NumbersItsOwnEpochs(Window):
    """Counts a round of its own when it rolls back, as the verifier does, instead of taking the verifier's number."""

    def _restart(self, epoch: Epoch, length: int, fresh: Sequence[int], out: list[draft.Command]) -> None:
        own = self.epoch
        super()._restart(epoch, length, fresh, out)
        rolled_back = any(isinstance(command, draft.Rewind) for command in out)
        self.epoch = own.next_round() if rolled_back else own


class IgnoresTheEpochOfACommit(Window):
    """Goes on with its chain where a commit happens to agree with it."""

    def _restart(self, epoch: Epoch, length: int, fresh: Sequence[int], out: list[draft.Command]) -> None:
        if fresh and self.ids[length:][: len(fresh)] == list(fresh):
            self.seen_len += len(fresh)
        else:
            super()._restart(epoch, length, fresh, out)


class ClaimsTooLowALimit(Window):
    """Says its limit is the window's, though the window shrank under the proposal."""

    def _proposal(self, draft: object) -> Proposal:
        return replace(super()._proposal(draft), limit=self.limit)  # type: ignore[arg-type]


class WidensOnAConfirmation(Window):
    """Takes a wider window with a commit that says nothing new, though its chain stands at its limit."""

    def _confirm(self, commit: DraftCommit, fresh: Sequence[int], out: list[draft.Command]) -> None:
        super()._confirm(commit, fresh, out)
        self.speculation = commit.speculation


class DraftsAgainOnAConfirmation(Window):
    """Starts the chain once more when the commit that it was hinted arrives."""

    def _confirm(self, commit: DraftCommit, fresh: Sequence[int], out: list[draft.Command]) -> None:
        super()._confirm(commit, fresh, out)
        if commit.end == self.seen_len:
            self._restart(self.epoch, self.seen_len, (), out)


class TakesHintsOverAGap(Window):
    """Believes that it knows the text up to any hint of a later round."""

    def _hinted(self, hint: RollbackHint, out: list[draft.Command]) -> None:
        if hint.epoch > self.epoch and self.seen_len <= hint.start <= len(self.ids):
            self.epoch = replace(hint.epoch, round=hint.epoch.round - 1)
        super()._hinted(hint, out)


class TakesLateHints(Window):
    """Goes back to where a hint says, though it has been there."""

    def _hinted(self, hint: RollbackHint, out: list[draft.Command]) -> None:
        if hint.epoch == self.epoch:
            self._restart(hint.epoch, hint.start, () if hint.token_id is None else (hint.token_id,), out)
        else:
            super()._hinted(hint, out)


class TakesHintsOfAnyGeneration(Window):
    """Looks at the round of a hint alone."""

    def _hinted(self, hint: RollbackHint, out: list[draft.Command]) -> None:
        super()._hinted(replace(hint, epoch=replace(self.epoch, round=hint.epoch.round)), out)


class StaysSilentAfterAHint(Window):
    """Takes a hint for the end of an epoch, but not for the end of its own silence."""

    def _hinted(self, hint: RollbackHint, out: list[draft.Command]) -> None:
        passed = self._passed
        super()._hinted(hint, out)
        self._passed = passed


class TakesAConfirmationForALateCommit(Window):
    """Ignores what a commit says about epochs that hints have ended already, the window included."""

    def _committed(self, commit: DraftCommit, out: list[draft.Command]) -> None:
        if commit.epoch > self.epoch or commit.end > self.seen_len:
            super()._committed(commit, out)
