"""What more draft workers bring while sessions run: `python -m benchmarks.scale`.

Toy models whose passes take a known time, as real processes. Sixteen sessions run without a pause; one draft worker has
places for six of them, so the others decode plain. Two more workers join, nobody is told, and the sessions that lacked
one are attached to them. Tokens are counted before and after, and every text is compared with the language's own.
"""

import argparse
import asyncio
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from functools import cache

from rich.console import Console

from benchmarks.machine import facts
from benchmarks.results import facts_list, table, write
from benchmarks.serving import toy_specs
from outrider.client import Client
from outrider.cluster import LocalCluster, ServiceSpec
from outrider.generation import Chunk, GenerationRequest, SpeculationChoice, TextPrompt
from outrider.messages import SamplingParams
from outrider.model.toy import ToyLanguage, ToyTokenizer
from outrider.sampling import greedy_token

VERIFIERS = 2
VERIFY_S = 0.2
"""One pass of the toy target, of 32 rows at most: eight sessions with four rows each."""
DRAFT_S = 0.005
AGREEMENT = 0.95
PLACES = 6
"""Sessions that one draft worker takes."""
SESSIONS = 16
WORKERS = (1, 3)
TOKENS = 64
"""Of each generation; the next one follows at once."""
SPECULATION = SpeculationChoice(gamma=3, restart_gamma=3, window=6)
WINDOW_S = 20.0
QUICK_WINDOW_S = 5.0
SETTLE_S = 5.0
"""From the moment that a worker has joined to the count: more than a search for one takes."""

HOW = """{verifiers} toy targets ({verify_ms:g} ms a pass of at most 32 rows), toy drafts ({draft_ms:g} ms a token,
agreeing in {agreement:.0%} of places), {sessions} sessions without a pause, greedy, three draft tokens a proposal,
{places} places on each draft worker, so that with one of them {plain} sessions decode plain. Tokens that reached
clients in {window_s:g} s, before two workers joined and {settle_s:g} s after. Everything shares the machine's cores."""

console = Console(highlight=False, width=160)
LANGUAGE = ToyLanguage(len(ToyTokenizer()), 0, 2, 2.0)


@dataclass
class Tally:
    """What the sessions have brought."""

    tokens: int = 0
    texts: int = 0
    wrong: int = 0


@dataclass(frozen=True, slots=True)
class Measured:
    """One count."""

    workers: int
    tokens_per_s: float


@cache
def text_of(prompt: str) -> list[int]:
    """Return what has to come behind a prompt."""
    ids = list(ToyTokenizer().encode(prompt))
    start = len(ids)
    while len(ids) < start + TOKENS:
        ids.append(greedy_token(LANGUAGE.probs(ids)))
    return ids[start:]


async def session(client: Client, number: int, tally: Tally, over: asyncio.Event) -> None:
    """Generate until it is over."""
    prompt = f"session {number} "
    request = GenerationRequest(
        TextPrompt(prompt), max_tokens=TOKENS, sampling=SamplingParams(temperature=0.0), ignore_eos=True,
        speculation=SPECULATION,
    )  # fmt: skip
    while not over.is_set():
        said: list[int] = []
        async for event in client.generate(request):
            if isinstance(event, Chunk):
                said += event.token_ids
                tally.tokens += len(event.token_ids)
        tally.texts += 1
        tally.wrong += said != text_of(prompt)


async def count(tally: Tally, workers: int, window_s: float) -> Measured:
    """Count what comes in a while."""
    before, begun_s = replace(tally), time.perf_counter()
    await asyncio.sleep(window_s)
    seconds = time.perf_counter() - begun_s
    return Measured(workers, (tally.tokens - before.tokens) / seconds)


def specs() -> tuple[list[ServiceSpec], ServiceSpec]:
    """Return the cluster, and the draft worker of which there are more later."""
    verify, draft, orchestrate = toy_specs(AGREEMENT, DRAFT_S, VERIFY_S)
    draft = replace(draft, settings={**draft.settings, "OUTRIDER_DRAFT_MAX_SESSIONS": str(PLACES)})
    verifiers = [replace(verify, name=f"verify-{number + 1}") for number in range(VERIFIERS)]
    return [*verifiers, draft, orchestrate], draft


async def measure(window_s: float) -> tuple[list[Measured], Tally]:
    """Run the sessions, and count with few and with more draft workers."""
    cluster_specs, draft = specs()
    tally, over = Tally(), asyncio.Event()
    async with AsyncExitStack() as exits:
        cluster = await exits.enter_async_context(LocalCluster(cluster_specs))
        client = await exits.enter_async_context(Client(cluster.address))
        sessions = [asyncio.create_task(session(client, number, tally, over)) for number in range(SESSIONS)]
        await asyncio.sleep(SETTLE_S)
        found = [await count(tally, WORKERS[0], window_s)]
        for number in range(WORKERS[0], WORKERS[1]):
            name = f"draft-{number + 1}"
            await cluster.launch(replace(draft, name=name))
            await cluster.announced(name)
        await asyncio.sleep(SETTLE_S)
        found.append(await count(tally, WORKERS[1], window_s))
        over.set()
        await asyncio.gather(*sessions)
    return found, tally


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="count for less long")
    quick = parser.parse_args().quick
    window_s = QUICK_WINDOW_S if quick else WINDOW_S
    found, tally = asyncio.run(measure(window_s))
    base = found[0].tokens_per_s
    rows = [(each.workers, f"{each.tokens_per_s:.0f}", f"{each.tokens_per_s / base:.2f}") for each in found]
    header = ("draft workers", "tokens/s", "times one worker's")
    how = HOW.format(
        verifiers=VERIFIERS,
        verify_ms=VERIFY_S * 1e3, draft_ms=DRAFT_S * 1e3, agreement=AGREEMENT, sessions=SESSIONS, places=PLACES,
        window_s=window_s, settle_s=SETTLE_S, plain=SESSIONS - PLACES,
    )  # fmt: skip
    machine, shown = facts(), table(header, rows)
    texts = f"{tally.texts - tally.wrong} of {tally.texts} texts are the language's own."
    page = "\n\n".join(("# Draft workers join while sessions run", facts_list(machine), how, shown, texts)) + "\n"
    measured = [asdict(each) for each in found]
    data = {"machine": machine, "measured": measured, "texts": tally.texts, "wrong": tally.wrong}
    console.print(shown)
    console.print(texts)
    console.print(f"written to {write('scale_quick' if quick else 'scale', data, page)}")
    if tally.wrong:
        sys.exit(1)


if __name__ == "__main__":
    main()
