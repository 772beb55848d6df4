"""From what clients were told of answers to what is said of a drafter. Pure.

Every prompt is answered in several ways: plain; in the *trial*, sequential rounds of a fixed length, from which
acceptance and costs are taken; and in each way that is to be measured, from which come the speed-ups. Times are:

* t_v, a pass of one row: that of plain decoding; of a run's rows: what a trial's round takes that tested something;
* t_d, a draft token: what the drafter reports;
* r, what of a round is neither drafting nor the pass: the trial's median time between chunks, less those two.

Tokens that a drafter had nothing for (prompt lookup without a match) are taken to cost a pass each. The prediction is
that of `outrider.gamma` from these figures; it knows no cost of a plain token beside its pass.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from outrider.gamma import Costs, best_plan, pipelined_rate, sequential_rate
from outrider.generation import Figures
from outrider.messages import Speculation

MIN_COUNTED = 8
"""Tokens after the first chunk that an answer must have for its rate to say something."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt answered in one way, on the client's clock."""

    times_s: tuple[float, ...]
    """Of every chunk of tokens."""
    counts: tuple[int, ...]
    """Tokens of every chunk."""
    tested: tuple[bool, ...]
    """Whether something that was drafted had been tested for the chunk."""
    token_ids: tuple[int, ...]
    figures: Figures

    @property
    def counted(self) -> int:
        """Tokens after the first chunk, whose time says how fast reading the prompt was."""
        return sum(self.counts[1:])

    @property
    def rate(self) -> float:
        """Tokens per second after the first chunk; 0 where there is too little to tell."""
        seconds = self.times_s[-1] - self.times_s[0] if self.times_s else 0.0
        return self.counted / seconds if self.counted >= MIN_COUNTED and seconds > 0.0 else 0.0


@dataclass(frozen=True, slots=True)
class Sums:
    """Figures of many answers, added up."""

    figures: tuple[Figures, ...]

    def total(self, name: str) -> float:
        """Return one figure's sum."""
        return float(sum(getattr(each, name) for each in self.figures))

    @property
    def num_tokens(self) -> float:
        """Committed tokens."""
        return sum(self.total(f"num_{kind}") for kind in ("accepted", "recovered", "bonus", "plain"))

    @property
    def alpha(self) -> float | None:
        """Accepted of tested; None where nothing was tested."""
        return _share(self.total("num_accepted"), self.total("num_tested"))

    @property
    def tested_by_position(self) -> list[int]:
        """Tests at each distance from the start of an epoch."""
        return _added(each.tested_per_position for each in self.figures)

    @property
    def accepted_by_position(self) -> list[int]:
        """Acceptances at each distance; as long as the tests."""
        return _added(each.accepted_per_position for each in self.figures)

    @property
    def draft_s(self) -> float:
        """t_d; 0 where nothing was drafted."""
        return _share(self.total("draft_s"), self.total("num_drafted")) or 0.0

    @property
    def pass_s(self) -> float:
        """Model seconds per round; 0 where there was none."""
        return _share(self.total("verify_s"), self.total("num_rounds")) or 0.0

    @property
    def undrafted_share(self) -> float:
        """Tokens that nobody had drafted, of all."""
        return _share(self.total("num_plain"), self.num_tokens) or 0.0

    @property
    def tokens_per_round(self) -> float:
        """Committed tokens per round."""
        return _share(self.num_tokens, self.total("num_rounds")) or 0.0


def costs(plain: Sequence[Answer], trial: Sequence[Answer], trial_gamma: int) -> Costs:
    """Return t_d, t_v by rows and r.

    Args:
        plain: answers without drafts; with at least one round.
        trial: answers in sequential rounds of `trial_gamma` tokens.
        trial_gamma: >= 1; more rows than those of the trial are taken to cost what they do.
    """
    sums, one_s = _sums(trial), _sums(plain).pass_s
    spent_s = sums.total("verify_s") - sums.total("num_plain") * one_s
    many_s = max(one_s, _share(spent_s, sums.total("num_rounds") - sums.total("num_plain")) or one_s)
    gaps_s = [gap_s for each in trial for gap_s in _gaps_s(each)]
    trip_s = median(gaps_s) - trial_gamma * sums.draft_s - many_s if gaps_s else 0.0
    return Costs(sums.draft_s, one_s, max(0.0, trip_s), (one_s, *([many_s] * trial_gamma)))


def _gaps_s(answer: Answer) -> list[float]:
    """Return the times of rounds that tested something, without the last, which the answer's end may have cut short."""
    rounds = list(zip(pairwise(answer.times_s), answer.tested[1:], strict=True)) if answer.times_s else []
    return [after - before for (before, after), tested in rounds[:-1] if tested]


