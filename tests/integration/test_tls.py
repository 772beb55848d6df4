"""TLS on every edge: the same text, foreign peers outside, and files that are replaced while sessions run."""

import asyncio
import logging
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from draft_service.app import DraftApp
from orchestrator.app import OrchestratorApp
from orchestrator.channels import Channels
from orchestrator.config import OrchestratorSettings
from outrider.client import NO_RETRY, Client
from outrider.errors import PermissionDenied, Unavailable
from outrider.generation import GenerationRequest, SpeculationChoice, TextPrompt
from outrider.messages import SamplingParams
from outrider.model.toy import ToyLanguage, ToyTokenizer
from outrider.process import run_service
from outrider.rpc import Broken, ClientTls, RpcServer, channel, client_stream, client_tls, rpc_errors, transport
from outrider.sampling import greedy_token
from outrider.v1 import draft_pb2, draft_pb2_grpc, types_pb2, verify_pb2, verify_pb2_grpc
from tests.authority import Authority, Identity
from tests.integration.cluster_bench import Bench, Running, hear, until
from verify_service.app import VerifyApp

PROMPT = "the cat sat on "
CLOSED = "perhaps it wants TLS, or does not accept the certificate shown"


def ask(**fields: Any) -> GenerationRequest:
    known: dict[str, Any] = {
        "max_tokens": 40, "sampling": SamplingParams(temperature=0.0), "ignore_eos": True,
        "speculation": SpeculationChoice(gamma=4, window=8),
    }  # fmt: skip
    return GenerationRequest(TextPrompt(PROMPT), **{**known, **fields})


def said(count: int) -> list[int]:
    """What the toy says, straight from its language."""
    language, ids = ToyLanguage(len(ToyTokenizer()), 7, 2, 2.0), ToyTokenizer().encode(PROMPT)
    start = len(ids)
    while len(ids) < start + count:
        ids.append(greedy_token(language.probs(ids)))
    return ids[start:]


@dataclass
class Parts:
    """A cluster whose edges all speak mutual TLS, and a client with a certificate."""

    authority: Authority
    outside: Authority
    bench: Bench
    verifier: Running
    verify_app: VerifyApp
    drafter: Running
    draft_app: DraftApp
    app: OrchestratorApp
    client: Client


class Cluster:
    """Makes it, with settings that a test changes."""

    def __init__(self, store_url: str, folder: Path) -> None:
        self.authority, self.outside = Authority(folder / "cluster"), Authority(folder / "clients")
        self.store_url = store_url
        self._exits = AsyncExitStack()

    async def __aenter__(self) -> "Cluster":
        self.bench = await self._exits.enter_async_context(Bench(self.store_url))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exits.aclose()

    async def parts(
        self, *, verify: dict[str, Any] | None = None, draft: dict[str, Any] | None = None, **orchestrate: Any
    ) -> Parts:
        verifier, verify_app = await self.bench.verifier(
            **{**self.authority.issue("verifier", "127.0.0.1").settings(), **(verify or {})}
        )
        drafter, draft_app = await self.bench.drafter(
            **{**self.authority.issue("draft", "127.0.0.1").settings(), **(draft or {})}
        )
        shown = self.outside.issue("front", "127.0.0.1")
        served = {"serve_tls_cert": shown.cert, "serve_tls_key": shown.key, "serve_tls_client_ca": shown.ca}
        mine = {**self.authority.issue("orchestrator").settings(), **served, **orchestrate}
        _, app, _ = await self.bench.orchestrator([verifier], [drafter], **mine)
        client = await self.client(app, self.outside.issue("somebody"))
        return Parts(self.authority, self.outside, self.bench, verifier, verify_app, drafter, draft_app, app, client)

    async def client(self, app: OrchestratorApp, shown: Identity | None) -> Client:
        ca = self.outside.issue("reader").ca
        tls = client_tls(ca, shown.cert, shown.key) if shown else client_tls(ca)
        client = Client(app.address, timeout_s=60, retry=NO_RETRY, tls=tls)
        self._exits.push_async_callback(client.close)
        return client


