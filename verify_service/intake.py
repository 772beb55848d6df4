"""What becomes of a draft worker's message: pure functions of the message and of where the chain stands.

They decide whether a message continues the chain, came too late, twice or too early, or cannot come from an honest
drafter. They never look at a token except to see that it exists: what is tested must not depend on what was drawn.
"""

from dataclasses import dataclass
from enum import Enum, auto
from typing import assert_never

from outrider.ids import Epoch, Mode, WorkerId
from outrider.messages import Pass, Proposal, ProposalHeader, ProposeMessage
from outrider.sampling import row_problem
from outrider.verification.tree import Tree, families_problem, tree_problem

MAX_TREE_NODES = 64
"""Most tokens of a tree; its depth is bounded like the length of a run."""
MAX_AHEAD = 1024
"""Most tokens a chain may hold beyond the committed length, whatever a drafter claims."""


class Fate(Enum):
    """What becomes of a message."""

    TAKEN = auto()
    """It continues the chain."""
    PROLONGS = auto()
    """A pass of an epoch that ended in a plain token, as all since did: its drafter still has nothing."""
    PARKED = auto()
    """Its generation has not been announced yet."""
    STALE = auto()
    """Its epoch is over, or its worker is not the one attached."""
    DUPLICATE = auto()
    """The chain holds these positions already."""
    GAP = auto()
    """Something before it is missing, or it is not the body that was announced."""
    GARBAGE = auto()
    """No honest drafter sends it."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What a message is compared with."""

    epoch: Epoch
    worker_id: WorkerId | None
    mode: Mode
    vocab_len: int
    max_gamma: int
    """Most tokens of a proposal that the orchestrator has asked for so far."""
    chain_end: int
    """Position the next proposal must start at."""
    reported_len: int
    """Committed length that the drafter can have been told."""
    announced: int
    """Tokens that a header has announced; 0: none."""
    plain_since: Epoch
    """First epoch of the unbroken row of epochs that ended in plain tokens, the present one included."""
    announced_depth: int = 0
    """Depth of the tree that a header has announced; 0: it announced a run."""
    is_closed: bool = False
    """Whether the chain ends in a tree."""


def fate_of(message: ProposeMessage, worker_id: WorkerId, standing: Standing) -> Fate:
    """Sort a message by its epoch, then by its form, then by its place in the chain."""
    if message.epoch.generation > standing.epoch.generation:
        return Fate.PARKED
    if worker_id != standing.worker_id:
        return Fate.STALE
    if message.epoch < standing.epoch:
        return Fate.PROLONGS if _prolongs(message, standing) else Fate.STALE
    if message.epoch > standing.epoch or not _is_sound(message, standing):
        return Fate.GARBAGE
    if message.base_len < standing.chain_end:
        return Fate.DUPLICATE
    if standing.is_closed:
        return Fate.GARBAGE
    if message.base_len > standing.chain_end or not _fits_header(message, standing):
        return Fate.GAP
    return Fate.TAKEN


def _prolongs(message: ProposeMessage, standing: Standing) -> bool:
    """Whether a late message says of committed text alone that nothing will come for a while.

    A drafter learns of a plain token a round trip after the verifier has gone on. Were its answer worth nothing by
    then, text that it can do nothing with would wait for it again and again.
    """
    return isinstance(message, Pass) and message.epoch >= standing.plain_since and not standing.announced


def _is_sound(message: ProposeMessage, standing: Standing) -> bool:
    match message:
        case ProposalHeader():
            most = MAX_TREE_NODES if message.depth else standing.max_gamma
            return standing.mode.needs_rows and 0 < message.count <= most and message.depth <= standing.max_gamma
        case Pass():
            return message.until_len > message.base_len
        case Proposal():
            sound = _is_sound_tree if message.parents else _is_sound_run
            return _is_sound_proposal(message, standing) and sound(message, standing)
        case _:
            assert_never(message)


def _is_sound_proposal(proposal: Proposal, standing: Standing) -> bool:
    return (
        proposal.seen_len <= standing.reported_len
        and proposal.limit <= standing.reported_len + MAX_AHEAD
        and all(0 <= token < standing.vocab_len for token in proposal.token_ids)
    )


def _is_sound_run(proposal: Proposal, standing: Standing) -> bool:
    count = len(proposal.token_ids)
    return (
        0 < count <= standing.max_gamma
        and proposal.base_len + count <= proposal.limit
        and len(proposal.rows) == (count if standing.mode.needs_rows else 0)
        and not any(
            row_problem(row, token, standing.vocab_len)
            for row, token in zip(proposal.rows, proposal.token_ids, strict=False)
        )
    )


def _is_sound_tree(proposal: Proposal, standing: Standing) -> bool:
    """Whether a tree's parents, rows and siblings fit together; the block rule has no trees."""
    tree = Tree(proposal.token_ids, proposal.parents, proposal.rows)
    if standing.mode is Mode.BLOCK or not 0 < len(tree) <= MAX_TREE_NODES:
        return False
    if len(tree.parents) != len(tree) or tree_problem(tree.parents):
        return False
    families = tree.families.values()
    return (
        tree.depth <= standing.max_gamma
        and proposal.base_len + tree.depth <= proposal.limit
        and len(tree.rows) == (len(families) if standing.mode.needs_rows else 0)
        and not any(
            row_problem(row, tree.token_ids[children[0]], standing.vocab_len)
            for row, children in zip(tree.rows, families, strict=False)
        )
        and not families_problem(tree)
    )


def _fits_header(message: ProposeMessage, standing: Standing) -> bool:
    """Whether a body comes behind its header, and nothing else does: a count must not change once tokens are known."""
    if not standing.mode.needs_rows:
        return True
    if not isinstance(message, Proposal):
        return standing.announced == 0
    depth = Tree(message.token_ids, message.parents).depth
    return (standing.announced, standing.announced_depth) == (len(message.token_ids), depth)
