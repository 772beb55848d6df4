"""A container engine for a test run: podman behind a socket that Compose speaks to, all of it in one folder.

What this engine and a machine without an image registry need beyond the shipped files is here, and here only:

- a base image that debootstrap makes of the machine's own package sources, with its certificates and settings of pip;
- folders of wheels that those settings name, served to the build over the loopback interface;
- a store image: Debian's Redis, under the names of Valkey's programs, and open to its network as their image is;
- an image of Debian's Prometheus, with the user, the program and the folder that the published one has;
- a loop that asks containers for their health, which podman leaves to systemd, and no `start_interval`, which Compose
  sends to Docker 25 and newer only;
- low limits of processes and files, which the engine may set without the right to raise its own.
"""

import ast
import functools
import http.server
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from outrider.launch import ending_with_us
from tests.deploy.files import ROOT, tool

NEEDED = ("podman", "runc", "catatonit", "debootstrap", "iptables")
BASE = "localhost/outrider-base:1"
BUNDLE = "etc/ssl/certs/ca-certificates.crt"
PACKAGES = "python3,python3-venv,ca-certificates"
BUILT_HERE = ("models", "verifier", "draft", "orchestrator")
WITH_HEALTH = ("store", "verifier", "draft", "orchestrator")
UNSET = "unset"
"""Stands for Compose's own sign of a value that is taken away."""
LOOK_S, PERIOD_S = 2.0, 10.0
"""Pauses between two questions for health: while a container starts, and afterwards, as the Compose file has them."""
MOST_LIMIT = 4096
STORE = """\
ARG BASE
FROM ${BASE}
RUN apt-get update && apt-get install -y --no-install-recommends redis-server \\
    && printf '#!/bin/sh\\nexec redis-server "$@" --protected-mode no\\n' > /usr/bin/valkey-server \\
    && chmod 755 /usr/bin/valkey-server && ln -s redis-cli /usr/bin/valkey-cli \\
    && install -d -o 999 -g 1000 /data
"""
PROMETHEUS = """\
ARG BASE
FROM ${BASE}
RUN apt-get update && apt-get install -y --no-install-recommends prometheus \\
    && install -d -o 65534 -g 65534 /prometheus
USER 65534:65534
ENTRYPOINT ["prometheus"]
"""
STAND_INS = {"store": STORE, "prometheus": PROMETHEUS}
"""Services whose published images are not to be had -> how one is made that does the same."""
CONTAINERS = """\
[containers]
default_ulimits = ["nofile={files}:{files}", "nproc={processes}:{processes}"]
init_path = "{init}"
[network]
network_backend = "netavark"
network_config_dir = "{folder}/networks"
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
tmp_dir = "{folder}/run"
volume_path = "{folder}/volumes"
"""
STORAGE = """\
[storage]
driver = "overlay"
graphroot = "{folder}/images"
runroot = "{folder}/run"
"""


