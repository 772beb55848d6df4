"""What an orchestrator counts by worker stays bounded, however often workers come back under other names."""

import pytest

import orchestrator.metrics as metrics_module
from orchestrator.figures import Round
from orchestrator.metrics import Metrics
from outrider.ids import Epoch, TokenKind, WorkerId
from outrider.messages import VerdictCause

ROUND = Round(Epoch(), Epoch(), VerdictCause.TESTED, (TokenKind.ACCEPTED,), 1, 1, 0.01, 0.0)


def workers_in(metrics: Metrics) -> set[str]:
    return {
        sample.labels["worker"]
        for family in metrics.registry.collect()
        for sample in family.samples
        if "worker" in sample.labels
    }


def test_the_series_of_workers_heard_of_longest_ago_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "MAX_WORKERS", 2)
    metrics = Metrics()
    metrics.count_round(ROUND, 0, WorkerId("d1"))
    metrics.count_circuit(WorkerId("v1"), "open")
    metrics.count_round(ROUND, 0, WorkerId("d1"))
    assert workers_in(metrics) == {"d1", "v1"}
    metrics.count_circuit(WorkerId("v2"), "open")
    metrics.count_circuit(WorkerId("v2"), "closed")
    assert workers_in(metrics) == {"d1", "v2"}
    labels = {"worker": "d1"}
    assert metrics.registry.get_sample_value("outrider_worker_tested_tokens_total", labels) == 2
