"""`outrider top`: what is scraped, what two scrapes say, and the tables."""

from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge
from rich.console import Console

from orchestrator.figures import Round
from orchestrator.metrics import Metrics
from outrider.cli.top.command import metrics_url
from outrider.cli.top.scrape import Sample, scrape, scrape_all, summed
from outrider.cli.top.view import NOTHING, Seen, page
from outrider.ids import Epoch, TokenKind, WorkerId
from outrider.messages import Vocabulary, WorkerDescription
from outrider.telemetry import metrics_endpoint
from tests.ports import free_port


def worker(role: str, **fields: object) -> WorkerDescription:
    known: dict[str, object] = {"capacity": 8, "load": 3, **fields}
    return WorkerDescription(
        WorkerId(f"{role}-1"),
        role,
        "127.0.0.1:7400",
        "toy",
        Vocabulary("toy", 8),
        64,
        **known,  # type: ignore[arg-type]
    )


def shown(*seen: Seen, width: int = 200) -> str:
    console = Console(width=width, markup=False)
    with console.capture() as captured:
        console.print(page(seen))
    return captured.get()


@pytest.fixture
def orchestrator() -> Iterator[tuple[Metrics, str]]:
    """Metrics of an orchestrator that has served something, and their address."""
    metrics = Metrics()
    kinds = (TokenKind.ACCEPTED, TokenKind.ACCEPTED, TokenKind.RECOVERED)
    metrics.count_round(Round(Epoch(), Epoch().next_round(), "tested", kinds, 3, 2, 0.01, 0.0), 0, WorkerId("draft-1"))
    metrics.drafter_tested.labels("feature").inc(3)
    metrics.drafter_accepted.labels("feature").inc(2)
    metrics.speculation.off.labels("vocabulary").inc(4)
    with metrics_endpoint(metrics.registry, free_port(), "127.0.0.1") as port:
        yield metrics, f"http://127.0.0.1:{port}/metrics"


def test_a_scrape_of_a_real_endpoint_fills_the_tables(orchestrator: tuple[Metrics, str]) -> None:
    _, url = orchestrator
    text = shown(Seen(worker("orchestrate"), scrape(url)))
    lines = [line.split() for line in text.splitlines()]
    row = next(line for line in lines if "orchestrate-1" in line)
    assert row[2] == "3/8"
    assert row[-2] == "0.67", "accepted of tested"
    assert any(line[:2] == ["position", "1"] and "1.00" in line for line in lines), "counted from 1, as people do"
    assert any(line[:2] == ["position", "3"] and "0.00" in line for line in lines)
    assert not any(line[:2] in (["position", "0"], ["position", "4"]) for line in lines)
    assert any(line[:2] == ["drafter", "feature"] and "0.67" in line for line in lines)
    assert any(line[:2] == ["off:", "vocabulary"] and "4" in line for line in lines)


def test_positions_beyond_those_shown_are_summed_and_said() -> None:
    tested, accepted = (f"outrider_spec_decode_num_{name}_tokens_per_pos_total" for name in ("tested", "accepted"))
    values = {(tested, frozenset({("position", str(at))})): 4.0 for at in range(12)}
    values |= {(accepted, frozenset({("position", str(at))})): 1.0 for at in range(12)}
    lines = shown(Seen(worker("orchestrate"), Sample(1.0, values))).splitlines()
    assert sum(line.startswith("position ") for line in lines) == 8
    [further] = [line.split() for line in lines if "further" in line]
    assert further == ["4", "further", "ones,", "up", "to", "12", "4", "16", "0.25"]


def test_eighty_columns_hold_every_name_figure_and_address_in_one_piece() -> None:
    values = {(f"outrider_{name}", frozenset[tuple[str, str]]()): 123456.0 for name in (
        "generation_tokens_total", "draft_drafted_tokens_total", "num_requests_waiting",
        "spec_decode_num_tested_tokens_total", "spec_decode_num_accepted_tokens_total",
    )} | {("outrider_kv_cache_usage_perc", frozenset[tuple[str, str]]()): 1.0}  # fmt: skip
    before = Sample(1.0, dict.fromkeys(values, 0.0))
    seen = [Seen(described(role), Sample(11.0, values), before) for role in ("orchestrate", "verify", "draft")]
    text = shown(*seen, width=80)
    for whole in ("orchestrators", "draft workers", "127.0.0.1:45678", "200/256", "123456", "12345.6", "100%", "1.00"):
        assert whole in text, text
    for each in seen:
        assert f"{each.worker.worker_id} " in text, text


