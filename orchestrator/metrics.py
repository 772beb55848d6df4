"""Prometheus metrics of an orchestrator, labels bound once. Ratios are queries; no session id is ever a label."""

from prometheus_client import Counter, Gauge, Histogram

from orchestrator.figures import Round
from outrider.ids import TokenKind
from outrider.messages import VerdictCause

MAX_POSITION = 32
"""Acceptance is counted per distance up to here."""
_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)

RUNNING = Gauge("outrider_num_requests_running", "Generations under way.")
GENERATIONS = Counter("outrider_generations_total", "Generations that ended, by outcome.", ["outcome"])
EVENTS = Counter("outrider_orchestrator_events_total", "Late messages, lost workers and the like.", ["event"])
MALFORMED = Counter("outrider_orchestrator_malformed_total", "Messages of peers that were dropped.", ["peer"])
OFF = Counter("outrider_speculation_off_total", "Times that speculation went off, by reason.", ["reason"])
FIRST_TOKEN_S = Histogram("outrider_time_to_first_token_seconds", "Request to first token.", buckets=_BUCKETS_S)
TOKEN_S = Histogram(
    "outrider_inter_token_latency_seconds", "Time between verdicts per committed token.", buckets=_BUCKETS_S
)
APPEND_S = Histogram("outrider_log_append_seconds", "Time of an append to the log.", buckets=_BUCKETS_S)

_TOKENS = Counter("outrider_committed_tokens_total", "Committed tokens, by kind.", ["kind"])
_ROUNDS = Counter("outrider_rounds_total", "Committed verdicts, by cause.", ["cause"])
_ROLLBACKS = Counter("outrider_rollbacks_total", "Epochs that ended with a rejection or a reset.")
_DRAFTS = Counter("outrider_spec_decode_num_drafts_total", "Verdicts that tested draft tokens.")
_TESTED = Counter("outrider_spec_decode_num_tested_tokens_total", "Draft tokens tested.")
_ACCEPTED = Counter("outrider_spec_decode_num_accepted_tokens_total", "Draft tokens accepted.")
_ACCEPTED_AT = Counter(
    "outrider_spec_decode_num_accepted_tokens_per_pos_total",
    "Tokens accepted, by place in the run.",
    ["position"],
)
DRAFTED = Counter("outrider_spec_decode_num_draft_tokens_total", "Draft tokens that drafters report.")

_token_children = {kind: _TOKENS.labels(kind.name.lower()) for kind in TokenKind}
_cause_children = {
    cause: _ROUNDS.labels(cause)
    for cause in (
        VerdictCause.ATTACHED,
        VerdictCause.TESTED,
        VerdictCause.PLAIN,
        VerdictCause.PATIENCE,
        VerdictCause.RESET,
        VerdictCause.QUARANTINED,
    )
}
_position_children = [_ACCEPTED_AT.labels(str(position)) for position in range(MAX_POSITION)]


def count_round(committed: Round) -> None:
    """Count a committed verdict."""
    _cause_children[committed.cause].inc()
    _ROLLBACKS.inc(committed.rolled_back)
    if committed.num_tested:
        _DRAFTS.inc()
        _TESTED.inc(committed.num_tested)
        _ACCEPTED.inc(committed.num_accepted)
        for position in range(min(committed.num_accepted, MAX_POSITION)):
            _position_children[position].inc()
    for kind in set(committed.kinds):
        _token_children[kind].inc(committed.kinds.count(kind))