@pytest.fixture
async def cluster(valkey_url: str, tmp_path: Path) -> AsyncIterator[Cluster]:
    async with Cluster(valkey_url, tmp_path) as made:
        yield made


def tls_of(identity: Identity | None, ca: str, server_name: str = "") -> ClientTls:
    return client_tls(ca, identity.cert if identity else "", identity.key if identity else "", server_name)


async def describe_verifier(address: str, tls: ClientTls | None) -> Any:
    async with channel(address, tls=tls) as to:
        with rpc_errors():
            stub = verify_pb2_grpc.VerifyServiceStub(to)
            return await stub.Describe(verify_pb2.VerifyServiceDescribeRequest(), timeout=60)


async def propose(address: str, tls: ClientTls, hello: verify_pb2.ProposeHello) -> Any:
    """Say hello and return the first answer; the stream is left at once."""
    async with channel(address, tls=tls) as to:
        call = verify_pb2_grpc.VerifyServiceStub(to).Propose(timeout=60)
        async with client_stream(call, _as_it_is, _as_it_is) as stream:
            stream.send(verify_pb2.ProposeRequest(hello=hello))
            answer = await stream.receive()
            if isinstance(answer, Broken):
                raise answer.error
            return answer


def _as_it_is(message: Any) -> Any:
    return message


def hello_of(parts: Parts, worker_id: str) -> verify_pb2.ProposeHello:
    known = parts.verify_app.describe().vocabulary
    return verify_pb2.ProposeHello(
        worker_id=worker_id, vocabulary=types_pb2.Vocabulary(fingerprint=known.fingerprint, size=known.size)
    )


# --- the same text ------------------------------------------------------------------------------------------------


async def test_with_tls_on_every_edge_the_text_is_the_targets(cluster: Cluster) -> None:
    parts = await cluster.parts()
    heard = await hear(parts.client, ask())
    assert heard.token_ids == said(40)
    assert heard.finished.figures.num_accepted > 0, "proposals came through, so that edge was used too"


async def test_workers_are_known_by_a_name_instead_of_their_address_where_that_is_set(cluster: Cluster) -> None:
    named = {"verify": cluster.authority.issue("verifier-1", "verifier"), "draft": cluster.authority.issue("draft")}
    parts = await cluster.parts(
        verify=named["verify"].settings(),
        draft={**named["draft"].settings(), "tls_verifier_name": "verifier"},
        tls_verifier_name="verifier",
        tls_draft_name="draft",
    )
    heard = await hear(parts.client, ask())
    assert heard.token_ids == said(40)
    assert heard.finished.figures.num_accepted > 0


async def test_a_draft_worker_that_poses_as_a_verifier_is_refused_by_its_name(cluster: Cluster, caplog: Any) -> None:
    """The registry is no proof: whoever writes to it could send prompts to any address of the cluster."""
    posing = cluster.authority.issue("draft", "127.0.0.1").settings()
    parts = await cluster.parts(verify=posing, tls_verifier_name="verifier")
    with pytest.raises(Unavailable):
        await hear(parts.client, ask())
    assert any("verify worker at" in each and "has another name" in each for each in caplog.messages)


# --- who stays outside --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shown", ["nothing", "foreign", "plaintext"])
async def test_a_peer_without_a_certificate_of_the_cluster_reaches_no_worker(cluster: Cluster, shown: str) -> None:
    parts = await cluster.parts()
    ca = cluster.authority.issue("orchestrator").ca
    foreign = cluster.outside.issue("orchestrator")
    tls = {"nothing": tls_of(None, ca), "foreign": tls_of(foreign, ca), "plaintext": None}[shown]
    began = time.monotonic()
    with pytest.raises(Unavailable, match=CLOSED):
        await describe_verifier(parts.verifier.app.address, tls)
    with pytest.raises(Unavailable, match=CLOSED):
        async with channel(parts.drafter.app.address, tls=tls) as to:
            with rpc_errors():
                stub = draft_pb2_grpc.DraftServiceStub(to)
                await stub.Describe(draft_pb2.DraftServiceDescribeRequest(), timeout=60)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("shown", [None, "foreign"])