def impossible() -> str:
    """Return why no containers can be run here; empty: they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs Linux and root"
    missing = [name for name in NEEDED if shutil.which(name) is None]
    return f"needs {', '.join(missing)}" if missing else ""


@dataclass
class Engine:
    """Runs from `with` to the end of its block, and then leaves nothing but what it was told to keep."""

    folder: Path
    keeps: bool = False
    """Whether the images are left in the folder, for another run."""
    environment: dict[str, str] = field(default_factory=dict)
    _service: "subprocess.Popen[bytes] | None" = None
    _wheels: http.server.ThreadingHTTPServer | None = None
    _over: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Self:
        for name in ("networks", "run", "tmp", "wheels", *STAND_INS):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        for name, text in STAND_INS.items():
            (self.folder / name / "Dockerfile").write_text(text)
        kinds = (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC)
        files, processes = (min(resource.getrlimit(kind)[1], MOST_LIMIT) for kind in kinds)
        known = {"folder": self.folder, "files": files, "processes": processes, "init": shutil.which("catatonit")}
        (self.folder / "containers.conf").write_text(CONTAINERS.format(**known))
        (self.folder / "storage.conf").write_text(STORAGE.format(**known))
        self.environment = {
            "PATH": os.environ["PATH"], "HOME": str(self.folder), "TMPDIR": str(self.folder / "tmp"),
            "CONTAINERS_CONF": str(self.folder / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(self.folder / "storage.conf"),
            "DISABLE_HC_SYSTEMD": "true", "DOCKER_BUILDKIT": "0",
            "DOCKER_HOST": f"unix://{self.folder}/socket",
        }  # fmt: skip
        self._serve_wheels()
        if not self.podman("images", "--quiet", BASE).strip():
            self._make_base()
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove every container, volume and network, and the whole folder unless its images are kept."""
        self._over.set()
        self.podman("rm", "--all", "--force", "--time", "0")
        self.podman("volume", "prune", "--force")
        self.podman("network", "prune", "--force")
        if self._service is not None:
            self._service.terminate()
            self._service.wait(30)
        if self._wheels is not None:
            self._wheels.shutdown()
            self._wheels.server_close()
        for thread in self._threads:
            thread.join()
        subprocess.run(
            ["umount", "--recursive", str(self.folder / "images" / "overlay")], check=False, capture_output=True
        )
        if not self.keeps:
            shutil.rmtree(self.folder)

    def podman(self, *arguments: str) -> str:
        """Run podman itself, beside its service.

        Raises:
            AssertionError: it fails, with what it says.
        """
        return self._run(["podman", *arguments])

    def compose(self, *arguments: str, files: Sequence[str], **variables: str) -> str:
        """Run `docker compose` on files of the project, with this engine's file last; return what it prints.

        Raises:
            AssertionError: it fails, with what it says.
        """
        override = self.folder / "override.yml"
        override.write_text(json.dumps(self.override()).replace(f'"{UNSET}"', "!reset null"))
        named = [part for file in (*files, str(override)) for part in ("-f", file)]
        return self._run([tool("docker-compose"), *named, *arguments], variables)

    def override(self) -> dict[str, Any]:
        """Return what lies over the shipped files here: where the build gets what it is made of, and other images."""
        arguments = {"BASE": BASE}
        if self._wheels is not None:
            links = [f"http://127.0.0.1:{self._wheels.server_port}/{each.name}/" for each in self._folders()]
            arguments["TORCH_FLAGS"] = " ".join(f"--find-links {each}" for each in links)
        build = {"args": arguments, "network": "host"}
        services: dict[str, Any] = {name: {"build": build} for name in BUILT_HERE}
        for name in STAND_INS:
            made = {"context": str(self.folder / name), "args": {"BASE": BASE}, "network": "host"}
            services[name] = {"image": f"outrider-{name}:1", "build": made}
        for name in WITH_HEALTH:
            services[name]["healthcheck"] = {"start_interval": UNSET}
        return {"services": services}

    def _run(self, command: Sequence[str], variables: Mapping[str, str] | None = None) -> str:
        run = subprocess.run(
            command, cwd=ROOT, env={**self.environment, **(variables or {})}, check=False,
            capture_output=True, text=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert run.returncode == 0, f"{' '.join(command)}: {run.returncode}\n{run.stdout[-6000:]}{run.stderr[-6000:]}"
        return run.stdout

    # -- the service -------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        socket = self.folder / "socket"
        socket.unlink(missing_ok=True)
        command = ["podman", "system", "service", "--time=0", f"unix://{socket}"]
        with (self.folder / "service.log").open("ab") as log:
            self._service = subprocess.Popen(
                ending_with_us(command), env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        end_s = time.monotonic() + 30
        while not socket.exists():
            assert self._service.poll() is None, (self.folder / "service.log").read_text()
            assert time.monotonic() < end_s, "podman's service does not answer"
            time.sleep(0.1)
        self._thread(self._ask)

    def _ask(self) -> None:
        """Have every container's health asked for, as an engine with timers does."""
        next_s = 0.0
        while not self._over.wait(LOOK_S):
            starting = time.monotonic() < next_s
            next_s = next_s if starting else time.monotonic() + PERIOD_S
            for chosen in ("starting", *(() if starting else ("healthy", "unhealthy"))):
                for name in self._listed(f"health={chosen}"):
                    subprocess.run(
                        ["podman", "healthcheck", "run", name], env=self.environment, check=False, capture_output=True
                    )

    def _listed(self, chosen: str) -> list[str]:
        run = subprocess.run(
            ["podman", "ps", "--quiet", "--filter", chosen], env=self.environment, check=False, capture_output=True
        )
        return run.stdout.decode().split()

    def _thread(self, function: Any) -> None:
        thread = threading.Thread(target=function, daemon=True)
        thread.start()
        self._threads.append(thread)

    # -- what images are made of -------------------------------------------------------------------------------------

    def _make_base(self) -> None:
        root = self.folder / "root"
        sources = self._run(["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT)"])
        suite = platform.freedesktop_os_release()["VERSION_CODENAME"]
        mirror = next(line.split()[0] for line in sources.splitlines() if line.split()[1:] == [suite, "main"])
        self._run(["debootstrap", "--variant=minbase", f"--include={PACKAGES}", suite, str(root), mirror])
        shutil.copy(f"/{BUNDLE}", root / BUNDLE)
        (root / "etc" / "pip.conf").write_text(_pip_conf())
        for each in (root / "var" / "cache" / "apt" / "archives").glob("*.deb"):
            each.unlink()
        with tarfile.open(self.folder / "root.tar", "w") as tar:
            tar.add(root, arcname=".")
        self.podman("import", str(self.folder / "root.tar"), BASE)
        (self.folder / "root.tar").unlink()
        shutil.rmtree(root)

    def _serve_wheels(self) -> None:
        """Serve the folders of wheels, at the port of the last run where there was one: it is part of layers' keys."""
        folders = [Path(each) for each in _pip_settings().get("find-links", "").split() if Path(each).is_dir()]
        if not folders:
            return
        for number, each in enumerate(folders):
            link = self.folder / "wheels" / str(number)
            link.unlink(missing_ok=True)
            link.symlink_to(each)
        port = self.folder / "port"
        handler = functools.partial(_Quiet, directory=str(self.folder / "wheels"))
        known = int(port.read_text()) if port.exists() else 0
        self._wheels = http.server.ThreadingHTTPServer(("127.0.0.1", known), handler)
        port.write_text(str(self._wheels.server_port))
        self._thread(self._wheels.serve_forever)

    def _folders(self) -> list[Path]:
        return sorted((self.folder / "wheels").iterdir())


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name of the standard library
        """Say nothing."""


def _pip_settings() -> dict[str, str]:
    """Return pip's settings of this machine, by option."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    pairs = [line.partition("=") for line in listed.splitlines()]
    return {name.rpartition(".")[2]: str(ast.literal_eval(value)) for name, _, value in pairs}


def _pip_conf() -> str:
    """Return those of them that mean the same inside: where packages come from, and whom to trust."""
    found = {name: value for name, value in _pip_settings().items() if name in {"index-url", "trusted-host"}}
    return "\n".join(["[global]", f"cert = /{BUNDLE}", *(f"{name} = {value}" for name, value in found.items()), ""])
