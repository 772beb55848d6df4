"""A draft worker driven step by step on the test's own thread, with a verifier's and an orchestrator's part played."""

from collections.abc import Sequence
from typing import Any, TypeVar

from draft_service.drafters.protocol import Drafter
from draft_service.metrics import DraftMetrics
from draft_service.orders import Closed, CloseSession, Died, OpenSession, Outgoing, Report, Reported, TakeCommit
from draft_service.session import SessionKey
from draft_service.worker import DraftWorker
from outrider.ids import Epoch, Generation, Mode, SessionId, WorkerId
from outrider.messages import (
    DraftCommit,
    DraftOpen,
    DraftStatus,
    Pass,
    Proposal,
    ProposalHeader,
    ProposeMessage,
    SamplingParams,
    Speculation,
)

KEY = bytes(range(16))
GENERATION = Generation(1, 1)
ADDRESS = "verifier:1"
ReportT = TypeVar("ReportT", Outgoing, Reported, Closed, Died)
MessageT = TypeVar("MessageT", Proposal, ProposalHeader, Pass)


def sequential(gamma: int) -> Speculation:
    return Speculation(gamma, gamma, gamma)


def opening(
    name: str,
    ids: Sequence[int],
    speculation: Speculation,
    mode: Mode = Mode.GREEDY,
    generation: Generation = GENERATION,
    **fields: Any,
) -> DraftOpen:
    sampling = SamplingParams(temperature=0.0 if mode is Mode.GREEDY else 1.0)
    key = b"" if mode is Mode.GREEDY else KEY
    return DraftOpen(
        SessionId(name), Epoch(generation), tuple(ids), mode, sampling, key, speculation,
        WorkerId("v"), ADDRESS, prompt_len=fields.pop("prompt_len", len(ids)), **fields,
    )  # fmt: skip


class Desk:
    """A worker and everything it reported."""

    def __init__(self, drafter: Drafter) -> None:
        self.metrics = DraftMetrics()
        self.reports: list[Report] = []
        self.now_s = 0.0
        self.worker = DraftWorker(drafter, self.reports.extend, self.metrics, lambda: self.now_s)

    def open(self, opened: DraftOpen) -> SessionKey:
        order = OpenSession(opened)
        self.worker.handle(order)
        return order.key

    def commit(
        self,
        key: SessionKey,
        start: int,
        token_ids: Sequence[int],
        number: int,
        speculation: Speculation,
    ) -> None:
        """Commit tokens; the epoch from now on has this number."""
        self.worker.handle(
            TakeCommit(key, DraftCommit(Epoch(key.generation, number), start, tuple(token_ids), speculation))
        )

    def close(self, key: SessionKey, keep_kv: bool = True) -> None:
        self.worker.handle(CloseSession(key, keep_kv))

    def run(self, steps: int = 200) -> None:
        """Step until there is nothing to do."""
        for _ in range(steps):
            if not self.worker.has_work:
                return
            self.worker.step()
        raise AssertionError(f"still working after {steps} steps")

    def take(self, kind: type[ReportT]) -> list[ReportT]:
        """Return, and forget, the reports of a kind."""
        found: list[ReportT] = [report for report in self.reports if isinstance(report, kind)]
        self.reports[:] = [report for report in self.reports if not isinstance(report, kind)]
        return found

    def messages(self) -> list[ProposeMessage]:
        """Return, and forget, everything that was sent to verifiers."""
        return [report.message for report in self.take(Outgoing)]

    def sent(self, kind: type[MessageT], name: str = "s") -> list[MessageT]:
        """Return, and forget, what was sent to verifiers: the messages of one kind and session."""
        return [m for m in self.messages() if isinstance(m, kind) and m.session_id == name]

    def statuses(self) -> list[DraftStatus]:
        return [report.status for report in self.take(Reported)]

    def deaths(self) -> dict[str, Exception]:
        return {report.key.session_id: report.error for report in self.take(Died)}

    def counted(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"outrider_draft_{name}_total", labels) or 0.0
