"""The commands of `outrider`."""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, CycloptsError, CycloptsPanel, Parameter, UnknownCommandError
from rich.console import Console
from rich.panel import Panel

from outrider.address import ADDRESS, is_address
from outrider.cli.ask import Ask
from outrider.cli.keys import app as keys_app
from outrider.cli.local import AUTO, LocalSettings, free_ports, stages
from outrider.cli.ranges import check_listen, check_prompt, check_range
from outrider.cli.running import go
from outrider.cli.show import Answer, comparison, figures_table, legend
from outrider.client import RETRY, Client, ClientTls, Retry, client_tls
from outrider.cluster import LocalCluster
from outrider.errors import InvalidRequest, OutriderError
from outrider.generation import GenerationRequest, SpeculationChoice
from outrider.model.names import DEFAULT_MODEL, locate
from outrider.redaction import redacted


def wrong_use(error: CycloptsError) -> Panel:
    """Say what is wrong with a command line; of commands that exist, name all."""
    said = str(error)
    if isinstance(error, UnknownCommandError) and error.app is not None:
        commands = (name for name in error.app if not name.startswith("-"))
        said = f"{said.partition(' Available commands:')[0]} Available commands: {', '.join(commands)}."
    return CycloptsPanel(said)


app = App(
    name="outrider",
    help="Speculative decoding as a distributed system: faster, and the same text.",
    error_formatter=wrong_use,
)
app.command(keys_app)
app.command("outrider.cli.fetch:fetch", help="Bring models into a folder, for services that fetch nothing.")
app.command("outrider.cli.health:app", name="health", help="Ask a service whether it serves.")
app.command("outrider.cli.drafters:app", name="drafters", help="Make, measure and choose drafters.")
app.command("outrider.cli.shadow.command:shadow", help="Measure a candidate drafter on sessions that are over.")
app.command("outrider.cli.top.command:top", help="Show what the workers of a cluster do, live.")
app.command("outrider.cli.replay:replay", help="Run records of the flight recorder again, and compare.")
app.command("outrider.cli.plan:plan", help="Say what a drafter would bring: speed-up, best gamma, when to switch off.")
app.command("simulator.command:app", name="simulate", help="Run a cluster in simulated time, before there is one.")
console = Console(highlight=False)
notes = Console(stderr=True, highlight=False)
"""For what is said beside an answer, which has standard output to itself."""

MOST_WAIT_S = 86_400
"""Longest that a command goes on trying."""
WARM_UP_TOKENS = 8
"""Tokens generated and thrown away before a comparison, so that neither side pays for first use."""


Prompt = Annotated[str, Parameter(allow_leading_hyphen=True, validator=check_prompt)]
"""May begin with a hyphen; options are still options, and one that does not exist is no prompt."""


@Parameter(name="*")
@dataclass(frozen=True)
class Models:
    """What a local cluster serves."""

    target: str = DEFAULT_MODEL
    """Target: the packaged model's name, a folder, a .gguf file, or a hub id."""
    draft: str = AUTO
    """auto (lookup, and behind it the trained draft if one ships for the target), prompt-lookup, off, layers:0,1,29 (of
    the target), feature, feature:DIR, medusa:DIR (trained for it), a model, or one of those behind prompt-lookup+."""
    dtype: Literal["bfloat16", "float32", "float16"] = "bfloat16"
    """Type of weights and KV."""
    threads: int = 0
    """Threads per model; 0: half of the cores each."""


@Parameter(name="*")
@dataclass(frozen=True)
class Tls:
    """How to speak to an orchestrator that serves TLS; without any of these the command speaks plaintext."""

    ca: str = ""
    """File with the CAs that the orchestrator's certificate must be of."""
    cert: str = ""
    """File with a certificate of ours, where the orchestrator asks for one."""
    key: str = ""
    """File with that certificate's key."""
    server_name: str = ""
    """Name in the orchestrator's certificate; unset: the host of its address."""

    def client(self) -> ClientTls | None:
        """Read the files; None: plaintext.

        Raises:
            InvalidRequest: one of them cannot be used.
        """
        wanted = self.ca or self.cert or self.key or self.server_name
        return client_tls(self.ca, self.cert, self.key, self.server_name) if wanted else None