async def test_a_client_without_a_certificate_of_the_clients_ca_is_refused(cluster: Cluster, shown: str | None) -> None:
    parts = await cluster.parts()
    foreign = cluster.authority.issue("somebody") if shown else None
    with pytest.raises(Unavailable, match=CLOSED):
        await hear(await cluster.client(parts.app, foreign), ask())


async def test_without_a_clients_ca_any_client_that_knows_the_orchestrators_ca_may_come(cluster: Cluster) -> None:
    parts = await cluster.parts(serve_tls_client_ca="")
    heard = await hear(await cluster.client(parts.app, None), ask(max_tokens=5))
    assert heard.token_ids == said(5)


async def test_a_certificate_opens_only_the_calls_of_its_role_and_is_named_in_the_log(
    cluster: Cluster, caplog: Any
) -> None:
    parts = await cluster.parts()
    address, ca = parts.verifier.app.address, cluster.authority.issue("reader").ca
    draft, orchestrator = (tls_of(cluster.authority.issue(name), ca) for name in ("draft-7", "orchestrator.example"))
    refused = "names draft-7 may not call /outrider.v1.VerifyService/Describe; OUTRIDER_VERIFY_TLS_ORCHESTRATORS allows"
    with pytest.raises(PermissionDenied, match=refused):
        await describe_verifier(address, draft)
    assert any("refused ipv4:127.0.0.1:" in each and refused in each for each in caplog.messages)
    assert (await describe_verifier(address, orchestrator)).worker.worker_id == parts.verify_app.worker_id

    hello = hello_of(parts, "draft-7")
    with pytest.raises(PermissionDenied, match=r"names orchestrator.example may not call .*/Propose"):
        await propose(address, orchestrator, hello)
    assert (await propose(address, draft, hello)).welcome.worker_id == parts.verify_app.worker_id

    async with channel(address, tls=draft) as to:
        call = verify_pb2_grpc.VerifyServiceStub(to).Decode(timeout=60)
        with pytest.raises(PermissionDenied, match=r"names draft-7 may not call .*/Decode"), rpc_errors():
            await call.read()
    async with channel(parts.drafter.app.address, tls=draft) as to:
        with pytest.raises(PermissionDenied, match="OUTRIDER_DRAFT_TLS_ORCHESTRATORS"), rpc_errors():
            await draft_pb2_grpc.DraftServiceStub(to).Draft(timeout=60).read()


async def test_an_orchestrator_of_the_wrong_name_is_told_so_and_does_not_hang(cluster: Cluster, caplog: Any) -> None:
    parts = await cluster.parts(**cluster.authority.issue("draft-9").settings())
    with pytest.raises(Unavailable, match="no verifier"):
        await hear(parts.client, ask())
    assert any("verify worker at" in each and "names draft-9 may not call" in each for each in caplog.messages)


async def test_a_draft_worker_that_may_not_propose_costs_its_proposals_only(cluster: Cluster, caplog: Any) -> None:
    parts = await cluster.parts(verify={"tls_draft_workers": ("somebody-else",)})
    heard = await hear(parts.client, ask())
    assert heard.token_ids == said(40)
    assert heard.finished.figures.num_accepted == 0
    assert any("refuses this worker" in each and "TLS_DRAFT_WORKERS" in each for each in caplog.messages)


async def test_a_foreign_ca_on_the_orchestrators_side_is_one_sentence(cluster: Cluster, caplog: Any) -> None:
    mine = cluster.outside.issue("orchestrator").settings()
    parts = await cluster.parts(**mine)
    with pytest.raises(Unavailable, match="no verifier"):
        await hear(parts.client, ask())
    told = [each for each in caplog.messages if each.startswith("verify worker at")]
    assert len(told) == 1, "told once, not with each of many tries"
    assert "not of a CA in the CA file used here" in told[0]


