"""What the draft worker counts. Ratios are queries; no label ever names a session."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

STEP_BUCKETS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


class DraftMetrics:
    """The worker's counters, in a registry of their own; safe to use from every thread."""

    def __init__(self) -> None:
        """Make a registry, with all counters at 0."""
        self.registry = CollectorRegistry()
        self.drafted = self._by_drafter("drafted_tokens", "Tokens drawn, by kind of drafter")
        self.discarded = self._counter("discarded_tokens", "Tokens drawn and then forgotten: rejected or stale")
        self.proposals = self._by_drafter("proposals", "Proposals handed to a Propose stream, by kind of drafter")
        self.late_commits = self._counter("late_commits", "Commits that changed nothing because they were late")
        self.dropped = self._counter("dropped_messages", "Messages not sent: no stream to the verifier, or it is full")
        self.hints = Counter(
            "outrider_draft_rollback_hints",
            "Rollback hints by fate: taken, late, odd, foreign; overruled counts one taken before that was not true",
            ["fate"],
            registry=self.registry,
        )
        self.features = Counter(
            "outrider_draft_features",
            "Positions whose hidden states came, by fate: taken, parked until their session opens, stale (of an older"
            " opening, or not from its verifier), overflow (no room to park them), unusable (of another target)",
            ["fate"],
            registry=self.registry,
        )
        self.malformed = self._counter("malformed_messages", "Messages of peers that the protocol forbids")
        self.passes = Counter(
            "outrider_draft_passes", "Turns without a proposal, by reason", ["reason"], registry=self.registry
        )
        self.failures = Counter(
            "outrider_draft_session_failures", "Sessions ended by an error, by cause", ["cause"], registry=self.registry
        )
        self.connects = Counter(
            "outrider_draft_propose_connects", "Propose streams, by result", ["result"], registry=self.registry
        )
        self.sessions = Gauge("outrider_draft_sessions", "Sessions open", registry=self.registry)
        self.outstanding_window = Gauge(
            "outrider_draft_outstanding_window_tokens",
            "Tokens that windows have room for and nobody has drawn yet: what more draft workers would be needed for",
            registry=self.registry,
        )
        self.degraded = Gauge("outrider_draft_degraded", "1 while the drafter does not answer", registry=self.registry)
        self.proposal_s = Histogram(
            "outrider_draft_time_seconds",
            "Drafting of a proposal, from its begin until it is sent",
            registry=self.registry,
            buckets=STEP_BUCKETS_S,
        )
        self.step_s = Histogram(
            "outrider_draft_step_seconds", "Duration of a token step", registry=self.registry, buckets=STEP_BUCKETS_S
        )

    def _by_drafter(self, name: str, text: str) -> Counter:
        return Counter(f"outrider_draft_{name}", text, ["drafter"], registry=self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"outrider_draft_{name}", text, registry=self.registry)