DEFAULT_MODELS = Models()
DEFAULT_ASK = Ask()
DEFAULT_TLS = Tls()


def main() -> None:
    """Run the command line; an error of Outrider's own is one line on standard error and status 1."""
    try:
        app()
    except OutriderError as error:
        notes.print(f"[red]error:[/red] {redacted(error.message)}", soft_wrap=True)
        sys.exit(1)


@app.command
def run(
    prompt: Prompt,
    /,
    *,
    models: Models = DEFAULT_MODELS,
    ask: Ask = DEFAULT_ASK,
    compare: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Start a local cluster, stream the answer to PROMPT, and show how it went.

    Args:
        prompt: What to ask; "-" reads standard input.
        models: What is served.
        ask: What is asked for.
        compare: Run the twin, the same request without speculation, too.
    """
    settings = LocalSettings(
        models.target, models.draft, models.dtype, models.threads, follows_predictions=ask.expect is not None
    )
    go(_run(settings, ask.request(prompt), origins=ask.origins, compare=compare))


@app.command
def generate(
    prompt: Prompt,
    /,
    *,
    address: str = "127.0.0.1:7400",
    api_key: str | None = None,
    wait_s: float | None = None,
    tls: Tls = DEFAULT_TLS,
    ask: Ask = DEFAULT_ASK,
) -> None:
    """Stream the answer to PROMPT from a cluster that is running.

    Args:
        prompt: What to ask; "-" reads standard input.
        address: host:port of an orchestrator; of several, comma-separated, another one goes on where one is lost.
        api_key: Key to show; unset: what OUTRIDER_API_KEY holds, which other users of this machine cannot see.
        wait_s: Seconds without a new token, as long as nobody answers, before it gives up; unset: 30, or 30 tries.
        tls: How to speak to it.
        ask: What is asked for.
    """
    addresses, retry = _addresses(address), RETRY if wait_s is None else _trying_for(wait_s)
    go(_generate(addresses, api_key, tls.client(), retry, ask.request(prompt), origins=ask.origins))


@app.command
def up(
    *,
    models: Models = DEFAULT_MODELS,
    store: str = "",
    data: Path | None = None,
    listen: str = "127.0.0.1:7400",
    http: str = "127.0.0.1:8000",
) -> None:
    """Start a local cluster that stays until it is interrupted.

    Args:
        models: What is served.
        store: URL of a Redis or Valkey, whose other workers are used too; unset: an embedded one.
        data: Folder in which the embedded store keeps the sessions over restarts; unset: they end with it.
        listen: host:port of the orchestrator.
        http: host:port of OpenAI's API and the web page; off: neither.
    """
    if store and data is not None:
        raise InvalidRequest("data", str(data), "a folder for the embedded store, and so no --store beside it")
    http = "" if http == "off" else http
    check_listen("listen", listen)
    if http:
        check_listen("http", http)
    settings = LocalSettings(
        models.target,
        models.draft,
        models.dtype,
        models.threads,
        store_url=store,
        listen=listen,
        http_listen=http,
        data_dir=data,
        metrics_ports=free_ports(3),
        follows_predictions=True,
    )
    go(_up(settings))


@app.command
def doctor(*, models: Models = DEFAULT_MODELS) -> None:
    """Check this machine: environment, models, pairing, and whether rows are bit-identical here.

    Args:
        models: What would be served.
    """
    from outrider.cli.doctor import examine  # noqa: PLC0415 - loads torch models, which no other command needs

    settings = LocalSettings(models.target, models.draft, models.dtype, models.threads)
    if not examine(console, settings):
        sys.exit(1)


@asynccontextmanager
async def _local(settings: LocalSettings) -> AsyncIterator[LocalCluster]:
    """Convert the model if it has to be, then start everything; progress bars while it lasts."""
    with stages(notes) as shown:
        await asyncio.to_thread(locate, settings.target, shown.update)
        cluster = LocalCluster(
            settings.specs(), store_url=settings.store_url, data_dir=settings.data_dir, on_progress=shown.waiting
        )
        await cluster.__aenter__()
        shown.done()
    try:
        yield cluster
    finally:
        await cluster.__aexit__(None, None, None)


async def _run(settings: LocalSettings, request: GenerationRequest, *, origins: bool, compare: bool) -> None:
    async with _local(settings) as cluster, Client(cluster.address) as client:
        if compare:
            await _ask(client, replace(request, max_tokens=WARM_UP_TOKENS), Answer(console, notes, quiet=True))
        answer = await _ask(client, request, Answer(console, notes, origins=origins))
        _show(answer, "with speculation" if compare else "", origins)
        if compare:
            twin = replace(request, speculation=SpeculationChoice(off=True), prediction=None)
            repeatable = request.seed is not None or request.sampling.temperature == 0.0
            _compare(answer, await _ask(client, twin, Answer(console, notes, quiet=True)), repeatable=repeatable)


def _addresses(text: str) -> tuple[str, ...]:
    """Take comma-separated addresses apart.

    Raises:
        InvalidRequest: there is none, or one of them is none.
    """
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    if not found or not all(map(is_address, found)):
        raise InvalidRequest("address", text, f"{ADDRESS}, of an orchestrator, or several, comma-separated")
    return found


def _trying_for(wait_s: float) -> Retry:
    """Return the retry that goes on for so long, however many tries that makes.

    Raises:
        InvalidRequest: it is out of its range.
    """
    check_range("wait_s", wait_s, 0, MOST_WAIT_S)
    return Retry(max_attempts=sys.maxsize, max_total_s=wait_s)


async def _generate(
    addresses: Sequence[str],
    api_key: str | None,
    tls: ClientTls | None,
    retry: Retry,
    request: GenerationRequest,
    *,
    origins: bool,
) -> None:
    async with Client(addresses, retry=retry, tls=tls, api_key=api_key) as client:
        _show(await _ask(client, request, Answer(console, notes, origins=origins)), "", origins)


async def _up(settings: LocalSettings) -> None:
    async with _local(settings) as cluster:
        # In the background of a script Ctrl-C does not reach it.
        where = f"{settings.target} at {cluster.address}; logs in {cluster.folder}"
        console.print(f"serving {where}; Ctrl-C or SIGTERM stops it", soft_wrap=True)
        if settings.http_listen:
            console.print(f"OpenAI's API at http://{settings.http_listen}/v1, a page to look at in front of it")
        store = redacted(cluster.store_url)
        console.print(f"its store is {store}: outrider top --store {store}", soft_wrap=True)
        console.print(f'try: outrider generate --address {cluster.address} "What is an outrider?"')
        while True:
            await asyncio.sleep(1)
            for service in cluster.services.values():
                service.require_running()


async def _ask(client: Client, request: GenerationRequest, answer: Answer) -> Answer:
    async for event in client.generate(request):
        answer.take(event)
    return answer


def _show(answer: Answer, title: str, origins: bool) -> None:
    console.print()
    notes.print()
    if origins:
        notes.print(legend())
    if answer.finished is not None:
        notes.print(figures_table(answer.finished, title))


def _compare(answer: Answer, twin: Answer, *, repeatable: bool) -> None:
    """Show the twin's figures, and how the two compare."""
    if answer.finished is None or twin.finished is None:
        return
    notes.print()
    notes.print(figures_table(twin.finished, "the twin, without speculation"))
    notes.print()
    for line in comparison(answer, twin, repeatable=repeatable):
        notes.print(line)
    if repeatable and answer.token_ids != twin.token_ids:
        sys.exit(1)
