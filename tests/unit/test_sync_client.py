"""The client for code without an event loop leaves none behind."""

import pytest

from outrider.errors import InvalidRequest
from outrider.sync_client import SyncClient


def test_a_client_that_cannot_be_made_leaves_no_event_loop_behind() -> None:
    client = SyncClient.__new__(SyncClient)
    with pytest.raises(InvalidRequest, match="addresses"):
        SyncClient.__init__(client, [])
    with pytest.raises(RuntimeError, match="Runner is closed"):
        client._runner.get_loop()
