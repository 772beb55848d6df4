"""What an operator says about drafters while they run: which are detached, and how sessions are split. Pure.

A record with a field that this version does not know is refused, not read in part: it may say whom to leave out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Annotated, Self

from pydantic import ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError

from outrider.errors import InvalidRequest
from outrider.messages import WorkerDescription

MAX_NAMES = 64
MAX_NAME_CHARS = 256
MAX_WEIGHT = 1_000_000
STANDING = "drafter:"
"""Attributes of an orchestrator's description that begin so tell the standing of a sort of drafters, as JSON."""

Name = Annotated[str, StringConstraints(min_length=1, max_length=MAX_NAME_CHARS, pattern=r"^[^\x00-\x1f\x7f]+$")]
"""Id or label of a draft worker, or kind of drafter."""
Weight = Annotated[int, Field(ge=1, le=MAX_WEIGHT)]


@dataclass(frozen=True, slots=True)
class DrafterPolicy:
    """The record that all orchestrators of a cluster follow."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    detached: Annotated[tuple[Name, ...], Field(max_length=MAX_NAMES)] = ()
    """Sessions get no such drafter."""
    split: Annotated[tuple[tuple[Name, Weight], ...], Field(max_length=MAX_NAMES)] = ()
    """Names and weights by which sessions are assigned; empty: they are not."""

    def detach(self, name: str) -> Self:
        """Return the policy with a name more that is detached."""
        return replace(self, detached=tuple(sorted({*self.detached, name})))

    def attach(self, name: str) -> Self:
        """Return the policy without a detached name.

        Raises:
            InvalidRequest: it is not detached.
        """
        if name not in self.detached:
            raise InvalidRequest("name", name, f"one that is detached ({', '.join(self.detached) or 'none is'})")
        return replace(self, detached=tuple(each for each in self.detached if each != name))

    def divide(self, split: tuple[tuple[str, int], ...]) -> Self:
        """Return the policy with another split."""
        return replace(self, split=split)

    def why_detached(self, worker: WorkerDescription) -> str:
        """Return the detached name that a draft worker has, empty if none: its id, its label, or one of its kinds.

        A worker that composes several kinds goes with any of them.
        """
        return next((name for name in self.detached if name in names_of(worker)), "")

    def assigned(self, session_id: str) -> str:
        """Return the name that a session is assigned to, always the same one; empty without a split.

        The split's order counts: with other weights in the same order, no more sessions change sides than have to.
        """
        digest = blake2b(session_id.encode(), digest_size=8, person=b"outrider-split").digest()
        point = int.from_bytes(digest, "big") * sum(weight for _, weight in self.split) >> 64
        for name, weight in self.split:
            if point < weight:
                return name
            point -= weight
        return ""

    def rank(self, worker: WorkerDescription, session_id: str) -> int:
        """Return where a worker stands for a session: 0 if assigned to it, 1 if named in the split, 2 if in neither.

        Without a split, all are equal.
        """
        if not self.split or self.assigned(session_id) in names_of(worker):
            return 0
        return 1 if any(name in names_of(worker) for name, _ in self.split) else 2


_POLICIES = TypeAdapter(DrafterPolicy)


def names_of(worker: WorkerDescription) -> tuple[str, ...]:
    """Return what a draft worker can be called: its id, its label, its kind, and the kinds that it composes."""
    return (worker.worker_id, worker.label, worker.drafter, *worker.drafters)


def sort_of(worker: WorkerDescription) -> str:
    """Return what a draft worker is one of: its label, else its kind."""
    return worker.label or worker.drafter


def split_of(shares: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """Read shares such as `feature=80`.

    Raises:
        InvalidRequest: one has no number, or a name comes twice.
    """
    split = []
    for share in shares:
        name, _, weight = share.rpartition("=")
        if not name or not weight.isascii() or not weight.isdigit() or not 1 <= int(weight) <= MAX_WEIGHT:
            raise InvalidRequest("split", share, f"NAME=WEIGHT with a weight in 1 .. {MAX_WEIGHT}, as in feature=80")
        split.append((name, int(weight)))
    if len({name for name, _ in split}) < len(split):
        raise InvalidRequest("split", " ".join(shares), "each name once")
    return tuple(split)


def write_policy(policy: DrafterPolicy) -> bytes:
    """Return a policy as JSON.

    Raises:
        InvalidRequest: a name is no name, or there are too many.
    """
    raw = _POLICIES.dump_json(policy, exclude_defaults=True)
    read_policy(raw)
    return raw


def read_policy(raw: bytes) -> DrafterPolicy:
    """Undo `write_policy`.

    Raises:
        InvalidRequest: it is no JSON object, or a field is unknown or out of range.
    """
    try:
        return _POLICIES.validate_json(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, ("policy", *first["loc"])))
        raise InvalidRequest(where, first["input"], str(first["msg"])) from error
