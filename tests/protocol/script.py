"""Events and commands of the three machines as lines of a transcript."""

from collections.abc import Sequence

from draft_service import events as draft
from draft_service.window import FOREVER
from orchestrator import events as orch
from outrider.ids import Epoch, Generation
from outrider.messages import (
    DecodeAttach,
    DecodeProgress,
    DraftCommit,
    Pass,
    Proposal,
    ProposalHeader,
    RollbackHint,
    Speculation,
    Verdict,
)
from verify_service import events as verify


def event_line(event: object) -> str:
    """Say an event."""
    match event:
        case verify.Arrived():
            return f"{_message(event.message)} from {event.worker_id}"
        case verify.Judged():
            drawn = "" if event.drawn is None else f", drew {event.drawn}"
            return f"judged: {event.num_accepted} of {event.num_tested} accepted{drawn}"
        case verify.TimerExpired():
            return f"timer {event.number} runs out"
        case verify.StreamBroken():
            return f"Propose stream of {event.worker_id} broken"
        case verify.Scheduled() | draft.Scheduled():
            return "scheduled"
        case draft.Planned():
            return f"planned: {event.count} tokens" if event.count else f"planned: nothing before {event.until_len}"
        case draft.Drawn():
            return f"drawn: {_ids(event.token_ids)}"
        case orch.VerdictArrived():
            return f"verdict: {_verdict(event.verdict)}"
        case _:
            return _message(event) or _orchestrator_event(event)


def _orchestrator_event(event: object) -> str:
    match event:
        case orch.Started():
            return f"started on verifier {event.verifier_id} with drafter {event.drafter_id}"
        case orch.Logged():
            return f"logged up to {event.length}"
        case orch.DrafterLost():
            return f"drafter of {_generation(event.generation)} lost: {event.reason}"
        case orch.VerifierLost():
            return f"verifier of {_generation(event.opened)} lost: {event.reason}"
        case orch.DrafterChosen() | orch.VerifierChosen():
            return f"chosen: {event.worker_id}"
        case orch.Cancelled():
            return "cancelled by the client"
        case _:
            raise TypeError(f"no line for {event}")


def command_line(command: object) -> str:
    """Say a command."""
    match command:
        case verify.Test():
            return _test(command)
        case verify.Report():
            return f"report {_places(command.start, command.token_ids)}{_kinds(command.kinds)}, {_tail(command)}"
        case verify.Rewind() | draft.Rewind():
            return f"rewind to {command.length}"
        case verify.StartTimer():
            return f"start timer {command.number}: {command.kind}"
        case verify.Count() | draft.Count():
            return f"count {command.name}" + (f" {command.amount}" if command.amount > 1 else "")
        case draft.Begin():
            return f"ask the drafter for up to {command.count} tokens at {command.base_len}"
        case draft.Draw():
            return f"draw {command.count}"
        case draft.Send():
            return f"send {_message(command.message)}"
        case draft.AskFrom():
            return f"ask for the tokens from {command.position}"
        case _:
            return _orchestrator_command(command)


def _orchestrator_command(command: object) -> str:
    match command:
        case orch.OpenVerifier():
            return f"open verifier {command.worker_id}, {_generation(command.generation)}, limit {command.commit_limit}"
        case orch.OpenDrafter():
            return f"open drafter {command.worker_id}, {_epoch(command.epoch)}, {_speculation(command.speculation)}"
        case orch.TellVerifier() | orch.TellDrafter():
            whom = "verifier" if isinstance(command, orch.TellVerifier) else "drafter"
            said = command.message if isinstance(command, orch.TellVerifier) else command.commit
            return f"tell the {whom}: {_message(said)}"
        case orch.CloseDrafter():
            return f"close the drafter of {_generation(command.generation)}"
        case orch.ChooseDrafter() | orch.ChooseVerifier():
            role = "drafter" if isinstance(command, orch.ChooseDrafter) else "verifier"
            return f"choose a {role} other than {', '.join(sorted(command.exclude))}"
        case orch.AppendLog():
            return f"append {_places(command.start, command.token_ids)} to the log"
        case orch.Emit():
            return f"show {_places(command.chunk.start, command.chunk.token_ids)}"
        case _:
            return _plain_command(command)


def _plain_command(command: object) -> str:
    match command:
        case orch.Finish():
            return f"finish: {command.reason.name.lower()}"
        case orch.Count():
            return f"count {command.name}"
        case orch.CloseVerifier():
            return "close the verifier"
        case verify.Keep():
            return f"keep the path {_ids(command.path)}"
        case draft.Followed():
            return f"followed {command.families}"
        case _:
            raise TypeError(f"no line for {command}")


def _message(message: object) -> str:
    match message:
        case ProposalHeader():
            return f"header {message.count} tokens at {message.base_len}, {_epoch(message.epoch)}"
        case Proposal():
            places = _places(message.base_len, message.token_ids)
            return f"proposal {places}, {_epoch(message.epoch)}, seen {message.seen_len}, limit {message.limit}"
        case Pass():
            until = "for ever" if message.until_len == FOREVER else f"until {message.until_len}"
            return f"pass at {message.base_len} {until}, {_epoch(message.epoch)}"
        case DraftCommit():
            return f"commit {_places(message.start, message.token_ids)}, {_epoch(message.epoch)}"
        case RollbackHint():
            own = () if message.token_id is None else (message.token_id,)
            return f"hint {_places(message.start, own)}, {_epoch(message.epoch)}"
        case DecodeAttach():
            return f"attach {message.worker_id or 'nobody'}, {_generation(message.generation)}"
        case DecodeProgress():
            return f"limit {message.commit_limit}, {_speculation(message.speculation)}"
        case _:
            return ""


def _test(test: verify.Test) -> str:
    rows = "on the held row" if test.from_held else ""
    if test.feed:
        rows += f"{' and ' if rows else ''}feeding {_ids(test.feed)}"
    what = f"draw a {test.draw.name.lower()} token" if test.draw is not None else f"test {_ids(test.token_ids)}"
    return f"{what} at {test.base_len} {rows}"


def _verdict(verdict: Verdict) -> str:
    return f"{_places(verdict.start, verdict.token_ids)}, {_tail(verdict)}"


def _tail(verdict: Verdict | verify.Report) -> str:
    after = "" if verdict.next_epoch == verdict.epoch else f" -> {_epoch(verdict.next_epoch)}"
    return f"{verdict.cause}, {_epoch(verdict.epoch)}{after}"


def _kinds(kinds: Sequence[object]) -> str:
    return f" ({' '.join(str(getattr(kind, 'name', '')).lower() for kind in kinds)})" if kinds else ""


def _places(start: int, token_ids: Sequence[int]) -> str:
    return f"{_ids(token_ids)} at {start}" if token_ids else f"nothing at {start}"


def _ids(token_ids: Sequence[int]) -> str:
    return "[" + " ".join(map(str, token_ids)) + "]"


def _epoch(epoch: Epoch) -> str:
    return f"epoch {epoch.generation.attach}.{epoch.round}"


def _generation(generation: Generation) -> str:
    return f"generation {generation.attach}"


def _speculation(speculation: Speculation) -> str:
    return f"gamma {speculation.gamma}, window {speculation.window}"
