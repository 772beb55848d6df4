"""Random requests after the HTTP door's own schema: answered, never by a failure of the server."""

from benchmarks.schema_cases import run_on_a_toy


async def test_no_random_request_makes_the_server_fail_or_hang() -> None:
    outcome = await run_on_a_toy(300)
    assert outcome.problems == []
    assert outcome.num_cases > 250
    answered = {status for path, status in outcome.statuses if path == "/v1/completions"}
    assert {200, 400} <= answered, "both what fits and what does not is tried"
