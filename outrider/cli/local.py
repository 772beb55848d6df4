"""The local cluster that `outrider run` and `outrider up` start: one verifier, one draft worker, one orchestrator."""

import os
import re
import secrets
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from outrider.cluster import PREFIXES, ServiceSpec
from outrider.drafting.shipped import feature_for, shipped
from outrider.errors import InvalidRequest

PROMPT_LOOKUP = "prompt-lookup"
"""The drafter that needs no model."""
AFTER_LOOKUP = f"{PROMPT_LOOKUP}+"
"""Begins a draft that is asked where prompt lookup has no offer, as in "prompt-lookup+feature"."""
AUTO = "auto"
"""The best there is without another model: lookup, and behind it the trained draft that ships for the target."""
TRAINED = ("feature", "medusa")
"""Kinds of drafts that were trained on the target's hidden states: "feature", the one that ships, or "feature:DIR"."""
TOY = "toy"
"""Model of exact arithmetic for trying things out; its drafter is "toy" or "toy:0.8", agreeing that often."""


@dataclass(frozen=True, slots=True)
class LocalSettings:
    """What a local cluster is made of."""

    target: str
    draft: str
    """"prompt-lookup", "off", "layers:0,1,28,29" of the target, "feature" or "medusa" trained for it (":DIR": by
    oneself), a model of its own, one of those behind "prompt-lookup+", or "auto"."""
    dtype: str = "bfloat16"
    threads: int = 0
    """Threads of each model; 0 divides the cores between verifier and draft worker."""
    store_url: str = ""
    listen: str = ""
    """Address of the orchestrator; empty: a free port of the loopback interface."""
    http_listen: str = ""
    """Where the orchestrator serves OpenAI's API; empty: nowhere."""
    data_dir: Path | None = None
    """Where an embedded store keeps its data; None: nowhere."""
    metrics_ports: tuple[int, ...] = ()
    """Where verifier, orchestrator and draft worker serve metrics, on the orchestrator's interface; empty: nowhere."""
    follows_predictions: bool = False
    """Whether what clients expect is drafted first."""

    @property
    def threads_each(self) -> int:
        """Threads of each model."""
        return self.threads or max(1, (os.cpu_count() or 1) // 2)

    @property
    def chosen(self) -> str:
        """The draft, "auto" resolved."""
        if self.draft != AUTO:
            return self.draft
        return f"{AFTER_LOOKUP}{TRAINED[0]}" if feature_for(self.target, self.dtype) else PROMPT_LOOKUP

    @property
    def model_draft(self) -> str:
        """The draft without the lookup in front of it."""
        return self.chosen.removeprefix(AFTER_LOOKUP)

    @property
    def kept_layers(self) -> tuple[int, ...] | None:
        """Layers of the target that draft; None if something else does.

        Raises:
            InvalidRequest: they are not rising numbers.
        """
        if not self.model_draft.startswith("layers:"):
            return None
        try:
            kept = tuple(map(int, self.model_draft.removeprefix("layers:").split(",")))
        except ValueError:
            kept = ()
        if not kept or kept[0] < 0 or list(kept) != sorted(set(kept)):
            raise InvalidRequest(
                "draft", self.draft, "layers: and rising numbers with commas between, as in layers:0,1,29"
            )
        return kept

    @property
    def trained(self) -> tuple[str, str] | None:
        """Kind and folder of a trained draft; None if something else does.

        Raises:
            InvalidRequest: no folder is named, and no such draft ships for the target.
        """
        kind, _, folder = self.model_draft.partition(":")
        if kind not in TRAINED:
            return None
        own = Path(folder).expanduser().absolute() if folder else shipped(f"{self.target}-{kind}")
        if own is None:
            raise InvalidRequest(
                "draft", self.draft, f"{kind}: and the folder of a draft, for none ships for {self.target}"
            )
        return kind, str(own)

    def specs(self) -> list[ServiceSpec]:
        """Return the services to start.

        Raises:
            InvalidRequest: the draft is not understood.
        """
        threads = str(self.threads_each)
        verify = {
            "OUTRIDER_VERIFY_MODEL": self.target,
            "OUTRIDER_VERIFY_DTYPE": self.dtype,
            "OUTRIDER_VERIFY_THREADS": threads,
        }
        orchestrate = {"OUTRIDER_ORCHESTRATOR_MODEL": self.target}
        if self.listen:
            orchestrate["OUTRIDER_ORCHESTRATOR_LISTEN"] = self.listen
        if self.http_listen:
            orchestrate["OUTRIDER_ORCHESTRATOR_HTTP_LISTEN"] = self.http_listen
        # In a store that others use too there may be such a cluster already: each has names of its own.
        own = f"-{secrets.token_hex(3)}" if self.store_url else ""
        specs = [
            ServiceSpec(f"verify-1{own}", "verify", verify),
            ServiceSpec(f"orchestrator-1{own}", "orchestrate", orchestrate),
        ]
        if self.chosen != "off":
            specs.append(ServiceSpec(f"draft-1{own}", "draft", {"OUTRIDER_DRAFT_THREADS": threads, **self._draft()}))
        if not self.metrics_ports:
            return specs
        return [
            replace(spec, settings={**spec.settings, **self._metrics(PREFIXES[spec.role], port)})
            for spec, port in zip(specs, self.metrics_ports[: len(specs)], strict=True)
        ]

    def _metrics(self, prefix: str, port: int) -> dict[str, str]:
        """Return the variables of a metrics endpoint; none where the environment has one already."""
        if f"{prefix}_METRICS_PORT" in os.environ:
            return {}
        host = self.listen.rpartition(":")[0].strip("[]")
        local = not host or host.startswith("unix")
        return {f"{prefix}_METRICS_PORT": str(port), f"{prefix}_METRICS_HOST": "127.0.0.1" if local else host}

    def _draft(self) -> dict[str, str]:
        """Return the draft worker's own variables."""
        if self.chosen.startswith(AFTER_LOOKUP) and self.model_draft in ("", "off", PROMPT_LOOKUP, AUTO):
            raise InvalidRequest("draft", self.draft, f"{AFTER_LOOKUP} and a draft with a model of its own")
        variables = self._model_draft()
        if self.chosen.startswith(AFTER_LOOKUP):
            variables["OUTRIDER_DRAFT_DRAFTER"] = (
                f"prompt_lookup,{variables.get('OUTRIDER_DRAFT_DRAFTER', 'causal_lm')}"
            )
        if self.follows_predictions:
            others = variables.get("OUTRIDER_DRAFT_DRAFTER", "causal_lm")
            variables["OUTRIDER_DRAFT_DRAFTER"] = f"prediction,{others}"
        return variables

    def _model_draft(self) -> dict[str, str]:
        # Nobody reads the health of a worker here: one that cannot load its model may end, and say why, at once.
        common = {"OUTRIDER_DRAFT_DTYPE": self.dtype, "OUTRIDER_DRAFT_LOAD_FAILURE_LINGER_S": "0"}
        if self.chosen == PROMPT_LOOKUP:
            return {"OUTRIDER_DRAFT_DRAFTER": "prompt_lookup", "OUTRIDER_DRAFT_MODEL": self.target, **common}
        if self.target == TOY and self.model_draft.partition(":")[0] == TOY:
            return {
                "OUTRIDER_DRAFT_DRAFTER": TOY,
                "OUTRIDER_DRAFT_TOY_AGREEMENT": _agreement(self.model_draft),
                **common,
            }
        if self.trained is not None:
            kind, folder = self.trained
            return {
                "OUTRIDER_DRAFT_DRAFTER": kind,
                "OUTRIDER_DRAFT_CHECKPOINT": folder,
                "OUTRIDER_DRAFT_MODEL": self.target,
                **common,
            }
        if self.kept_layers is not None:
            kept = ",".join(map(str, self.kept_layers))
            return {"OUTRIDER_DRAFT_MODEL": self.target, "OUTRIDER_DRAFT_LAYERS": kept, **common}
        return {"OUTRIDER_DRAFT_MODEL": self.model_draft, **common}


def free_ports(count: int) -> tuple[int, ...]:
    """Return ports of this machine that nobody has at the moment."""
    with ExitStack() as held:  # all at once, so that they differ
        sockets = [held.enter_context(socket.create_server(("", 0))) for _ in range(count)]
        return tuple(int(each.getsockname()[1]) for each in sockets)


def _agreement(draft: str) -> str:
    """Return how often a toy agrees: 1 where "toy" says nothing.

    Raises:
        InvalidRequest: it is no share.
    """
    share = draft.partition(":")[2] or "1"
    if re.fullmatch(r"0|1|[01]?\.\d+", share) and float(share) <= 1.0:
        return share
    raise InvalidRequest("draft", draft, "toy: and a share in 0 to 1, as in toy:0.8")


class Stages:
    """Progress bars, one per stage; a stage whose size is unknown shows a pulse."""

    def __init__(self, progress: Progress) -> None:
        """Draw on a running progress display."""
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def update(self, stage: str, fraction: float | None = None) -> None:
        """Move a stage on; 1 ends it."""
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(stage, total=None)
        total = None if fraction is None else 1.0
        self._progress.update(self._tasks[stage], total=total, completed=fraction or 0.0)

    def waiting(self, service: str) -> None:
        """Show the one service that is being waited for; the ones before it are there."""
        for stage in self._tasks:
            self.update(stage, 1.0)
        self.update(f"starting {service}")

    def done(self) -> None:
        """End all stages."""
        for stage in self._tasks:
            self.update(stage, 1.0)


@contextmanager
def stages(console: Console) -> Iterator[Stages]:
    """Show progress bars, which vanish at the end; nothing where nobody looks."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_interactive) as progress:
        yield Stages(progress)
