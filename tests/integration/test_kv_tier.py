"""The KV tier through real verifiers: settings, sockets, a stop in good order, metrics."""

from pathlib import Path

import pytest
from prometheus_client import generate_latest

from outrider.errors import InvalidRequest
from outrider.ids import TokenClass
from outrider.messages import DecodeOpen
from outrider.store.embedded import EmbeddedServer
from tests.integration.verify_bench import connected, control, expected_text, undrafted, verifier
from verify_service.app import VerifyApp
from verify_service.config import VerifySettings

PROMPT = tuple(3 + at * at % 200 for at in range(300))
NUM_NEW = 60
SLOW = {"toy_delay_s": 0.03, "kv_tier_deadline_s": 30.0}
"""Passes that take longer than a load."""


def long_session(length: int) -> DecodeOpen:
    """A session whose log has so many tokens, some of them answered."""
    text = [*PROMPT, *expected_text(PROMPT, NUM_NEW)][:length]
    classes = [TokenClass.PROMPT] * (len(PROMPT) - 1) + [TokenClass.DECODE] * (length - len(PROMPT) + 1)
    return undrafted(
        token_ids=tuple(text), classes=tuple(classes), prompt_len=len(PROMPT), commit_limit=len(PROMPT) + NUM_NEW
    )


def metric(app: VerifyApp, line: str) -> float:
    lines = generate_latest(app.metrics.registry).decode().splitlines()
    return next(float(each.rsplit(" ", 1)[1]) for each in lines if each.startswith(line))


async def finish(app: VerifyApp, length: int) -> list[int]:
    async with connected(app) as stub, control(stub, long_session(length)) as session:
        return await session.finish()


async def test_a_session_goes_on_at_a_verifier_that_has_never_seen_it(valkey_url: str, tmp_path: Path) -> None:
    async with EmbeddedServer() as server:
        tier: dict[str, object] = {"kv_tier_url": server.url, **SLOW}
        async with verifier(**tier) as first:
            text = await finish(first, len(PROMPT))
            assert first.describe().attributes["kv_tier"]
        assert text == expected_text(PROMPT, NUM_NEW)
        async with verifier(worker_id="verify-2", **tier) as second:
            assert await finish(second, len(PROMPT) + 30) == text
            assert metric(second, 'outrider_verify_events_total{kind="kv_restored_tokens"}') == 320
            assert metric(second, 'outrider_kv_tier_blocks_total{kind="loaded"}') == 5
            assert metric(second, 'outrider_kv_tier_refused_total{reason="checksum"}') == 0
            assert metric(second, 'outrider_kv_tier_block_seconds{way="load"}') > 0
            assert first.describe().attributes["kv_tier"] == second.describe().attributes["kv_tier"]
        async with verifier(worker_id="verify-3", toy_seed=1, **tier) as stranger:
            assert stranger.describe().attributes["kv_tier"] != first.describe().attributes["kv_tier"]


async def test_verifiers_without_a_tier_have_no_figures_of_one() -> None:
    async with verifier() as app:
        assert b"kv_tier" not in generate_latest(app.metrics.registry)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("kv_tier_url", "http://x"),
        ("kv_tier_url", "redis+cluster://x"),
        ("kv_tier_ttl_s", 0.5),
        ("kv_tier_budget", "40%"),
        ("kv_tier_in_flight", "much"),
        ("kv_tier_deadline_s", 0),
    ],
)
def test_a_bad_setting_is_refused_by_its_name(setting: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        VerifySettings.load(**{"model": "toy", setting: value})
    assert caught.value.field == f"OUTRIDER_VERIFY_{setting.upper()}"


def test_a_tier_needs_the_reuse_of_prefixes() -> None:
    with pytest.raises(InvalidRequest, match="prefix_reuse"):
        VerifySettings.load(model="toy", kv_tier_url="redis://x", prefix_reuse=False)