async def test_a_name_that_the_certificate_has_not_is_one_sentence(cluster: Cluster) -> None:
    parts = await cluster.parts()
    ours = cluster.authority.issue("orchestrator")
    with pytest.raises(Unavailable, match="has another name than the one that was looked for"):
        await describe_verifier(parts.verifier.app.address, tls_of(ours, ours.ca, "elsewhere"))


async def test_tls_to_a_server_without_it_is_one_sentence(cluster: Cluster) -> None:
    verifier, _ = await cluster.bench.verifier()
    ours = cluster.authority.issue("orchestrator")
    with pytest.raises(Unavailable, match="the server speaks no TLS"):
        await describe_verifier(verifier.app.address, tls_of(ours, ours.ca))


@pytest.mark.parametrize("tls", [True, False])
async def test_a_connection_that_says_nothing_is_closed(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tls: bool
) -> None:
    monkeypatch.setattr(transport, "HANDSHAKE_TIMEOUT_MS", 300)
    settings = cluster.authority.issue("verifier", "127.0.0.1").settings() if tls else {}
    verifier, _ = await cluster.bench.verifier(**settings)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(verifier.app.address.rpartition(":")[2]))
    async with asyncio.timeout(60):
        while await reader.read(1024):
            pass  # plaintext servers greet
    writer.close()
    await writer.wait_closed()


# --- one worker does not speak for another ------------------------------------------------------------------------


async def test_a_worker_cannot_take_over_the_stream_of_another_certificate(cluster: Cluster, caplog: Any) -> None:
    parts = await cluster.parts()
    ca, address = cluster.authority.issue("reader").ca, parts.verifier.app.address
    await hear(parts.client, ask())
    victim = parts.draft_app.worker_id
    with pytest.raises(PermissionDenied, match=f"worker {victim}: that worker has an open stream under another"):
        await propose(address, tls_of(cluster.authority.issue("draft-2"), ca), hello_of(parts, victim))
    assert any("refused a Propose stream" in each and "draft-2" in each for each in caplog.messages)
    heard = await hear(parts.client, ask())
    assert heard.token_ids == said(40)
    assert heard.finished.figures.num_accepted > 0, "its own stream is still there"


async def test_where_ids_are_certified_a_worker_needs_its_own_name(cluster: Cluster) -> None:
    parts = await cluster.parts(verify={"certified_worker_ids": True}, draft={"worker_id": "draft"})
    ca, address = cluster.authority.issue("reader").ca, parts.verifier.app.address
    assert (await hear(parts.client, ask())).finished.figures.num_accepted > 0
    own = tls_of(cluster.authority.issue("draft-3"), ca)
    assert (await propose(address, own, hello_of(parts, "draft-3"))).HasField("welcome")
    with pytest.raises(PermissionDenied, match="worker draft-4: that id is no name of it"):
        await propose(address, own, hello_of(parts, "draft-4"))


# --- files that change --------------------------------------------------------------------------------------------


async def test_certificates_and_ca_are_replaced_while_a_session_runs_and_nothing_is_lost(cluster: Cluster) -> None:
    """First both CAs are trusted, then certificates change, then the old CA goes; nobody restarts."""
    parts = await cluster.parts(verify={"toy_delay_s": 0.02})
    old = cluster.authority
    outdated = old.issue("orchestrator-2")
    running = asyncio.create_task(hear(parts.client, ask(max_tokens=400)))
    await until(lambda: parts.app.sessions is not None and len(parts.app.sessions) == 1)

    new = Authority(old.folder)
    for bundle, issuer in ((old.bundle + new.bundle, old), (old.bundle + new.bundle, new), (new.bundle, new)):
        old.bundle = new.bundle = bundle
        for name in ("verifier", "draft"):
            issuer.issue(name, "127.0.0.1")
        issuer.issue("orchestrator")
        second = await hear(parts.client, ask(max_tokens=20))
        assert second.token_ids == said(20)
        assert second.finished.figures.num_accepted > 0
    assert not running.done(), "the session has seen all three steps"
    assert (await running).token_ids == said(400)
    current = Identity(*(str(old.folder / "orchestrator" / file) for file in ("tls.crt", "tls.key", "ca.crt")))
    await describe_verifier(parts.verifier.app.address, tls_of(current, current.ca))
    with pytest.raises(Unavailable, match=CLOSED):
        await describe_verifier(parts.verifier.app.address, tls_of(outdated, current.ca))


