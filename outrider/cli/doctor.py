"""`outrider doctor`: what this machine can do, found out by trying."""

import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console

from outrider.cli.local import PROMPT_LOOKUP, LocalSettings, stages
from outrider.drafting.checkpoint import load
from outrider.errors import OutriderError
from outrider.model.embedding import outline
from outrider.model.names import ModelSpec
from outrider.model.opening import OpenedModel, open_model
from outrider.model.vocabulary import first_difference
from outrider.store.embedded import find_server

PACKAGES = ("torch", "transformers", "grpcio", "protobuf", "redis")
NUM_BLOCKS = 32
"""KV blocks of the models that are tried out."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    name: str
    good: bool
    detail: str


def examine(console: Console, settings: LocalSettings) -> bool:
    """Print the report; return whether everything is as it should be."""
    torch.set_num_threads(settings.threads_each)  # the bits of a row may depend on it
    good = True
    target_model: OpenedModel | None = None

    def report(name: str, look: Callable[[], Finding]) -> None:
        nonlocal good
        try:
            finding = look()
        except OutriderError as error:
            finding = Finding(name, False, error.message)
        good &= finding.good
        mark = "[green]ok[/green]  " if finding.good else "[red]bad[/red] "
        console.print(f"{mark} {finding.name}: {finding.detail}", soft_wrap=True)

    def look_at_target() -> Finding:
        nonlocal target_model
        with stages(console) as shown:
            target_model = open_model(
                ModelSpec(settings.target, settings.dtype), num_blocks=NUM_BLOCKS, on_progress=shown.update
            )
        info = target_model.runner.info
        size = f"context {info.context_len}, {info.kv_bytes_per_token} bytes of KV per token"
        return Finding("target", True, f"{info.name}, {info.dtype}, {size}")

    def look_at_pairing() -> Finding:
        if target_model is None:
            return Finding("pairing", False, "no target to pair with")
        return _pairing(target_model, settings)

    report("environment", _environment)
    report("store", _store)
    report("target", look_at_target)
    report("rows", lambda: _rows(target_model))
    report("pairing", look_at_pairing)
    return good


def _environment() -> Finding:
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    devices = f"{torch.cuda.device_count()} CUDA devices" if torch.cuda.is_available() else "no CUDA device"
    return Finding("environment", True, f"Python {platform.python_version()}, {packages}; {devices}")


def _store() -> Finding:
    return Finding("store", True, f"embedded server at {find_server()}")


def _rows(model: OpenedModel | None) -> Finding:
    """Say whether text is independent of the batch here."""
    if model is None:
        return Finding("rows", False, "no target to try")
    info = model.runner.info
    same = info.exactness == "bitwise"
    classes = ", ".join(map(str, info.row_classes))
    outcome = "identical bits" if same else "only nearly equal rows: the target's law, not always its text"
    return Finding("rows", same, f"passes of {classes} rows give {outcome}; engine {info.fingerprint}")


def _pairing(target_model: OpenedModel, settings: LocalSettings) -> Finding:
    """Load the draft as a worker would and compare vocabularies."""
    target, draft = settings.target, settings.model_draft
    if draft in (PROMPT_LOOKUP, "off"):
        return Finding("pairing", True, f"{draft} needs no model")
    if settings.trained is not None:
        return _trained_for(settings, *settings.trained)
    spec = ModelSpec(target if settings.kept_layers else draft, settings.dtype, settings.kept_layers)
    drafter = open_model(spec, num_blocks=NUM_BLOCKS)
    difference = first_difference(target_model.tokenizer.get_vocab(), drafter.tokenizer.get_vocab())
    if difference is None:
        return Finding("pairing", True, f"{spec.label} and {target} share the token -> id map")
    token_id, ours, theirs = difference
    detail = f"{spec.label} and {target} do not share the token -> id map: id {token_id} is {theirs!r} and {ours!r}"
    return Finding("pairing", False, detail)


def _trained_for(settings: LocalSettings, kind: str, folder: str) -> Finding:
    """Read a trained draft as a worker would, and check that it is for the target."""
    checkpoint, target = load(Path(folder)), outline(ModelSpec(settings.target, settings.dtype))
    if checkpoint.kind != kind:
        return Finding("pairing", False, f"{folder} is a draft of kind {checkpoint.kind}, not {kind}")
    checkpoint.check_target(target.vocabulary, target.embedding)
    return Finding("pairing", True, f"the {kind} draft in {folder} was trained for {checkpoint.origin.target}")
