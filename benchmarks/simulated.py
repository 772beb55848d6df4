"""Is the simulation right? `python -m benchmarks.simulated` runs a real cluster, and the same in simulated time.

Toy models whose passes take a known time, one verifier and one draft worker. What the simulation is told is measured
first: passes and token steps by rows in this process, a round's own cost in a sequential arm of one session, what each
verdict costs a verifier in a plain arm of eight, and each arm's acceptance. Everything else it must find by itself.
"""

import argparse
import asyncio
import json
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from statistics import fmean, median
from typing import Any, cast

import psutil
from rich.console import Console

from benchmarks.machine import facts
from benchmarks.one_session.arms import Arm
from benchmarks.one_session.toys import measure_arms, outside
from benchmarks.results import FOLDER, facts_list, table, write
from benchmarks.serving import Cores, pinned, toy_specs
from benchmarks.slow_wire import SlowWire, free_ports
from benchmarks.watching import Watched, watch
from draft_service.drafters.causal_lm import CausalLm
from draft_service.drafters.protocol import DraftSession, Work
from draft_service.drafters.toy import noisy
from outrider.client import Client
from outrider.cluster import LocalCluster, ServiceSpec
from outrider.gamma import PLAIN
from outrider.generation import GenerationRequest, SpeculationChoice, TextPrompt
from outrider.ids import Epoch, Mode, SessionId, TokenClass
from outrider.messages import SamplingParams, Speculation
from outrider.model.runner import Feed
from outrider.model.toy import ToyLanguage, ToyRunner, ToyTokenizer
from simulator.cluster import Cluster
from simulator.costs import step_cost
from simulator.measured import Measured
from simulator.setting import Fleet, Load, Setting

VERIFY_S = 0.030
CASES = ((0.8, 0.002, 0.0), (0.6, 0.006, 0.0), (0.8, 0.002, 0.005))
"""(agreement of the draft, draft seconds per token, seconds added to a round trip)."""
LEVELS = (1, 4, 8)
NUM_TOKENS = 96
ROWS = (1, 2, 4, 8, 16, 32)
GREEDY = SamplingParams(temperature=0.0)
ARMS = {
    "plain": SpeculationChoice(off=True),
    "sequential, 4": SpeculationChoice(gamma=4, restart_gamma=4, window=4),
    "pipelined, 3, 4, 8": SpeculationChoice(gamma=4, restart_gamma=3, window=8),
    "automatic": SpeculationChoice(),
}

HOW = """Toy models, {verify_ms:g} ms a pass; a case is the draft's rate of agreement, its milliseconds per token, and
the milliseconds added to a round trip (half each way). All sessions of a level begin at once and take {tokens} tokens
each; the rate is a session's own, tokens behind its first chunk, mean over sessions, median of {repetitions}
repetitions after one that warms up. The verifier has core {verify} to itself, everything else shares core {draft}. The
simulation is told: passes and token steps by rows as measured here without services, {calibration}; and each arm's
acceptance."""

console = Console(highlight=False, width=180)


@dataclass(frozen=True, slots=True)
class Row:
    """One arm at one level."""

    case: str
    sessions: int
    arm: str
    alpha: float
    real: float
    """Tokens per second of a session."""
    simulated: float

    @property
    def ratio(self) -> float:
        """Simulated to real."""
        return self.simulated / self.real

    @property
    def cells(self) -> tuple[str, ...]:
        """As text, in the order of `HEADER`."""
        alpha = f"{self.alpha:.2f}" if self.alpha else ""
        figures = (f"{self.real:.1f}", f"{self.simulated:.1f}", f"{self.ratio:.2f}")
        return (self.case, str(self.sessions), self.arm, alpha, *figures)


HEADER = ("case", "sessions", "decoding", "alpha", "real tokens/s", "simulated", "simulated / real")


# --- what the simulation is told --------------------------------------------------------------------------------------


def verify_times() -> dict[int, float]:
    """Return milliseconds of the toy target's passes, by rows."""
    language = ToyLanguage(len(ToyTokenizer()))
    found = {}
    for rows in ROWS:
        runner = ToyRunner(language, delay_s=VERIFY_S)
        slots = [runner.new_slot() for _ in range(min(rows, 8))]
        share = rows // len(slots)

        def run(runner: ToyRunner = runner, slots: list = slots, share: int = share) -> None:  # type: ignore[type-arg]
            feeds = [Feed(slot, tuple(range(1, share + 1)), TokenClass.DECODE, share, best_below=200) for slot in slots]
            runner.forward(feeds)

        found[rows] = _milliseconds(run)
    return _rising(found)


