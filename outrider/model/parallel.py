"""One model over several processes: the leader plans passes and tells the others, which run the same ones in step.

`transformers` splits the weights (`tp_plan="auto"`): each process, a *rank*, has its share of the heads, and joins the
others inside the layers. Rank 0 leads: it alone knows sessions, slots and the network. What the others need is little,
since a pass is a shape and a list of numbers (`docs/decisions/passes-as-numbers.md`): they write the same tokens into
the same rows of a pool of their own heads.

A rank that is lost takes the group with it: no pass can succeed any more, `RunnerBroken` ends the leader's engine, and
the process that waits for orders ends with the same error. Groups are made anew by starting all of them.
"""

import logging
import os
import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias, cast

import torch
from torch import distributed as dist

from outrider.errors import InvalidRequest
from outrider.model.decoders import PassOutput
from outrider.model.planning import PassShape
from outrider.model.recording import Passes
from outrider.model.runner import RunnerBroken

log = logging.getLogger(__name__)

IDLE = timedelta(days=365)
"""How long a rank waits for orders: its leader may have nothing to do for a long time."""


@dataclass(frozen=True, slots=True)
class RunPass:
    """Run a pass."""

    shape: PassShape
    numbers: list[int]


@dataclass(frozen=True, slots=True)
class CopyBlock:
    """Copy a block of the pool."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class MoveRows:
    """Copy rows of the pool."""

    sources: list[int]
    targets: list[int]


@dataclass(frozen=True, slots=True)
class Dismissed:
    """The leader stops."""


Order: TypeAlias = RunPass | CopyBlock | MoveRows | Dismissed


class Ranks:
    """The processes of one model, from one of them."""

    def __init__(self, rank: int, size: int, orders: dist.ProcessGroup) -> None:
        self.rank, self.size, self._orders = rank, size, orders

    @property
    def leads(self) -> bool:
        """Whether this is the one that serves."""
        return self.rank == 0

    def tell(self, order: Order) -> None:
        """Tell all others; blocks until they have heard.

        Raises:
            RunnerBroken: one of them is gone.
        """
        self._share(order)

    def hear(self) -> Order:
        """Wait for an order.

        Raises:
            RunnerBroken: the leader is gone.
        """
        return cast(Order, self._share(None))

    def agree(self, value: int) -> int:
        """Return the leader's value, on all ranks; each calls it once.

        Raises:
            RunnerBroken: one of them is gone.
        """
        return cast(int, self._share(value if self.leads else None))

    def wait(self) -> None:
        """Wait until all ranks are here.

        Raises:
            RunnerBroken: one of them is gone.
        """
        try:
            dist.barrier(self._orders)
        except RuntimeError as error:
            raise RunnerBroken(f"rank {self.rank} of {self.size} has lost another one: {error}") from error

    def dismiss(self, timeout_s: float = 2.0) -> None:
        """Let the others go, if they are still there; nothing may be told afterwards.

        Args:
            timeout_s: how long one that does not listen is waited for.
        """
        telling = threading.Thread(target=self._dismiss, name="dismissing", daemon=True)
        telling.start()
        telling.join(timeout_s)

    def _dismiss(self) -> None:
        try:
            self.tell(Dismissed())
        except RunnerBroken as error:
            log.warning("the other ranks were not dismissed: %s", error)

    def _share(self, value: object) -> object:
        held = [value]
        try:
            dist.broadcast_object_list(held, src=0, group=self._orders)
        except RuntimeError as error:
            raise RunnerBroken(f"rank {self.rank} of {self.size} has lost another one: {error}") from error
        return held[0]


def own_rank(size: int) -> int:
    """Return which rank this process is, as `torchrun` says.

    Raises:
        InvalidRequest: `torchrun` started another number of processes.
    """
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != size:
        how = f"started with torchrun --nproc-per-node {size}" if size > 1 else "the number of processes of torchrun"
        raise InvalidRequest("tensor_parallel", size, f"{started}, {how}")
    return int(os.environ.get("RANK", "0")) if size > 1 else 0


def join(size: int, device: str, pass_timeout_s: float) -> Ranks:
    """Meet the other ranks; blocks until all are there.

    Args:
        size: of the group, as `torchrun` was told.
        device: of the model, "cpu" or "cuda".
        pass_timeout_s: longest that a rank waits for the others inside a pass.

    Raises:
        InvalidRequest: there are more or fewer.
        RunnerBroken: they did not come.
    """
    rank = own_rank(size)
    backend = "gloo"
    if device.startswith("cuda"):
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cpu:gloo,cuda:nccl"
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=pass_timeout_s))
        orders = dist.new_group(backend="gloo", timeout=IDLE)
    except (RuntimeError, ValueError) as error:
        raise RunnerBroken(f"rank {rank} of {size} did not meet the others: {error}") from error
    if orders is None:
        raise RunnerBroken(f"rank {rank} is in no group")
    return Ranks(rank, size, orders)


class LeadingPasses:
    """Runs passes together with the other ranks; see `Passes`."""

    def __init__(self, own: Passes, ranks: Ranks) -> None:
        self._own, self._ranks = own, ranks

    def run(self, shape: PassShape, numbers: list[int]) -> PassOutput | None:
        """Run a pass.

        Raises:
            RunnerBroken: it failed here or elsewhere; the ranks are not in step any more.
        """
        self._ranks.tell(RunPass(shape, numbers))
        return self.together(self._own, shape, numbers)

    @staticmethod
    def together(own: Passes, shape: PassShape, numbers: list[int]) -> PassOutput | None:
        """Run a pass that all ranks run now.

        Raises:
            RunnerBroken: it failed.
        """
        try:
            return own.run(shape, numbers)
        except Exception as error:
            raise RunnerBroken(f"a pass over several ranks failed: {error}") from error