async def test_a_replaced_channel_serves_its_streams_to_their_end_and_is_then_closed(cluster: Cluster) -> None:
    parts = await cluster.parts()
    address = parts.verifier.app.address
    ours = cluster.authority.issue("orchestrator")
    channels = Channels({"verify": tls_of(ours, ours.ca)}, retired_s=0.2)
    first = channels.to(address, "verify")
    assert channels.to(address, "verify") is first
    call = verify_pb2_grpc.VerifyServiceStub(first).Decode()
    await call.wait_for_connection()
    cluster.authority.issue("orchestrator")
    second = channels.to(address, "verify")
    assert second is not first
    assert channels.num_retired == 1
    assert not call.done()
    await verify_pb2_grpc.VerifyServiceStub(second).Describe(verify_pb2.VerifyServiceDescribeRequest(), timeout=60)
    await until(lambda: channels.num_retired == 0 and call.done())
    await channels.close()


async def test_a_server_keeps_its_whole_pair_while_another_is_half_written(cluster: Cluster, caplog: Any) -> None:
    parts = await cluster.parts()
    ours = cluster.authority.issue("orchestrator")
    tls, coming = tls_of(ours, ours.ca), cluster.authority.issue("coming", "127.0.0.1")
    certificate = cluster.authority.folder / "verifier" / "tls.crt"
    shutil.copy(coming.cert, certificate)
    assert (await describe_verifier(parts.verifier.app.address, tls)).worker.role == types_pb2.WORKER_ROLE_VERIFY
    assert any("OUTRIDER_VERIFY_TLS_KEY" in each and "stays in force" in each for each in caplog.messages)


# --- plaintext ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("listen", "warned"), [("127.0.0.1:0", False), ("localhost:0", False), ("[::1]:0", False), ("0.0.0.0:0", True)]
)
async def test_plaintext_beyond_this_machine_is_warned_of_once(listen: str, warned: bool, caplog: Any) -> None:
    server = RpcServer()
    await server.start(listen, [])
    await server.stop(0)
    told = [each for each in caplog.messages if "plaintext" in each]
    assert len(told) == (1 if warned else 0)


async def test_tls_beyond_this_machine_is_not_warned_of(cluster: Cluster, caplog: Any) -> None:
    verifier, _ = await cluster.bench.verifier(
        listen="0.0.0.0:0", **cluster.authority.issue("verifier", "127.0.0.1").settings()
    )
    assert verifier.app.address.startswith("0.0.0.0:")
    assert not any("plaintext" in each for each in caplog.messages)


# --- files that cannot be used ------------------------------------------------------------------------------------


@pytest.fixture
def root_logger() -> Iterator[None]:
    """A service sets up logging for its whole process; give it back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.usefixtures("root_logger")
@pytest.mark.parametrize(("key", "told"), [("", "a file, since"), ("gone.key", "No such file or directory")])
async def test_a_service_whose_files_cannot_be_used_ends_with_status_2_and_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], key: str, told: str
) -> None:
    identity = Authority(tmp_path).issue("orchestrator")
    for name, value in {"CERT": identity.cert, "CA": identity.ca, "KEY": key}.items():
        monkeypatch.setenv(f"OUTRIDER_ORCHESTRATOR_TLS_{name}", value)
    capfd.readouterr()
    assert await asyncio.to_thread(run_service, "orchestrator", OrchestratorSettings, OrchestratorApp) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "OUTRIDER_ORCHESTRATOR_TLS_KEY: " in line
    assert told in line