def draft_times(draft_s: float) -> dict[int, float]:
    """Return milliseconds of the toy draft's token steps, by sessions."""
    vocab = len(ToyTokenizer())
    found = {}
    for sessions in (1, 4, 8):
        runner = ToyRunner(noisy(ToyLanguage(vocab), 0.8), delay_s=draft_s)
        drafter = CausalLm(runner, vocab_len=vocab)
        names = [SessionId(f"s{index}") for index in range(sessions)]
        ids = {name: [1, 2, 3 + index] for index, name in enumerate(names)}
        for name in names:
            drafter.open(DraftSession(name, Mode.GREEDY, GREEDY, b"", 3), ids[name])
            drafter.plan(name, ids[name], 4)

        def step(drafter: CausalLm = drafter, ids: dict[SessionId, list[int]] = ids) -> None:
            for name, outcome in zip(
                ids, drafter.draw([Work(name, Epoch(), own, 4) for name, own in ids.items()]), strict=True
            ):
                ids[name] += getattr(outcome, "token_ids", ())

        found[sessions] = _milliseconds(step)
    return _rising(found)


def _milliseconds(run: Callable[[], None], times: int = 9) -> float:
    taken = []
    for _ in range(times):
        began_s = time.perf_counter()
        run()
        taken.append(1000 * (time.perf_counter() - began_s))
    return median(taken)


def _rising(found: dict[int, float]) -> dict[int, float]:
    """Return times of which none is below one of fewer rows: what is noise between them is taken out."""
    least = 0.0
    for rows in sorted(found):
        least = found[rows] = max(least, found[rows])
    return found


@dataclass(slots=True)
class Calibration:
    """What a case has told."""

    verify_ms: dict[int, float]
    draft_ms: dict[int, float]
    round_trip_ms: float = 0.0
    verdict_ms: float = 0.0
    message_ms: float = 0.0
    real: list[tuple[int, str, float, float]] = field(default_factory=list)
    """Sessions, arm, acceptance, and tokens per second of a session."""

    def measured(self, alpha: float) -> Measured:
        """Return it as the simulation reads it."""
        return Measured(
            self.verify_ms, self.draft_ms, self.round_trip_ms, prompt_ms=1000 * VERIFY_S,
            draft_prompt_ms=self.draft_ms[1], verdict_ms=self.verdict_ms, message_ms=self.message_ms, alpha=(alpha,),
        )  # fmt: skip


# --- both sides -------------------------------------------------------------------------------------------------------


async def real_rate(client: Client, level: int, choice: SpeculationChoice) -> tuple[float, float]:
    """Run a level once; return a session's mean rate, and its acceptance."""
    requests = [
        GenerationRequest(
            TextPrompt(f"{index} mats. the cat sat on the mat. "), max_tokens=NUM_TOKENS, sampling=GREEDY,
            ignore_eos=True, speculation=choice,
        )
        for index in range(level)
    ]  # fmt: skip
    seen: list[Watched] = await asyncio.gather(*(watch(client, request) for request in requests))
    tested = sum(each.figures.num_tested for each in seen)
    accepted = sum(each.figures.num_accepted for each in seen)
    return fmean(each.rate for each in seen), accepted / tested if tested else 0.0


def simulated_rate(known: Measured, level: int, choice: SpeculationChoice, prompt: int) -> float:
    """Simulate a level; return a session's mean rate."""
    rates = []
    for seed in range(3):
        load = Load(level, prompt, NUM_TOKENS, 4, known.alpha or (), choice)
        cluster = Cluster(Setting(known.costs(32), load, Fleet(), seconds=1000, warm_up_s=0, seed=seed))
        cluster.run()
        # What the first ones measure is known to those that come after them, as in the real cluster.
        rates.append(fmean(each.rate for each in cluster.tally.told[level:]))
    return fmean(rates)


