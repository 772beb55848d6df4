"""The shipped files in a real container engine: built, started, used, scaled, struck and ended, as `make containers`.

`tests.deploy.engine` has what an engine and a machine without a registry need beyond the files, and prints what is
found. CONTAINERS_FOLDER names a folder in which the images are left for the next run.
"""

import asyncio
import json
import os
import signal
import socket
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from outrider.client import Client, client_tls
from outrider.errors import Unauthenticated
from outrider.generation import Chunk
from outrider.keys import KeyLimits, make_key, write_record
from outrider.model.toy import ToyTokenizer
from tests.authority import Authority
from tests.deploy.engine import Engine, impossible
from tests.deploy.load import Load, request_of, text_of
from tests.deploy.test_compose import BOTH
from tests.deploy.test_processes import asked, gateway_says
from tests.e2e.toys import hear

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

TOY = {"TARGET": "toy", "DRAFT_MODEL": "toy", "DRAFTER": "toy", "THREADS": "1"}
COSTS = {
    "verifier": {"OUTRIDER_VERIFY_TOY_DELAY_S": "0.1"},
    "draft": {"OUTRIDER_DRAFT_TOY_DELAY_S": "0.005", "OUTRIDER_DRAFT_MAX_SESSIONS": "6"},
}
"""Slow enough that something can happen meanwhile."""
SERVICES = ("store", "verifier", "draft", "orchestrator")
IMAGE = "docker.io/library/outrider:cpu"
MOST_BYTES, MOST_CODE_BYTES = 2.5e9, 50e6
"""Of the image, and of its layer with the code."""
PROMPT = [{"role": "user", "content": "Name three colours of the rainbow."}]
LOOK = """
import json, pathlib, sys
def may_write(folder):
    try:
        pathlib.Path(folder, "written").touch()
    except OSError:
        return False
    return True
status = dict(line.split(":", 1) for line in pathlib.Path("/proc/1/status").read_text().splitlines())
routes = [line.split()[1] for line in pathlib.Path("/proc/net/route").read_text().splitlines()[1:]]
print(json.dumps({
    "user": status["Uid"].split()[0],
    "capabilities": int(status["CapEff"], 16) | int(status["CapBnd"], 16),
    "no_new_privileges": status["NoNewPrivs"].strip(),
    "written": [each for each in ("/", "/etc", "/opt/outrider", "/models", "/run", "/var") if may_write(each)],
    "tmp": may_write("/tmp"),
    "leads_out": "00000000" in routes,
}))
"""


SCRAPED = {"outrider-orchestrator": 1, "outrider-verifier": 1, "outrider-draft": 2}
"""Job of Prometheus -> how many it has to find."""
ASK = """
import json, urllib.request
def data(path):
    with urllib.request.urlopen("http://127.0.0.1:9090/api/v1/" + path, timeout=5) as answer:
        return json.load(answer)["data"]
print(json.dumps({
    "targets": [(each["labels"]["job"], each["health"]) for each in data("targets?state=active")["activeTargets"]],
    "rules": [(each["name"], each["health"]) for group in data("rules")["groups"] for each in group["rules"]],
    "tokens": [each["value"][1] for each in data("query?query=sum(outrider_generation_tokens_total)")["result"]],
}))
"""


@dataclass
class Deployment:
    """One project, as its user has it."""

    engine: Engine
    files: tuple[str, ...]
    variables: dict[str, str]

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.variables['GRPC_PORT']}"

    @property
    def http(self) -> str:
        return f"127.0.0.1:{self.variables['HTTP_PORT']}"

    def compose(self, *arguments: str) -> str:
        """Run `docker compose`; say how long it took."""
        begun_s = time.monotonic()
        said = self.engine.compose(*arguments, files=self.files, **self.variables)
        note(f"{' '.join(arguments)}: {time.monotonic() - begun_s:.1f} s")
        return said

    def up(self, *options: str) -> None:
        """Start what is to run, and wait until it is well; fail when that takes too long."""
        self.compose("up", "--wait", "--wait-timeout", "240", *options)

    def inside(self, service: str, *command: str) -> str:
        """Run a command in a service's container."""
        return self.engine.compose("exec", "-T", service, *command, files=self.files, **self.variables)

    def ids(self, service: str) -> list[str]:
        """Return a service's running containers."""
        return self.engine.compose("ps", "--quiet", service, files=self.files, **self.variables).split()

    def inspect(self, container: str) -> dict[str, Any]:
        """Return what the engine knows of a container."""
        found = json.loads(self.engine.podman("inspect", container))[0]
        assert isinstance(found, dict)
        return found

    def kill(self, container: str) -> int:
        """End all processes of a container from outside, as a lack of memory does; return the first one's id."""
        killed = self.inspect(container)["State"]["Pid"]
        assert isinstance(killed, int)
        os.kill(killed, signal.SIGKILL)
        return killed

    async def is_back(self, container: str, killed: int) -> None:
        """Wait until a killed container runs again, and is well."""
        async with asyncio.timeout(90):
            while True:
                state = (await asyncio.to_thread(self.inspect, container))["State"]
                if state["Pid"] not in (0, killed) and state["Health"]["Status"] == "healthy":
                    return
                await asyncio.sleep(0.5)


