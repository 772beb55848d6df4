"""The clusters of a soak: a quiet one that twins are asked of, and the busy one, whose pools of KV are too small."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.drafts import CAUSAL_LM, PROMPT_LOOKUP
from benchmarks.serving import TOY, real_specs, toy_specs
from benchmarks.soak.script import REAL_SIZES, TOY_SIZES, Sizes
from outrider.cluster import ServiceSpec

PREFIX = {"verify": "OUTRIDER_VERIFY_", "draft": "OUTRIDER_DRAFT_", "orchestrate": "OUTRIDER_ORCHESTRATOR_"}
BLOCKS_EACH = 2.5
"""Blocks of a busy pool for each session, which needs up to ten."""
LEAST_BLOCKS = 20
"""So that the longest session fits into the pool whatever the number of sessions."""
LINGER_S = 2
"""How long a draft worker keeps a stream to a verifier that it has no session with: rest comes soon."""


@dataclass(frozen=True, slots=True)
class Stage:
    """What is run, and how long things are in its language."""

    quiet: Sequence[ServiceSpec]
    busy: Sequence[ServiceSpec]
    drafters: tuple[str, ...]
    """Kinds that a client may ask for."""
    sizes: Sizes
    small_pool: int
    """Blocks of each busy pool of KV."""


def real_stage(dtype: str, sessions: int) -> Stage:
    """Return the default model's: drafts by a subset of its layers, and by lookup."""
    kinds = (CAUSAL_LM, PROMPT_LOOKUP)
    blocks = _small_pool(sessions)
    quiet = [_quiet(spec) for spec in real_specs(dtype, ())]
    return Stage(quiet, [_busy(spec, blocks) for spec in real_specs(dtype, kinds)], kinds, REAL_SIZES, blocks)


def toy_stage(sessions: int) -> Stage:
    """Return the toy's, with two drafters.

    A toy remembers the law of every context that it has met. With one token of context those are few, and its memory
    has an end.
    """
    verify, draft, orchestrate = (_with(spec, TOY_ORDER="1") for spec in toy_specs(0.8, 0.001, 0.01))
    lookup = ServiceSpec("draft-lookup", "draft", _prefixed("draft", MODEL=TOY, DRAFTER=PROMPT_LOOKUP))
    blocks = _small_pool(sessions)
    busy = [_busy(spec, blocks) for spec in (verify, draft, lookup, orchestrate)]
    return Stage([_quiet(verify), _quiet(orchestrate)], busy, (TOY, PROMPT_LOOKUP), TOY_SIZES, blocks)


def _small_pool(sessions: int) -> int:
    return max(LEAST_BLOCKS, int(BLOCKS_EACH * sessions))


def _quiet(spec: ServiceSpec) -> ServiceSpec:
    return _with(spec, PREFIX_REUSE="false") if spec.role == "verify" else spec


def _busy(spec: ServiceSpec, blocks: int) -> ServiceSpec:
    port = str(_free_port())
    if spec.role == "orchestrate":
        return _with(spec, METRICS_PORT=port)
    linger = {"PROPOSE_LINGER_S": str(LINGER_S)} if spec.role == "draft" else {}
    return _with(spec, METRICS_PORT=port, NUM_BLOCKS=str(blocks), **linger)


def _with(spec: ServiceSpec, **settings: str) -> ServiceSpec:
    """Return a spec with more settings; a role ignores none, so an orchestrator gets no model's."""
    if spec.role == "orchestrate":
        settings.pop("TOY_ORDER", None)
    return replace(spec, settings={**spec.settings, **_prefixed(spec.role, **settings)})


def _prefixed(role: str, **settings: str) -> dict[str, str]:
    return {PREFIX[role] + name: value for name, value in settings.items()}


def metrics_port(spec: ServiceSpec) -> int:
    """Return where a busy service shows its metrics."""
    return int(spec.settings[f"{PREFIX[spec.role]}METRICS_PORT"])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