def described(role: str) -> WorkerDescription:
    name = {"orchestrate": "orchestrator-1", "verify": "verify-1", "draft": "draft-1"}[role]
    return WorkerDescription(
        WorkerId(name), role, "127.0.0.1:45678", "toy", Vocabulary("toy", 8), 64, capacity=256, load=200
    )


def test_rates_come_of_two_looks(orchestrator: tuple[Metrics, str]) -> None:
    metrics, url = orchestrator
    before = scrape(url)
    metrics.speculation.tokens.labels("plain").inc(500)
    now = scrape(url)
    seen = Seen(worker("orchestrate"), Sample(before.at_s + 10.0, now.values), before)
    assert seen.rate("outrider_generation_tokens_total") == pytest.approx(50.0)
    assert Seen(worker("orchestrate"), now).rate("outrider_generation_tokens_total") is None
    restarted = Seen(worker("orchestrate"), Sample(now.at_s + 1.0, before.values), now)
    assert restarted.rate("outrider_generation_tokens_total") == 0.0


def test_workers_of_all_roles_have_a_line_whether_or_not_they_have_metrics() -> None:
    registry = CollectorRegistry()
    Gauge("outrider_num_requests_waiting", "w", registry=registry).set(5)
    Gauge("outrider_kv_cache_usage_perc", "k", registry=registry).set(0.25)
    with metrics_endpoint(registry, free_port(), "127.0.0.1") as port:
        verifier = scrape(f"http://127.0.0.1:{port}/metrics")
    nowhere = scrape(f"http://127.0.0.1:{free_port()}/metrics")
    text = shown(
        Seen(worker("verify", draining=True), verifier),
        Seen(worker("draft", attributes={"trouble": "[red]it hangs[/red]"}), nowhere),
    )
    verifier_line = next(line for line in text.splitlines() if "verify-1" in line)
    assert "draining" in verifier_line
    assert "25%" in verifier_line
    assert verifier_line.split().count("5") == 1
    draft_line = next(line for line in text.splitlines() if "draft-1" in line)
    assert "[red]it hangs[/red], no metrics: " in draft_line
    assert NOTHING in draft_line


def test_an_empty_registry_is_said() -> None:
    assert "nobody is in the registry" in shown()


def test_a_page_that_is_no_metrics_page_is_trouble_and_no_crash() -> None:
    assert scrape("").trouble == "no metrics"
    assert [each.trouble != "" for each in scrape_all(["", "http://127.0.0.1:1/metrics"])] == [True, True]


def test_several_processes_are_summed() -> None:
    registries = [CollectorRegistry() for _ in range(2)]
    for number, registry in enumerate(registries, start=1):
        Counter("outrider_x", "x", ["kind"], registry=registry).labels("a").inc(number)
    samples = []
    for registry in registries:
        with metrics_endpoint(registry, free_port(), "127.0.0.1") as port:
            samples.append(scrape(f"http://127.0.0.1:{port}/metrics"))
    assert summed(samples).by("outrider_x_total", "kind") == {"a": 3.0}


@pytest.mark.parametrize(
    ("address", "port", "url"),
    [
        ("10.0.0.5:7401", "9400", "http://10.0.0.5:9400/metrics"),
        ("[::1]:7401", "9400", "http://[::1]:9400/metrics"),
        ("unix:/run/outrider.sock", "9400", "http://127.0.0.1:9400/metrics"),
        ("10.0.0.5:7401", "0", ""),
        ("10.0.0.5:7401", "9400@evil", ""),
    ],
)
def test_metrics_are_where_a_worker_says(address: str, port: str, url: str) -> None:
    described = WorkerDescription(
        WorkerId("v"), "verify", address, "toy", Vocabulary("toy", 8), 64, attributes={"metrics_port": port}
    )
    assert metrics_url(described) == url