def note(text: str) -> None:
    """Print a fact; `make containers` shows it."""
    print(f"containers: {text}", flush=True)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    reason = impossible()
    if reason:
        pytest.skip(f"no containers here: {reason}")
    kept = os.environ.get("CONTAINERS_FOLDER")
    folder = Path(kept) if kept else tmp_path_factory.mktemp("engine")
    # Two engines would give their networks the same addresses.
    with FileLock("/var/lock/outrider-containers"), Engine(folder, keeps=bool(kept)) as running:
        yield running


@pytest.fixture(scope="module")
def project(engine: Engine) -> Iterator[Deployment]:
    """The image is built, nothing runs yet."""
    costs = engine.folder / "costs.json"
    costs.write_text(json.dumps({"services": {name: {"environment": made} for name, made in COSTS.items()}}))
    ports = {"GRPC_PORT": free_port(), "HTTP_PORT": free_port()}
    deployment = Deployment(engine, (*BOTH[:1], str(costs)), ports)
    # Four services name one image: this engine would make it four times over, at once.
    deployment.compose("build", "store", "models")
    yield deployment
    deployment.compose("down", "--volumes", "--timeout", "1")


@pytest.fixture(scope="module")
def toy(project: Deployment) -> Deployment:
    """The project with the toy model, whose texts can be foretold."""
    project.variables |= TOY
    project.up()
    return project


def test_the_image_has_no_weights_and_no_rights(project: Deployment) -> None:
    found = json.loads(project.engine.podman("image", "inspect", IMAGE))[0]
    note(f"image {found['Size'] / 1e6:.0f} MB, {len(found['RootFS']['Layers'])} layers")
    layers = [each for each in json.loads(project.engine.podman("history", "--format", "json", IMAGE)) if each["size"]]
    for layer in layers:
        note(f"layer {layer['size'] / 1e6:.2f} MB: {layer['CreatedBy'][:60]}")
    assert layers[0]["size"] < MOST_CODE_BYTES, "a change of the code changes a large layer"
    assert found["Size"] < MOST_BYTES
    assert found["Config"]["User"] == "10001:10001"
    assert found["Healthcheck"]["Test"] == ["CMD", "outrider", "health"]
    names = ("-name", "*.gguf", "-o", "-name", "*.safetensors", "-o", "-name", "pytest", "-o", "-name", ".git")
    inside = project.engine.podman("run", "--rm", "--network", "none", IMAGE, "find", "/opt", "(", *names, ")")
    assert [line for line in inside.splitlines() if "/outrider/drafting/checkpoints/" not in line] == []


