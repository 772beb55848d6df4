"""What a process loads before it knows what it will serve."""

import subprocess
import sys

import pytest

SERVICES = ("orchestrator.app", "draft_service.app", "verify_service.app", "outrider.cli.app")


@pytest.mark.parametrize("module", SERVICES)
def test_no_model_library_is_imported_before_a_model_is_asked_for(module: str) -> None:
    """They take seconds of every start, and a quarter of an orchestrator's memory."""
    ask = f"import sys, {module}; print(*sorted({{'transformers', 'matplotlib'}} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []
