"""What `docs/operations.md` names is there: metrics, lines of logs, settings and their defaults, links."""

import ast
import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from draft_service.config import DraftSettings
from draft_service.metrics import DraftMetrics
from orchestrator.config import OrchestratorSettings
from orchestrator.metrics import Metrics
from outrider.errors import Code, class_of
from outrider.loop_gauge import LoopGauge
from outrider.model.toy import ToyLanguage, ToyRunner
from outrider.store import errors as store_errors
from outrider.tier.identity import identify
from outrider.tier.speeds import Speeds
from outrider.tier.tier import BlockTier, TierSettings
from verify_service.config import VerifySettings
from verify_service.engine import Engine
from verify_service.metrics import VerifyMetrics
from verify_service.owners import Owners
from verify_service.restoring import Tier
from verify_service.servicer import VerifyServicer

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text("utf-8")
SERVICES = ("outrider", "orchestrator", "verify_service", "draft_service")
SETTINGS = (OrchestratorSettings, VerifySettings, DraftSettings)
METRIC = re.compile(r'(outrider_[a-z0-9_]+)(?:\{([a-z]+)="([a-z_]+)"\})?')
FOREIGN = (
    "outrider ",
    "python ",
    "redis-check-aof ",
    "INFO persistence",
    "SLOWLOG ",
    "CONFIG ",
    "min-replicas-to-write ",
)
"""What commands, ours and a server's, begin with: they are no lines of a log."""
HEALTH = {"NOT_SERVING"}
COMMANDS = {"BGREWRITEAOF"}
"""Of the server of the store."""
GAP = "…"


# --- what the code has --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """A text of the sources, its changing parts as gaps."""

    words: str
    level: str
    """Of the log call whose format it is; "ANY" if it is chosen at run time, empty if there is none."""
    file: Path


def plain(node: ast.AST) -> str | None:
    """Return a text with gaps; None if the node is none."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else GAP for part in node.values)
    return None


def logged(node: ast.Call, file: Path) -> Iterator[Text]:
    if not (isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") in ("log", "logger")):
        return
    name = node.func.attr
    level = {"exception": "ERROR", "log": "ANY"}.get(name, name.upper())
    words = plain(node.args[name == "log"])
    assert words is not None, f"{file}:{node.lineno}: a format that is no text"
    yield Text(re.sub(r"%[-.0-9]*[a-z]", GAP, words), level, file)


@cache
def texts() -> tuple[Text, ...]:
    found: list[Text] = []
    for file in (each for service in SERVICES for each in (ROOT / service).rglob("*.py")):
        nodes = list(ast.walk(ast.parse(file.read_text("utf-8"))))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.Call):
                found += logged(node, file)
            words = plain(node)
            if words is not None and id(node) not in docstrings:
                found.append(Text(words, "", file))
    return tuple(found)


def is_said(sentence: str, level: str) -> bool:
    """Whether a text of the sources, logged at that level, has the sentence's fixed parts; no level: in any use."""
    fixed = [part for part in sentence.split(GAP) if part.strip()]
    pattern = re.compile(".*".join(map(re.escape, fixed)), re.DOTALL)
    found = [each for each in texts() if pattern.search(each.words)]
    if not level:
        return bool(found)
    passed_on = {each.file for each in texts() if each.level == level and each.words == GAP}
    return any(each.level in (level, "ANY") or (not each.level and each.file in passed_on) for each in found)


async def metric_names() -> set[str]:
    """Return the names that the services' registries show."""
    runner = ToyRunner(ToyLanguage(8, 1, 1, 1.0), context_len=256, num_blocks=8)
    blocks = BlockTier(identify(runner, b"toy").identity, TierSettings("unix:///nowhere/tier.sock"))
    verifier = VerifyMetrics(VerifyServicer(Owners(False)))
    verifier.watch(Engine(runner, 8, tier=Tier(blocks, Speeds(1.0))))
    loop = CollectorRegistry()
    loop.register(LoopGauge(asyncio.get_running_loop()))
    try:
        registries = (Metrics().registry, verifier.registry, DraftMetrics().registry, loop)
        found = [family for registry in registries for family in registry.collect()]
    finally:
        blocks.close(1.0)
    return {f"{family.name}_total" if family.type == "counter" else family.name for family in found}


# --- what the page says -------------------------------------------------------------------------------------------


def sentences() -> list[tuple[str, str]]:
    """Return the level, empty where none stands before it, and the text of everything quoted that has a space."""
    prose = re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)
    found = re.findall(r"(?:\b(DEBUG|INFO|WARNING|ERROR|CRITICAL)\s+)?`([^`\n]*)`", prose)
    return sorted({(level, text) for level, text in found if " " in text and not text.startswith(FOREIGN)})


def anchors(page: str) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    return {re.sub(r"[^a-z0-9 _-]", "", title.lower()).replace(" ", "-") for title in titles}


async def test_every_metric_is_one_that_a_service_has() -> None:
    named = {name for name, _, _ in METRIC.findall(PAGE)}
    assert len(named) > 30
    assert named - await metric_names() == set()


def test_every_label_and_value_is_one_that_the_code_gives() -> None:
    words = {each.words for each in texts()}
    for name, label, value in {each for each in METRIC.findall(PAGE) if each[1]}:
        # Why nothing is drafted is put together from this prefix and why a draft worker was lost.
        part = value.removeprefix("drafter_") if name == "outrider_speculation_off_total" else value
        known = {value, part} & words or class_of(part.upper()) is not None
        assert label in words, f"{name}: {label}"
        assert known, f"{name}: {value}"


@pytest.mark.parametrize(("level", "sentence"), sentences())
def test_every_sentence_is_one_that_the_code_says_at_that_level(level: str, sentence: str) -> None:
    assert is_said(sentence, level)


def test_a_sentence_that_nobody_says_or_says_at_another_level_is_noticed() -> None:
    assert len(sentences()) > 50
    assert not is_said("worker … is gone fishing", "")
    assert is_said("worker … works again", "INFO")
    assert not is_said("worker … works again", "WARNING")


def test_every_name_in_capitals_is_a_setting_a_status_or_a_reason() -> None:
    settings = {name.upper() for each in SETTINGS for name in each.model_fields}
    statuses = {code.name for code in Code} | HEALTH | COMMANDS
    names = set(re.findall(r"(?<![A-Z_])[A-Z]+(?:_[A-Z]+)+(?![A-Z_])", PAGE)) | set(
        re.findall(r"`([A-Z_]+[A-Z])`", PAGE)
    )
    assert {each for each in names - settings - statuses if class_of(each) is None} == set()


def test_every_default_that_stands_behind_a_setting_is_its_default() -> None:
    named = re.findall(r"`([A-Z_]+)`(?: \(|, )(\d+(?:\.\d+)?)(?: s)?[;)]", PAGE)
    assert len(named) > 15
    for setting, value in named:
        defaults = [
            each.model_fields[setting.lower()].default for each in SETTINGS if setting.lower() in each.model_fields
        ]
        assert float(value) in defaults, f"{setting}: {value}, not {defaults}"


def test_every_link_leads_somewhere() -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", PAGE):
        page = ROOT / "docs" / target if target else ROOT / "docs" / "operations.md"
        assert page.is_file(), target
        assert not anchor or anchor in anchors(page.read_text("utf-8")), f"{target}#{anchor}"


def test_reasons_of_the_store_are_known_here() -> None:
    assert class_of("FENCED") is store_errors.Fenced