async def measure_case(
    case: tuple[float, float, float], levels: Sequence[int], repetitions: int, cores: Cores
) -> Calibration:
    """Run one case for real, and measure what the simulation is to be told."""
    agreement, draft_s, added_s = case
    told = Calibration(verify_times(), draft_times(draft_s))
    listen, advertised = free_ports(2)
    specs = [_behind(spec, listen, advertised) for spec in toy_specs(agreement, draft_s, VERIFY_S, cores)]
    async with (
        SlowWire(advertised, listen, added_s / 2),
        LocalCluster(specs) as cluster,
        Client(cluster.address) as client,
    ):
        await _calibrate(told, client, psutil.Process(cluster.services["orchestrator-1"].pid))
        for level, (arm, choice) in product(levels, ARMS.items()):
            seen = [await real_rate(client, level, choice) for _ in range(repetitions + 1)][1:]
            told.real.append((level, arm, fmean(each for _, each in seen), median(rate for rate, _ in seen)))
            console.print(f"{_name(case)}: {level} sessions, {arm}, {told.real[-1][3]:.1f} tokens/s")
    return told


async def _calibrate(told: Calibration, client: Client, orchestrator: psutil.Process) -> None:
    """Measure a round's own cost with one session, and what each verdict costs with eight that decode plain."""
    sequential = Arm("sequential", Speculation(4, 4, 4), client)
    plain = Arm("plain", PLAIN, client)
    await measure_arms([sequential, plain], 1)
    told.round_trip_ms = max(0.0, 1000 * median(outside(sequential)))
    before_s = _cpu_s(orchestrator)
    rate, _ = await real_rate(client, 8, ARMS["plain"])
    # In plain decoding every token is a verdict.
    told.message_ms = 1000 * (_cpu_s(orchestrator) - before_s) / (8 * NUM_TOKENS)
    told.verdict_ms = max(0.0, (1000.0 / rate - step_cost("", told.verify_ms).seconds(8) * 1000) / 8)
    # A round of one session has one verdict in it.
    told.round_trip_ms = max(0.0, told.round_trip_ms - told.verdict_ms)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def compare(case: tuple[float, float, float], told: Calibration) -> list[Row]:
    """Simulate what was run for real."""
    prompt = len(ToyTokenizer().encode("0 mats. the cat sat on the mat. "))
    rows = []
    for level, arm, alpha, rate in told.real:
        guess = simulated_rate(told.measured(alpha or case[0]), level, ARMS[arm], prompt)
        rows.append(Row(_name(case), level, arm, alpha, rate, guess))
        console.print(" ".join(rows[-1].cells))
    return rows


def _name(case: tuple[float, float, float]) -> str:
    return f"{case[0]:g}, {1000 * case[1]:g} ms, {1000 * case[2]:g} ms"


def _behind(spec: ServiceSpec, listen: int, advertised: int) -> ServiceSpec:
    """Put a verifier behind the proxy; a draft worker and an orchestrator stay as they are."""
    if spec.role != "verify":
        return spec
    where = {"OUTRIDER_VERIFY_LISTEN": f"127.0.0.1:{listen}", "OUTRIDER_VERIFY_ADVERTISE": f"127.0.0.1:{advertised}"}
    return replace(spec, settings={**spec.settings, **where})


# --- how many ---------------------------------------------------------------------------------------------------------

SCALE_HEADER = (
    "sessions", "workers", "tokens", "events", "processor seconds", "tokens per processor second", "memory MB",
)  # fmt: skip
SCALE_TOKENS = 4