def _sums(answers: Iterable[Answer]) -> Sums:
    return Sums(tuple(each.figures for each in answers))


def predicted(alpha: float, undrafted: float, plan: Speculation, times: Costs) -> float:
    """Return the latency model's speed-up of a plan, 1 for the plan to draft nothing.

    Args:
        alpha: acceptance of a tested token, in [0, 1].
        undrafted: share of the tokens that the drafter had nothing for, in [0, 1].
        plan: what is drafted.
        times: t_d, t_v by rows, r.
    """
    if not plan.enabled:
        return 1.0
    if plan.window > plan.gamma:
        rate = pipelined_rate(alpha, plan.restart_gamma, plan.gamma, times)
    else:
        rate = sequential_rate(alpha, plan.gamma, times)
    return times.pass_s(1) / (undrafted * times.pass_s(1) + (1.0 - undrafted) / rate)


@dataclass(frozen=True, slots=True)
class Way:
    """What came of one way of drafting, beside plain decoding of the same prompts in the same run."""

    name: str
    """"automatic", or the number of tokens per proposal."""
    ratios: tuple[float, ...]
    """Speed over plain speed, one per prompt with an answer long enough."""
    predicted: float
    tokens_per_round: float
    draft_s_per_token: float
    """Draft seconds per committed token."""
    num_off: int
    """Answers at whose end the policy had switched drafting off."""
    num_equal: int
    """Answers that are the plain ones, token by token."""
    num_answers: int

    @property
    def speed_up(self) -> float | None:
        """Median of the ratios; None without any."""
        return median(self.ratios) if self.ratios else None


@dataclass(frozen=True, slots=True)
class Measured:
    """All that is said of one drafter."""

    drafter: str
    alpha: float | None
    tested: tuple[int, ...]
    """By position in the trial's proposals."""
    accepted: tuple[int, ...]
    undrafted: float
    """Share of the trial's tokens that it had nothing for."""
    times: Costs
    best: Speculation
    """What the latency model makes of it; not enabled: nothing is faster than plain decoding."""
    ways: tuple[Way, ...]

    @property
    def rates_by_position(self) -> list[float]:
        """Share accepted of those tested, by position."""
        return [accepted / tested for tested, accepted in zip(self.tested, self.accepted, strict=True)]


@dataclass(frozen=True, slots=True)
class Asked:
    """How prompts were answered: one entry of each per prompt, in the same order."""

    plain: Sequence[Answer]
    trial: Sequence[Answer]
    ways: Sequence[tuple[str, Speculation | None, Sequence[Answer]]]
    """Name, plan (None: whatever the policy made of it) and answers of each way."""


def measured(drafter: str, asked: Asked, trial_gamma: int, max_gamma: int) -> Measured:
    """Return what is said of a drafter.

    Args:
        drafter: its name.
        asked: at least one prompt, answered in all ways.
        trial_gamma: tokens per proposal of the trial.
        max_gamma: longest proposal that the best plan may have.
    """
    trial, times = _sums(asked.trial), costs(asked.plain, asked.trial, trial_gamma)
    best = best_plan(trial.alpha or 0.0, times, max_gamma, pipelined=True)
    ways = []
    for name, plan, answers in asked.ways:
        speed_up = predicted(trial.alpha or 0.0, trial.undrafted_share, plan or best, times)
        ways.append(_way(name, answers, asked.plain, speed_up))
    return Measured(
        drafter, trial.alpha, tuple(trial.tested_by_position), tuple(trial.accepted_by_position),
        trial.undrafted_share, times, best, tuple(ways),
    )  # fmt: skip


def _way(name: str, answers: Sequence[Answer], plain: Sequence[Answer], speed_up: float) -> Way:
    sums = _sums(answers)
    pairs = list(zip(answers, plain, strict=True))
    return Way(
        name=name,
        ratios=tuple(one.rate / other.rate for one, other in pairs if one.rate and other.rate),
        predicted=speed_up,
        tokens_per_round=sums.tokens_per_round,
        draft_s_per_token=_share(sums.total("draft_s"), sums.num_tokens) or 0.0,
        num_off=sum(bool(each.figures.speculation_off) for each in answers),
        num_equal=sum(one.token_ids == other.token_ids for one, other in pairs),
        num_answers=len(answers),
    )


def _added(rows: Iterable[Sequence[int]]) -> list[int]:
    """Add up lists of different lengths."""
    total: list[int] = []
    for row in rows:
        total += [0] * (len(row) - len(total))
        for index, value in enumerate(row):
            total[index] += value
    return total


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0.0 else None
