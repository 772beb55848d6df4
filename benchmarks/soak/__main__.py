"""Soaks a cluster, prints and writes down what was found: `python -m benchmarks.soak`; see the package's docstring."""

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

from rich.console import Console

from benchmarks.machine import facts
from benchmarks.results import write
from benchmarks.serving import TOY
from benchmarks.soak.findings import Evidence, findings
from benchmarks.soak.hearing import Heard
from benchmarks.soak.ledger import Ledger
from benchmarks.soak.report import data, page
from benchmarks.soak.script import Conversation, make_conversations, plain
from benchmarks.soak.seats import Seat, Twins
from benchmarks.soak.stage import Stage, real_stage, toy_stage
from benchmarks.soak.watching import Rest, Watch, thirds
from outrider.client import Client
from outrider.cluster import LocalCluster
from outrider.ids import SessionId

HOW = """{minutes:g} minutes, {sessions} clients at once, model {model}, seed {seed}, {conversations} different
conversations; the verifier's pool of KV holds {blocks} blocks of 64 tokens. All processes and the clients share the
machine's cores. The twins of all greedy and seeded texts were asked before, one at a time and without drafts, of a
cluster of its own whose verifier takes no KV over. Memory is compared after the first {warm_up:.0%} of the time."""
WARM_UP = 0.2
"""Share of the time that is left out of the comparison of memory."""
WARM_UP_S = 15.0
"""How long the clients play before the gauges at rest are read for the first time."""
EVENTS = "outrider_verify_events_total{"

console = Console(highlight=False, width=160, soft_wrap=True)


async def quiet_twins(stage: Stage, conversations: Sequence[Conversation]) -> Twins:
    """Ask every twin, one at a time."""
    twins: dict[tuple[int, int], Heard] = {}
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(LocalCluster(stage.quiet))
        client = await stack.enter_async_context(Client(cluster.address))
        for conversation in conversations:
            session_id = SessionId("")
            for index, turn in enumerate(conversation.turns if conversation.has_twins else ()):
                heard = twins[conversation.number, index] = Heard(session_id=session_id)
                await heard.listen(client.generate(plain(turn, session_id)))
                session_id = heard.session_id
    return twins


async def soak(asked: argparse.Namespace, stage: Stage, conversations: Sequence[Conversation]) -> Evidence:
    """Ask the twins, then play against the busy cluster, and return what was seen."""
    console.print(f"asking the twins of {len(conversations)} conversations")
    twins = await quiet_twins(stage, conversations)
    async with AsyncExitStack() as stack:
        console.print(f"{len(twins)} twins are known; starting the busy cluster")
        cluster = await stack.enter_async_context(LocalCluster(stage.busy))
        client = await stack.enter_async_context(Client(cluster.address))
        watch = Watch(cluster)

        async def play(seconds: float, name: str) -> Ledger:
            ledger, until_s = Ledger(), time.monotonic() + seconds
            async with asyncio.TaskGroup() as group:
                for number in range(asked.sessions):
                    dice = random.Random(f"{name} {number} of {asked.seed}")
                    seat = Seat(client, conversations, twins, stage.drafters, ledger, dice, until_s)
                    group.create_task(seat.run())
            return ledger

        warming = await play(WARM_UP_S, "warming up")
        rest_before = await watch.at_rest()
        console.print(f"warm; soaking for {asked.minutes:g} minutes")
        sampling = asyncio.create_task(watch.sample())
        ledger = await play(60 * asked.minutes, "client")
        sampling.cancel()
        await asyncio.wait([sampling])
        ledger.wrong += warming.wrong
        return await _evidence(watch, client, ledger, rest_before, asked.max_gap_s)


async def _evidence(watch: Watch, client: Client, ledger: Ledger, rest_before: Rest, max_gap_s: float) -> Evidence:
    """Look at what is left when everybody has gone."""
    rest_after = await watch.back_at(rest_before)
    left = {key.split("{")[1].split("}")[0] for key in await watch.store_keys()}
    for session_id in left:
        await client.delete(SessionId(session_id))
    counts = await watch.metrics("verify-1")
    return Evidence(
        ledger=ledger,
        thirds={name: thirds(samples, WARM_UP) for name, samples in watch.samples.items()},
        rest_before=rest_before,
        rest_after=rest_after,
        orphans=len(left),
        keys_left=len(await watch.store_keys()),
        verifier={name[len(EVENTS) : -1]: value for name, value in counts.items() if name.startswith(EVENTS)},
        complaints=watch.complaints(),
        max_gap_s=max_gap_s,
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Soak, print, write down; return 1 if anything is wrong."""
    asked = _arguments(argv)
    stage = toy_stage(asked.sessions) if asked.model == TOY else real_stage(asked.dtype, asked.sessions)
    conversations = make_conversations(asked.conversations, stage.sizes, asked.seed)
    console.print(f"seed {asked.seed}")
    machine = facts()
    seen = asyncio.run(soak(asked, stage, conversations))
    wrong = findings(seen)
    model = asked.model if asked.model == TOY else f"{asked.model} in {asked.dtype}"
    how = HOW.format(
        minutes=asked.minutes, sessions=asked.sessions, model=model, seed=asked.seed,
        conversations=len(conversations), blocks=stage.small_pool, warm_up=WARM_UP,
    )  # fmt: skip
    text = page(machine, how, seen, wrong)
    console.print(text, markup=False)
    write(asked.name, data(machine, how, seen, wrong), text)
    return 1 if wrong else 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--sessions", type=int, default=16, help="clients at once")
    parser.add_argument("--model", choices=("real", TOY), default="real", help="the packaged model, or the toy")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the packaged model")
    parser.add_argument("--conversations", type=int, default=35, help="how many different ones there are")
    parser.add_argument("--max-gap-s", type=float, default=60.0, help="longest time between two chunks of a generation")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--name", default="soak", help="name of the result files")
    asked = parser.parse_args(argv)
    for name in ("minutes", "sessions", "conversations", "max_gap_s"):
        if not getattr(asked, name) > 0:
            parser.error(f"--{name.replace('_', '-')}: more than 0 is needed, not {getattr(asked, name)}")
    return asked


if __name__ == "__main__":
    sys.exit(main())
