"""Messages in a few words, for traces of the search."""

from typing import Any

from orchestrator import events as orch
from outrider.messages import Pass, Proposal, ProposalHeader, RollbackHint, Verdict
from verify_service import events as verify


def say(value: Any) -> str:
    """Say a message in a few words."""
    match value:
        case orch.VerdictArrived(verdict=Verdict() as said):
            return f"verdict {said.start}+{list(said.token_ids)} {said.cause}, round {said.next_epoch.round}"
        case verify.Arrived(message=Proposal() as said):
            return f"proposal {said.base_len}+{list(said.token_ids)}, round {said.epoch.round}"
        case verify.Arrived(message=ProposalHeader() as said):
            return f"header {said.base_len}+{said.count}, round {said.epoch.round}"
        case verify.Arrived(message=Pass() as said):
            return f"pass {said.base_len}..{said.until_len}, round {said.epoch.round}"
        case RollbackHint():
            token = "reset" if value.token_id is None else f"[{value.token_id}]"
            return f"hint {value.start}+{token}, round {value.epoch.round}"
        case orch.TellDrafter(commit=said):
            return f"commit {said.start}+{list(said.token_ids)}, round {said.epoch.round}"
        case orch.TellVerifier():
            return type(value.message).__name__
        case _:
            return type(value).__name__