def scale(sessions: int) -> tuple[str, ...]:
    """Simulate many sessions at once, four hundred at a verifier; return a row of the page."""
    verifiers = max(1, sessions // 400)
    fleet = Fleet(verifiers, 3 * verifiers, max(1, verifiers // 16), zones=2, verifier_sessions=512, draft_sessions=256)
    costs = Measured({1: 30.0, 128: 60.0}, {1: 2.0, 128: 8.0}, 1.0).costs(128)
    began_s = time.process_time()
    found = Cluster(Setting(costs, Load(sessions, 10, SCALE_TOKENS, 1), fleet, seconds=100_000, warm_up_s=2.0)).run()
    taken_s = time.process_time() - began_s
    if found.failed:
        raise AssertionError(f"{found.failed} of {sessions} generations failed")
    tokens = found.finished * SCALE_TOKENS
    workers = verifiers + fleet.drafts
    most_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return (str(found.finished), str(workers), str(tokens), str(found.events), f"{taken_s:.0f}",
            f"{tokens / taken_s:.0f}", f"{most_mb:.0f}")  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and write down."""
    parser = argparse.ArgumentParser(prog="benchmarks.simulated", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one case, once; under another name")
    parser.add_argument(
        "--scale",
        type=int,
        nargs="*",
        default=(1000, 10_000),
        help="sessions to simulate, 100000 takes eight minutes; none keeps what the result files have",
    )
    parser.add_argument("--again", action="store_true", help="simulate anew what the result files have run for real")
    parser.add_argument("--only-real", action="store_true", help="run for real, on an idle machine; --again later")
    parser.add_argument("--only-scale", action="store_true", help="keep the rows that the result files have")
    parser.add_argument("--name", default="simulated", help="name of the result files")
    asked = parser.parse_args(argv)
    name = f"{asked.name}_quick" if asked.quick else asked.name
    repetitions, cases = (1, CASES[:1]) if asked.quick else (asked.repetitions, CASES)
    data = _kept(name)
    if not (asked.again or asked.only_scale):
        data |= _measure(cases, repetitions)
    if not (asked.only_scale or asked.only_real):
        data |= _simulate(data["cases"])
    sizes = (1000,) if asked.quick else asked.scale
    if sizes:
        data["scale"] = [dict(zip(SCALE_HEADER, scale(sessions), strict=True)) for sessions in sizes]
    page = _page(data)
    console.print(page)
    write(name, data, page)


def _kept(name: str) -> dict[str, Any]:
    """Return what the result files have; nothing where there are none."""
    path = FOLDER / f"{name}.json"
    return cast(dict[str, Any], json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def _measure(cases: Sequence[tuple[float, float, float]], repetitions: int) -> dict[str, Any]:
    """Run all cases for real."""
    machine, cores = facts(), pinned()
    found = [(case, asyncio.run(measure_case(case, LEVELS, repetitions, cores))) for case in cases]
    return {
        "machine": machine,
        "how": _how(repetitions, cores, [told for _, told in found]),
        "cases": [{"case": case, **asdict(told)} for case, told in found],
    }


def _simulate(cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Simulate all that was run for real."""
    rows: list[Row] = []
    known = [(tuple(each["case"]), _calibration(each)) for each in cases]
    for case, told in known:
        rows += compare(case, told)
    first = asdict(known[0][1].measured(known[0][0][0]))
    return {
        "rows": [asdict(row) | {"ratio": row.ratio} for row in rows],
        "calibration": {key: value for key, value in first.items() if value is not None},
    }


def _calibration(data: dict[str, Any]) -> Calibration:
    """Return what was written down; JSON has made texts of the rows' numbers."""
    verify_ms, draft_ms = ({int(rows): ms for rows, ms in data[name].items()} for name in ("verify_ms", "draft_ms"))
    real = [(int(level), str(arm), float(alpha), float(rate)) for level, arm, alpha, rate in data["real"]]
    return Calibration(verify_ms, draft_ms, data["round_trip_ms"], data["verdict_ms"], data["message_ms"], real)


def _how(repetitions: int, cores: Cores, found: Sequence[Calibration]) -> str:
    trips = ", ".join(f"{each.round_trip_ms:.1f}" for each in found)
    verdicts = ", ".join(f"{each.verdict_ms:.2f}" for each in found)
    messages = ", ".join(f"{each.message_ms:.2f}" for each in found)
    calibration = (
        f"round trips of {trips} ms, {verdicts} ms a verdict at the verifier, {messages} ms at the orchestrator (its "
        "processor time), case by case"
    )
    return HOW.format(
        verify_ms=1000 * VERIFY_S, tokens=NUM_TOKENS, repetitions=repetitions, verify=cores.verify, draft=cores.draft,
        calibration=calibration,
    )  # fmt: skip


def _page(data: dict[str, Any]) -> str:
    parts = ["# The simulation beside a real cluster"]
    if "rows" in data:
        rows = [Row(**{key: value for key, value in row.items() if key != "ratio"}) for row in data["rows"]]
        worst = max(rows, key=lambda row: abs(row.ratio - 1.0))
        within = sum(abs(row.ratio - 1.0) <= 0.1 for row in rows)
        parts += [
            facts_list(data["machine"]),
            data["how"],
            table(HEADER, [row.cells for row in rows]),
            f"{within} of {len(rows)} arms are within 10 % of the real ones; the median is "
            f"{median(row.ratio for row in rows):.2f}, the farthest {worst.ratio:.2f} ({worst.case}; {worst.arm}, "
            f"{worst.sessions} sessions).",
        ]
    if "scale" in data:
        parts += [
            "## How many",
            f"The real machines, in one process on one core; all sessions at once, {SCALE_TOKENS} tokens for each, 400 "
            "sessions a verifier, three draft workers for each verifier. Memory is the most that the process has held.",
            table(SCALE_HEADER, [[each[name] for name in SCALE_HEADER] for each in data["scale"]]),
        ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