async def test_as_it_is_shipped_it_fetches_and_serves_the_default_model(project: Deployment) -> None:
    """Speculation on and off, gRPC and HTTP: one text."""
    await asyncio.to_thread(project.up)
    async with Client([project.grpc], timeout_s=120) as client:
        drafted = await client.ask(PROMPT, temperature=0.0, max_tokens=24)
        plain = await client.ask(PROMPT, temperature=0.0, max_tokens=24, speculation="off")
    body = {"model": "smollm2-135m-instruct", "messages": PROMPT, "temperature": 0, "max_tokens": 24}
    call = urllib.request.Request(
        f"http://{project.http}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with await asyncio.to_thread(partial(urllib.request.urlopen, call, timeout=120)) as answer:
        over_http = json.load(answer)["choices"][0]["message"]["content"]
    note(f"the default model says {plain.text!r}")
    assert plain.text
    assert drafted.text == over_http == plain.text


async def test_both_doors_are_open_to_this_machine_and_say_what_must_be_said(toy: Deployment) -> None:
    finished = await asked([toy.grpc], seed=1)
    assert finished.figures.num_accepted > 0, "nothing was drafted"
    assert await gateway_says(toy.http) == ToyTokenizer().decode(text_of("the cat ", 8, None))


@pytest.mark.parametrize("service", SERVICES)
def test_a_container_may_write_and_reach_nothing_but_what_it_needs(toy: Deployment, service: str) -> None:
    program = "python3" if service == "store" else "python"
    found = json.loads(toy.inside(service, program, "-c", LOOK))
    assert found == {
        "user": "999" if service == "store" else "10001",
        "capabilities": 0,
        "no_new_privileges": "1",
        "written": [],
        "tmp": True,
        "leads_out": service == "orchestrator",
    }


async def test_draft_workers_are_scaled_to_three_and_back_under_load_and_no_text_changes(toy: Deployment) -> None:
    async with Load([toy.grpc]) as load:
        for count in (3, 1):
            await load.more(8)
            await asyncio.to_thread(toy.up, "--no-recreate", "--scale", f"draft={count}")
            assert len(toy.ids("draft")) == count
            await load.more(16)
    note(f"{load.done} generations while drafts were scaled")
    assert load.wrong == []


async def test_prometheus_finds_every_replica_and_evaluates_every_rule(toy: Deployment) -> None:
    toy.compose("build", "prometheus")
    toy.up("--no-recreate", "--scale", "draft=2", "draft", "prometheus")
    await asked([toy.grpc], seed=2)
    found = await watched(toy)
    note(f"Prometheus: {len(found['targets'])} targets, {len(found['rules'])} rules, {found['tokens']} tokens")
    toy.compose("rm", "--stop", "--force", "prometheus")
    toy.up("--no-recreate", "--scale", "draft=1")


async def watched(deployment: Deployment) -> Any:
    """Wait until Prometheus has every target, has evaluated every rule and has seen tokens; return what it says."""
    found: Any = None
    with suppress(TimeoutError):
        async with asyncio.timeout(90):
            while True:
                with suppress(AssertionError):  # it is not up yet
                    found = json.loads(await asyncio.to_thread(deployment.inside, "prometheus", "python3", "-c", ASK))
                    well = Counter(job for job, health in found["targets"] if health == "up")
                    if well == SCRAPED and {each[1] for each in found["rules"]} == {"ok"} and found["tokens"]:
                        return found
                await asyncio.sleep(2)
    raise AssertionError(f"in 90 s it came to {found}")


@pytest.mark.parametrize("service", ["draft", "verifier", "orchestrator", "store"])
async def test_a_killed_container_comes_back_and_no_text_changes(toy: Deployment, service: str) -> None:
    async with Load([toy.grpc]) as load:
        await load.more(8)
        begun_s = time.monotonic()
        (container,) = toy.ids(service)
        killed = await asyncio.to_thread(toy.kill, container)
        await toy.is_back(container, killed)
        note(f"{service} is well again after {time.monotonic() - begun_s:.1f} s")
        await load.more(16)
    assert load.wrong == []


async def test_what_is_stopped_ends_what_it_has_begun_and_ends_by_itself(toy: Deployment) -> None:
    async with Client([toy.grpc], timeout_s=60) as client:
        stream = client.generate(request_of("the cat ", 120, 5))
        tokens = list((await hear_first(stream)).token_ids)
        stopping = asyncio.create_task(asyncio.to_thread(toy.compose, "stop"))
        async for event in stream:
            if isinstance(event, Chunk):
                tokens += event.token_ids
        assert not stopping.done(), "the generation was over before anything was stopped"
        await stopping
    assert tokens == text_of("the cat ", 120, 5)
    listed = toy.engine.podman("ps", "--all", "--format", "{{.Names}} {{.ExitCode}}")
    ended = dict(line.split() for line in listed.splitlines())
    assert {name.rpartition("-")[0].removeprefix("outrider-") for name in ended} == {*SERVICES, "models"}
    assert set(ended.values()) == {"0"}, ended
    toy.compose("down")


async def hear_first(stream: Any) -> Chunk:
    async for event in stream:
        if isinstance(event, Chunk):
            return event
    raise AssertionError("nothing was said")


async def test_with_the_tls_file_a_key_opens_the_door_and_no_secret_is_in_an_environment(
    project: Deployment, tmp_path: Path
) -> None:
    key, ca = write_secrets(tmp_path)
    files = (*BOTH, *project.files[1:])
    secure = Deployment(project.engine, files, {**project.variables, **TOY, "TLS_DIR": str(tmp_path)})
    await asyncio.to_thread(secure.up)
    tls = client_tls(ca, server_name="front")
    async with Client([secure.grpc], timeout_s=60, tls=tls, api_key=key) as client:
        heard = await hear(client, request_of("the cat ", 40, 3))
    assert heard.token_ids == text_of("the cat ", 40, 3)
    assert heard.finished.figures.num_accepted > 0
    async with Client([secure.grpc], timeout_s=10, tls=tls) as client:
        with pytest.raises(Unauthenticated):
            await hear(client, request_of("the cat ", 4, 3))
    secrets = [key, *secret_lines(tmp_path)]
    for service in SERVICES:
        seen = secure.inside(service, "env") + json.dumps(secure.inspect(secure.ids(service)[0]))
        assert [line for line in secrets if line in seen] == [], service
    await asyncio.to_thread(secure.compose, "down")


def write_secrets(folder: Path) -> tuple[str, str]:
    """Write what TLS_DIR holds; return a key, and the CA that clients trust."""
    inside, outside = Authority(folder / "inside"), Authority(folder / "outside")
    (folder / "ca.crt").write_bytes(inside.bundle)
    for authority, names in ((inside, ("store", "verifier", "draft", "orchestrator")), (outside, ("front",))):
        for name in names:
            made = authority.issue(name, "127.0.0.1")
            (folder / f"{name}.crt").write_bytes(Path(made.cert).read_bytes())
            (folder / f"{name}.key").write_bytes(Path(made.key).read_bytes())
    key, record = make_key("somebody", KeyLimits(), 1.0)
    (folder / "api-keys").write_bytes(write_record(record) + b"\n")
    (folder / "trusted.crt").write_bytes(outside.bundle)
    return key, str(folder / "trusted.crt")


def secret_lines(folder: Path) -> list[str]:
    """Return the lines of all private keys, and of the keys' file."""
    lines = [line for each in (*folder.glob("*.key"), folder / "api-keys") for line in each.read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("-----")]
