"""A cluster of real processes that serve the toy model, and what its texts must be."""

import asyncio
import functools
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack

import psutil

from outrider.client import NO_RETRY, Client
from outrider.cluster import LocalCluster, ServiceSpec
from outrider.errors import Unavailable
from outrider.generation import Chunk, Finished, GenerationEvent, GenerationRequest, SpeculationChoice, TextPrompt
from outrider.ids import TokenKind
from outrider.messages import SamplingParams
from outrider.model.toy import ToyLanguage, ToyTokenizer
from outrider.noise import Purpose, derive_key, seed_key
from outrider.sampling import coupled_token, greedy_token
from tests.ports import free_port

LANGUAGE = ToyLanguage(len(ToyTokenizer()), 7, 2, 2.0)
"""What the verifiers speak."""
PASS_S = 0.01
"""One pass of the target: long enough for something to happen in the middle of a generation."""
WANTED = {"verify": 2, "draft": 1, "orchestrate": 2}
"""Services of each role in a whole cluster."""
START_S = 100.0
"""Longest wait for a process to start: several import the model libraries at once on few cores."""

_TOY = {"TOY_SEED": "7", "MODEL": "toy", "HEARTBEAT_TTL_S": "3"}
_SETTINGS: Mapping[str, Mapping[str, str]] = {
    "verify": {**_TOY, "TOY_DELAY_S": str(PASS_S), "NUM_BLOCKS": "1024"},
    "draft": {**_TOY, "DRAFTER": "toy", "TOY_DELAY_S": "0.001", "NUM_BLOCKS": "1024", "PROPOSE_LINGER_S": "2"},
    "orchestrate": {"MODEL": "toy", "HEARTBEAT_TTL_S": "3"},
}
_PREFIX = {"verify": "OUTRIDER_VERIFY_", "draft": "OUTRIDER_DRAFT_", "orchestrate": "OUTRIDER_ORCHESTRATOR_"}

GREEDY = SamplingParams(temperature=0.0)
OFF = SpeculationChoice(off=True)
PINNED = SpeculationChoice(gamma=4, window=8)
PROMPT = "the cat sat on "


def ask(text: str = PROMPT, **fields: object) -> GenerationRequest:
    """Return a greedy request of 40 tokens; fields change it."""
    known: dict[str, object] = {
        "max_tokens": 40, "sampling": GREEDY, "ignore_eos": True, "speculation": PINNED, "return_token_origin": True,
    }  # fmt: skip
    return GenerationRequest(TextPrompt(text), **{**known, **fields})  # type: ignore[arg-type]


@functools.cache
def expected(text: str, count: int, seed: int | None = None) -> list[int]:
    """Return the text of a greedy or seeded request straight from the language, without any service."""
    return continued(tuple(ToyTokenizer().encode(text)), count, seed)


def continued(before: Sequence[int], count: int, seed: int | None = None) -> list[int]:
    """Return what comes behind ids, as `expected` does."""
    ids, start, key = list(before), len(before), derive_key(seed_key(seed or 0), Purpose.FIELD)
    while len(ids) < start + count:
        law = LANGUAGE.probs(ids)
        ids.append(greedy_token(law) if seed is None else coupled_token(law, key, 0, len(ids)))
    return ids[start:]


class Heard:
    """What a client hears of one generation."""

    def __init__(self, events: Sequence[GenerationEvent] = ()) -> None:
        self.events = list(events)

    @property
    def chunks(self) -> list[Chunk]:
        return [event for event in self.events if isinstance(event, Chunk)]

    @property
    def token_ids(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.token_ids]

    @property
    def kinds(self) -> list[TokenKind]:
        return [kind for chunk in self.chunks for kind in chunk.kinds]

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def finished(self) -> Finished:
        last = self.events[-1]
        assert isinstance(last, Finished), last
        return last


async def hear(client: Client, request: GenerationRequest) -> Heard:
    """Run a request to its end."""
    return Heard([event async for event in client.generate(request)])


class Toys:
    """The cluster; processes that a test ended are replaced by `repair`, under new names."""

    def __init__(self) -> None:
        self.cluster = LocalCluster([_spec(role, f"{role}-0-{i}") for role, n in WANTED.items() for i in range(n)])
        self.metrics_ports: dict[str, int] = {}
        self._clients: dict[str, Client] = {}
        self._exits = AsyncExitStack()
        self._count = 0

    async def __aenter__(self) -> "Toys":
        await self._exits.enter_async_context(self.cluster)
        await self.repair()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exits.aclose()

    def running(self, role: str) -> list[str]:
        """Return the names of the services of a role that are alive."""
        return [
            name for name, service in self.cluster.services.items() if service.running and service.spec.role == role
        ]

    async def launch(self, role: str) -> str:
        """Start one more service, without waiting for it; return its name."""
        self._count += 1
        name = f"{role}-{self._count}"
        await self.cluster.launch(_spec(role, name))
        return name

    async def repair(self) -> None:
        """Replace what is missing, and wait until every orchestrator sees the whole cluster and no more."""
        for role, wanted in WANTED.items():
            for _ in range(wanted - len(self.running(role))):
                await self.launch(role)
        missing = "nothing was asked yet"
        try:
            async with asyncio.timeout(START_S):
                while missing:
                    missing = await self._missing()
                    await asyncio.sleep(0.1 if missing else 0)
        except TimeoutError:
            logs = "\n".join(f"{name}: {self.log(name)[-2000:]}" for name in self.cluster.services)
            raise AssertionError(f"the cluster is not whole after {START_S:g} s: {missing}\n{logs}") from None

    async def _missing(self) -> str:
        """Say what the registry and the orchestrators do not know yet, or still believe; empty if all is well."""
        for role in WANTED:
            running, known = set(self.running(role)), {each.worker_id for each in await self.cluster.workers(role)}
            if known != running:
                return f"{role}: running {sorted(running)}, announced {sorted(known)}"
        for name in self.running("orchestrate"):
            try:
                (model,) = await (await self.client(name)).models()
            except Unavailable as error:
                return f"{name}: {error}"
            if model.num_verifiers != WANTED["verify"] or model.drafters != ("toy",):
                return f"{name} sees {model}"
        return ""

    async def client(self, name: str = "") -> Client:
        """Return a client of an orchestrator; of any one if it is not named."""
        name = name or self.running("orchestrate")[0]
        if name not in self._clients:
            description = await self.cluster.announced(name)
            client = self._clients[name] = Client(description.address, timeout_s=100, retry=NO_RETRY)
            self._exits.push_async_callback(client.close)
        return self._clients[name]

    async def address(self, name: str) -> str:
        """Return where a service listens."""
        return (await self.cluster.announced(name)).address

    def log(self, name: str) -> str:
        """Return what a service has logged."""
        return self.cluster.services[name].log_path.read_text(errors="replace")

    def metric(self, name: str, sample: str) -> float:
        """Return a sample of a service's metrics endpoint, such as `outrider_kv_cache_usage_perc`."""
        port = self.cluster.services[name].spec.settings[
            f"{_PREFIX[self.cluster.services[name].spec.role]}METRICS_PORT"
        ]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return float(next(line.rpartition(" ")[2] for line in lines if line.startswith(sample)))

    def rss(self, name: str) -> int:
        """Return the resident bytes of a service."""
        return int(psutil.Process(self.cluster.services[name].pid).memory_info().rss)


def _spec(role: str, name: str) -> ServiceSpec:
    prefix = _PREFIX[role]
    settings = {prefix + key: value for key, value in _SETTINGS[role].items()}
    return ServiceSpec(name, role, {**settings, f"{prefix}METRICS_PORT": str(free_port())})
