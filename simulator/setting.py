"""What is simulated: how many of everything, who asks for what, and what happens on the way. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from orchestrator.tuning import Limits
from outrider.errors import InvalidRequest
from outrider.generation import SpeculationChoice
from simulator.costs import Costs

MOST_SESSIONS = 1_000_000
MOST_WORKERS = 10_000
MOST_TOKENS = 1_000_000
MOST_ZONES = 100
MOST_SECONDS = 1_000_000.0
ROLES = ("verifier", "draft", "orchestrator")


@dataclass(frozen=True, slots=True)
class Load:
    """Who asks for what."""

    sessions: int = 8
    """At once."""
    prompt: int = 256
    """Tokens of each prompt."""
    tokens: int = 128
    """Tokens of each answer."""
    turns: int = 0
    """Generations of each client, one after the other, each a new session; 0: as many as time allows."""
    alphas: tuple[float, ...] = (0.7,)
    """Rates at which drafts agree with the target; sessions have them in turn."""
    choice: SpeculationChoice = field(default_factory=SpeculationChoice)
    """What each request says of speculation."""

    def __post_init__(self) -> None:
        """Check ranges.

        Raises:
            InvalidRequest: a figure is out of its range.
        """
        _require("sessions", self.sessions, 1, MOST_SESSIONS)
        _require("prompt", self.prompt, 3, MOST_TOKENS)
        _require("tokens", self.tokens, 1, MOST_TOKENS)
        _require("turns", self.turns, 0, MOST_TOKENS)
        if not self.alphas:
            raise InvalidRequest("alpha", "", "at least one rate from 0 to 1")
        for alpha in self.alphas:
            _require("alpha", alpha, 0, 1)


@dataclass(frozen=True, slots=True)
class Fleet:
    """How many workers there are, and how much each holds."""

    verifiers: int = 1
    drafts: int = 1
    orchestrators: int = 1
    zones: int = 1
    """Workers of each role are spread over them in turn."""
    verifier_sessions: int = 64
    """Sessions that a verifier runs at once."""
    draft_sessions: int = 64
    """Sessions that a draft worker serves at once."""
    kv_tokens: int = 0
    """Tokens of KV that a verifier holds; 0: enough for all its sessions."""

    def __post_init__(self) -> None:
        """Check ranges.

        Raises:
            InvalidRequest: a figure is out of its range.
        """
        _require("verifiers", self.verifiers, 1, MOST_WORKERS)
        _require("drafts", self.drafts, 0, MOST_WORKERS)
        _require("orchestrators", self.orchestrators, 1, MOST_WORKERS)
        _require("zones", self.zones, 1, MOST_ZONES)
        _require("verifier_sessions", self.verifier_sessions, 1, MOST_SESSIONS)
        _require("draft_sessions", self.draft_sessions, 1, MOST_SESSIONS)
        _require("kv_tokens", self.kv_tokens, 0, 1 << 40)

    def count(self, role: str) -> int:
        """Return how many there are of a role."""
        return {"verifier": self.verifiers, "draft": self.drafts, "orchestrator": self.orchestrators}[role]


@dataclass(frozen=True, slots=True)
class ZoneLoss:
    """Everything in one zone stops at once."""

    zone: int
    at_s: float
    """Simulated seconds."""
    detect_s: float = 1.0
    """Until those who talked to it notice: at once where processes end, 10 to 15 s where a network falls silent."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One simulation."""

    costs: Costs
    load: Load = field(default_factory=Load)
    fleet: Fleet = field(default_factory=Fleet)
    seconds: float = 30.0
    """Measured, after `warm_up_s`; a load with turns ends by itself, or at the latest then."""
    warm_up_s: float = 5.0
    """Clients begin in the first half of it; nothing is measured before its end."""
    seed: int = 0
    limits: Limits = field(default_factory=Limits)
    """Of the policy, as an operator sets them."""
    loss: ZoneLoss | None = None

    def __post_init__(self) -> None:
        """Check ranges.

        Raises:
            InvalidRequest: a figure is out of its range.
        """
        _require("seconds", self.seconds, 0.001, MOST_SECONDS)
        _require("warm_up_s", self.warm_up_s, 0, MOST_SECONDS)
        _require("seed", self.seed, 0, (1 << 63) - 1)
        if self.loss is not None:
            if self.fleet.zones < 2:
                raise InvalidRequest("zones", self.fleet.zones, "2 or more, if one of them is to be lost")
            _require("lose_zone", self.loss.zone, 0, self.fleet.zones - 1)
            _require("lose_at_s", self.loss.at_s, 0, self.warm_up_s + self.seconds)
            _require("detect_s", self.loss.detect_s, 0, MOST_SECONDS)
            self._require_survivors(self.loss.zone)

    def _require_survivors(self, lost: int) -> None:
        """Without an orchestrator clients have nobody to turn to, without a verifier there is nothing to wait for."""
        for name, count in (("orchestrators", self.fleet.orchestrators), ("verifiers", self.fleet.verifiers)):
            if all(index % self.fleet.zones == lost for index in range(count)):
                raise InvalidRequest(name, count, f"2 or more, in a part too, so that one is left without zone {lost}")


@dataclass(frozen=True, slots=True)
class Prices:
    """What a worker of each role costs in an hour, in any currency."""

    per_hour: Mapping[str, float]

    def __post_init__(self) -> None:
        """Check roles and ranges.

        Raises:
            InvalidRequest: a role does not exist, or a price is negative.
        """
        for role, price in self.per_hour.items():
            if role not in ROLES:
                raise InvalidRequest("price", role, f"one of {', '.join(ROLES)}")
            _require("price", price, 0, 1e9)

    def per_million(self, fleet: Fleet, tokens_per_s: float) -> float | None:
        """Return what a million tokens cost; None where no prices are known, or nothing is delivered."""
        if not self.per_hour or tokens_per_s <= 0.0:
            return None
        hourly = sum(price * fleet.count(role) for role, price in self.per_hour.items())
        return hourly / (tokens_per_s * 3600.0) * 1e6


def _require(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise InvalidRequest(name, value, f"{least} to {most}")
