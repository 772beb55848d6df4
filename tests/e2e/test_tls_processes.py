"""TLS between real processes, from their environment."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from outrider.client import Client, client_tls
from outrider.cluster import LocalCluster, ServiceSpec
from tests.authority import Authority
from tests.e2e.test_cli import outrider
from tests.e2e.toys import ask, expected, hear

pytestmark = [pytest.mark.timeout(200), pytest.mark.slow]

_TOY = {"MODEL": "toy", "TOY_SEED": "7", "NUM_BLOCKS": "64"}


def spec(name: str, role: str, prefix: str, settings: Mapping[str, str]) -> ServiceSpec:
    return ServiceSpec(name, role, {f"OUTRIDER_{prefix}_{key.upper()}": value for key, value in settings.items()})


def secret_of(path: str) -> str:
    """Return a line of a key."""
    return Path(path).read_text().splitlines()[1]


async def test_real_processes_speak_tls_and_the_command_line_asks_them(tmp_path: Path) -> None:
    authority, clients = Authority(tmp_path / "cluster"), Authority(tmp_path / "clients")
    front, ours = clients.issue("front", "127.0.0.1"), clients.issue("somebody")
    names = {"TLS_VERIFIER_NAME": "verifier", "TLS_DRAFT_NAME": "draft"}
    served = {"SERVE_TLS_CERT": front.cert, "SERVE_TLS_KEY": front.key, "SERVE_TLS_CLIENT_CA": front.ca}
    mine = {name: authority.issue(name) for name in ("verifier", "draft", "orchestrator")}
    verify, draft, orchestrate = (mine[name].settings() for name in ("verifier", "draft", "orchestrator"))
    specs = [
        spec("v", "verify", "VERIFY", {**_TOY, **verify}),
        spec("d", "draft", "DRAFT", {**_TOY, **draft, "DRAFTER": "toy", "TLS_VERIFIER_NAME": "verifier"}),
        spec("o", "orchestrate", "ORCHESTRATOR", {"MODEL": "toy", **orchestrate, **names, **served}),
    ]
    async with LocalCluster(specs) as cluster:
        async with Client(cluster.address, timeout_s=60, tls=client_tls(front.ca, ours.cert, ours.key)) as client:
            heard = await hear(client, ask())
        options = ("--raw", "--max-tokens", "8", "--address", cluster.address)
        shown = ("--ca", front.ca, "--cert", ours.cert, "--key", ours.key)
        said = await outrider("generate", "the cat sat on ", *options, *shown)
        logs = [each.log_path.read_text() for each in cluster.services.values()]
    assert heard.token_ids == expected("the cat sat on ", 40)
    assert heard.finished.figures.num_accepted > 0
    assert said[0] == 0, said
    for identity in (*mine.values(), front):
        assert not any(secret_of(identity.key) in each for each in logs), "a key is in a log"
