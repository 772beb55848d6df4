"""How soon a session goes on at a verifier that has never seen it: `python -m benchmarks.restore`.

With its KV in a tier, beside computing all of it again. Both arms use the same engine, model and core, in turn; the
store's server has whatever core is left. What is timed begins when the session is opened and ends with its first new
token, so the arm with the tier includes connecting, asking, checking, copying, and computing the last, partial block.
"""

import argparse
import asyncio
import os
import queue
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from rich.console import Console

from benchmarks.machine import facts
from benchmarks.results import facts_list, table, write
from outrider.errors import OutriderError
from outrider.ids import Generation, Mode, SessionId, TokenClass, WorkerId
from outrider.messages import DecodeOpen, DecodeResponseMessage, SamplingParams, Speculation, Verdict
from outrider.model.names import DEFAULT_MODEL, ModelSpec
from outrider.model.opening import OpenedModel, open_model
from outrider.model.runner import BLOCK_LEN
from outrider.store.embedded import EmbeddedServer
from outrider.tier.identity import Identified, identify
from outrider.tier.speeds import Speeds
from outrider.tier.tier import BlockTier, TierSettings
from verify_service.engine import Engine
from verify_service.inbox import CloseSession, OpenSession, Stop, Ticket
from verify_service.restoring import Tier

LIMIT_S = 120.0
NUM_BLOCKS = 64
TEXT = Path(__file__).parent.parent / "docs" / "protocol.md"
DECODE, PROMPT = TokenClass.DECODE, TokenClass.PROMPT

HOW = """{length} tokens of a session, then the first new one, greedy, one session, one thread, {dtype}; the process is
pinned to one core, which the tier's threads share. Milliseconds, median of {repetitions} repetitions in turn, quartiles
in brackets; "clock" from opening the session to its first new token, "CPU" what the process used meanwhile. Every
repetition of the arm "tier" has a new tier: it does not know how fast the server is and asks for one block first.
Server: an embedded Valkey on a Unix socket. {start_up}"""

console = Console(highlight=False, width=160)


@dataclass(frozen=True, slots=True)
class Log:
    """A session as its log has it."""

    name: str
    token_ids: tuple[int, ...]
    prompt_len: int

    def opened(self, num_new: int) -> DecodeOpen:
        """Return what opens the session for some more tokens."""
        length = len(self.token_ids)
        classes = (PROMPT,) * (self.prompt_len - 1) + (DECODE,) * (length - self.prompt_len + 1)
        return DecodeOpen(
            SessionId("s"), Generation(1), self.token_ids, classes, Mode.GREEDY, SamplingParams(temperature=0.0), b"",
            prompt_len=self.prompt_len, commit_limit=length + num_new, speculation=Speculation(), patience_s=1.0,
            worker_id=WorkerId(""),
        )  # fmt: skip


@dataclass(slots=True)
class Arm:
    """One way's repetitions."""

    clock_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    tokens: set[int] = field(default_factory=set)
    """First new tokens; more than one would be a mistake."""
    num_restored: set[int] = field(default_factory=set)


class Verifier:
    """An engine on its own thread, and one session after the other."""

    def __init__(self, opened: OpenedModel, tier: Tier | None) -> None:
        self.engine = Engine(opened.runner, opened.vocabulary.size, tier=tier)
        self._tier = tier
        self._tickets = count(1)
        self.engine.start(lambda _defect: None)

    def run(self, opening: DecodeOpen, num_tokens: int, *, keep_kv: bool = False) -> list[int]:
        """Open a session, wait for some tokens, and close it, by default without a trace in the pool."""
        heard: queue.SimpleQueue[DecodeResponseMessage | OutriderError | None] = queue.SimpleQueue()
        ticket, tokens = Ticket(next(self._tickets)), list[int]()
        self.engine.post(OpenSession(ticket, opening, heard.put))
        while len(tokens) < num_tokens:
            message = heard.get(timeout=LIMIT_S)
            if not isinstance(message, Verdict):
                raise TypeError(f"no verdict: {message!r}")
            tokens += message.token_ids
        self.engine.post(CloseSession(ticket, keep_kv=keep_kv))
        return tokens

    def stop(self) -> None:
        """End the threads; what was computed is stored first."""
        self.engine.post(Stop())
        if not self.engine.join(LIMIT_S) or (self._tier and not self._tier.blocks.close(LIMIT_S)):
            raise TimeoutError("the verifier does not stop")


def open_tier(found: Identified, url: str) -> Tier:
    """Return a tier that knows nothing of its server yet."""
    return Tier(BlockTier(found.identity, TierSettings(url)), Speeds(found.prefill_s))


