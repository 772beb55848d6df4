"""Random requests after the HTTP door's own schema: `python -m benchmarks.schema_cases --cases 10000`.

Half of the requests fit the schema, half do not. None may be answered by a status of 5xx, hang, or have a response that
the schema does not show. The door stands in this process, before a toy model with a short context; requests come from
another thread.
"""

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from benchmarks.machine import facts
from benchmarks.results import facts_list, table, write
from outrider.store.embedded import EmbeddedServer
from tests.integration.cluster_bench import Bench
from tests.integration.http_door import door

TIMEOUT_S = 20.0
"""A response that takes longer hangs."""
CONTEXT_LEN = 64
WEIGHTS = {"/v1/chat/completions": 10, "/v1/completions": 10}
"""Share of the requests; other routes have 1 each."""
ENDLESS = ("/cluster/events",)
"""Routes that by design do not end."""
PART = 500
"""Requests of one seed."""


@dataclass
class Outcome:
    """What was answered."""

    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    longest_s: float = 0.0

    @property
    def num_cases(self) -> int:
        """Requests that were answered."""
        return sum(self.statuses.values())


def run_cases(url: str, num_cases: int, first_seed: int = 0) -> Outcome:
    """Send requests; blocks.

    Args:
        url: of the door.
        num_cases: how many, about.
        first_seed: of the first part.
    """
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    found: Any = schema.get_all_operations()
    operations = [operation for each in found if (operation := each.ok()).path not in ENDLESS]
    total = sum(WEIGHTS.get(each.path, 1) for each in operations)
    outcome = Outcome()
    for operation in operations:
        share = max(2, num_cases * WEIGHTS.get(operation.path, 1) // total)
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            if mode is GenerationMode.NEGATIVE and not (operation.body or operation.path_parameters):
                continue
            for part, count in enumerate(_parts(share // 2)):
                _send(operation, mode, count, first_seed + part, url, outcome)
    return outcome


def _parts(count: int) -> Iterator[int]:
    while count > 0:
        yield min(count, PART)
        count -= PART


def _send(operation: Any, mode: GenerationMode, count: int, number: int, url: str, outcome: Outcome) -> None:
    """Send requests to one route."""

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def one(case: Any) -> None:
        began = time.monotonic()
        try:
            response = case.call(base_url=url, timeout=TIMEOUT_S)
        except Exception as error:  # whatever a client may meet is a finding, and the run goes on
            outcome.problems.append(f"{operation.label}: no answer ({error!r}) to {case.as_curl_command()[:2000]}")
            return
        outcome.longest_s = max(outcome.longest_s, time.monotonic() - began)
        outcome.statuses[operation.path, response.status_code] += 1
        if response.status_code >= 500:
            outcome.problems.append(f"{operation.label}: {response.status_code} to {case.as_curl_command()[:2000]}")
            return
        try:
            case.validate_response(response, checks=[content_type_conformance, response_schema_conformance])
        except Exception as error:
            outcome.problems.append(f"{operation.label}: {error} to {case.as_curl_command()[:2000]}")

    one()


async def run_on_a_toy(num_cases: int, first_seed: int = 0) -> Outcome:
    """Open a door before a toy model, and send requests to it."""
    async with (
        EmbeddedServer() as store,
        Bench(store.url) as bench,
        door(bench, verifier={"context_len": CONTEXT_LEN, "max_sessions": 64}) as opened,
    ):
        outcome = await asyncio.to_thread(run_cases, opened.url, num_cases, first_seed)
        left = len(opened.app.sessions or ())
        if left:
            outcome.problems.append(f"{left} generations were left behind")
        return outcome


def main() -> int:
    """Run, write the page, and return whether anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    machine, began = facts(), time.monotonic()
    outcome = asyncio.run(run_on_a_toy(options.cases, options.seed))
    took_s = time.monotonic() - began
    rows = [(path, status, count) for (path, status), count in sorted(outcome.statuses.items())]
    verdict = "none" if not outcome.problems else "\n\n" + "\n".join(f"- `{each}`" for each in outcome.problems[:50])
    page = f"""# Random requests after the HTTP schema

{outcome.num_cases} requests, half of which do not fit the schema, seed {options.seed}, in {took_s:.0f} s. The longest
took {outcome.longest_s:.2f} s. Problems (a status of 5xx, no answer within {TIMEOUT_S:g} s, a response that the schema
does not show, a generation left behind): {verdict}

{table(("route", "status", "requests"), rows)}

{facts_list(machine)}
"""
    data = {
        "cases": outcome.num_cases,
        "seed": options.seed,
        "longest_s": outcome.longest_s,
        "problems": outcome.problems,
        "statuses": [list(row) for row in rows],
        "machine": machine,
    }
    print(f"{outcome.num_cases} requests, {len(outcome.problems)} problems: {write('schema_cases', data, page)}")
    for problem in outcome.problems[:10]:
        print(problem)
    return 1 if outcome.problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