@contextmanager
def pinned() -> Iterator[None]:
    """Keep this process on one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def make_logs(opened: OpenedModel, found: Identified, url: str, length: int) -> list[Log]:
    """Have sessions of this length computed and stored by a first verifier."""
    text = tuple(opened.tokenizer.encode(TEXT.read_text("utf-8")))
    logs = []
    for name, prompt_len in (("all of it prompt", length), ("half prompt, half answer", length // 2)):
        asked = Log(name, text[:prompt_len], prompt_len)
        tier = open_tier(found, url)
        verifier = Verifier(opened, tier)
        num_new = length - prompt_len
        answer = verifier.run(asked.opened(num_new + 1), num_new + 1, keep_kv=True)
        verifier.stop()
        log = Log(name, asked.token_ids + tuple(answer[:num_new]), prompt_len)
        emptying = Verifier(opened, None)
        emptying.run(log.opened(1), 1)
        emptying.stop()
        logs.append(log)
    return logs


def time_arm(opened: OpenedModel, log: Log, tier: Tier | None, arm: Arm) -> None:
    """Open the session once at a verifier that does not know it."""
    verifier = Verifier(opened, tier)
    if opened.runner.kv_usage.cached:
        raise RuntimeError("the pool is not empty")
    cpu_s, clock_s = time.process_time(), time.perf_counter()
    tokens = verifier.run(log.opened(1), 1)
    arm.clock_s.append(time.perf_counter() - clock_s)
    arm.cpu_s.append(time.process_time() - cpu_s)
    arm.tokens.add(tokens[0])
    verifier.stop()
    arm.num_restored.add(verifier.engine.counters["kv_restored_tokens"])


def measure(opened: OpenedModel, found: Identified, url: str, log: Log, repetitions: int) -> dict[str, Arm]:
    """Time both arms in turn."""
    arms = {"prefill": Arm(), "tier": Arm()}
    for _ in range(repetitions):
        for name, arm in arms.items():
            time_arm(opened, log, open_tier(found, url) if name == "tier" else None, arm)
    if len(arms["prefill"].tokens | arms["tier"].tokens) != 1:
        raise RuntimeError("the arms do not say the same")
    expected = (len(log.token_ids) - 1) // BLOCK_LEN * BLOCK_LEN
    if arms["prefill"].num_restored != {0} or arms["tier"].num_restored != {expected}:
        raise RuntimeError(f"not everything was restored: {arms['tier'].num_restored} of {expected}")
    return arms


def cell(seconds: Sequence[float]) -> str:
    """Return median and quartiles in milliseconds."""
    low, middle, high = statistics.quantiles(seconds, n=4)
    return f"{1000 * middle:.0f} ({1000 * low:.0f}-{1000 * high:.0f})"


def rows_of(log: Log, arms: dict[str, Arm]) -> list[list[object]]:
    """Return the table's lines of one log."""
    rows: list[list[object]] = []
    for name, arm in arms.items():
        share = statistics.median(arm.clock_s) / statistics.median(arms["prefill"].clock_s)
        cpu_share = statistics.median(arm.cpu_s) / statistics.median(arms["prefill"].cpu_s)
        restored = max(arm.num_restored)
        rows.append([log.name, name, restored, cell(arm.clock_s), f"{share:.0%}", cell(arm.cpu_s), f"{cpu_share:.0%}"])
    return rows


async def run(arguments: argparse.Namespace) -> None:
    """Measure and write the result."""
    machine = facts()
    async with EmbeddedServer() as server:
        started_s = time.perf_counter()
        opened = open_model(ModelSpec(DEFAULT_MODEL, arguments.dtype), num_blocks=NUM_BLOCKS, digest_weights=True)
        load_s = time.perf_counter() - started_s
        found = identify(opened.runner, opened.weights)
        start_up = (
            f"At start-up, not in the figures: {1000 * (time.perf_counter() - started_s - load_s):.0f} ms to identify "
            f"the engine. A block has {found.identity.layout.num_bytes:,} bytes."
        )
        results: dict[str, dict[str, Arm]] = {}
        rows: list[list[object]] = []
        with pinned():
            for log in make_logs(opened, found, server.url, arguments.length):
                results[log.name] = measure(opened, found, server.url, log, arguments.repetitions)
                rows += rows_of(log, results[log.name])
    how = HOW.format(
        length=f"{arguments.length:,}", dtype=arguments.dtype, repetitions=arguments.repetitions, start_up=start_up
    )
    lines = table(["session", "arm", "tokens restored", "clock", "of prefill", "CPU", "of prefill"], rows)
    data = {
        "machine": machine,
        "length": arguments.length,
        "dtype": arguments.dtype,
        "sessions": {
            name: {arm: {"clock_s": each.clock_s, "cpu_s": each.cpu_s} for arm, each in arms.items()}
            for name, arms in results.items()
        },
    }
    suffix = "_quick" if arguments.quick else ""
    page = f"# A session at another verifier\n\n{how}\n\n{lines}\n\n{facts_list(machine)}\n"
    console.print(lines, write(f"restore{suffix}", data, page))


def main() -> None:
    """Read the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few repetitions; only shows that everything runs")
    parser.add_argument("--length", type=int, default=1000, help="tokens of the session")
    parser.add_argument("--repetitions", type=int, default=11)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.repetitions = 3
    asyncio.run(run(arguments))


if __name__ == "__main__":
    main()
