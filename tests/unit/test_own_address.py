"""Which address a process announces."""

import pytest

from outrider.errors import Unavailable
from outrider.rpc.own_address import advertised


@pytest.mark.parametrize(
    ("setting", "listening", "store_url", "announced"),
    [
        ("draft.example:9", "0.0.0.0:7402", "redis://127.0.0.1/0", "draft.example:9"),
        ("", "127.0.0.3:7402", "redis://10.0.0.1/0", "127.0.0.3:7402"),
        ("", "unix:/run/draft", "redis://10.0.0.1/0", "unix:/run/draft"),
        ("", "0.0.0.0:7402", "redis://127.0.0.1:6379/0", "127.0.0.1:7402"),
        ("", "0.0.0.0:7402", "rediss+cluster://127.0.0.1", "127.0.0.1:7402"),
        ("", "0.0.0.0:7402", "unix:///run/store?db=0", "127.0.0.1:7402"),
        ("", "0.0.0.0:7402", "", "127.0.0.1:7402"),
        ("", "[::]:7402", "redis://127.0.0.1:6379/0", "127.0.0.1:7402"),
        ("", "[::]:7402", "redis://[::1]:6379/0", "[::1]:7402"),
    ],
)
async def test_the_address_on_the_stores_side_is_announced_where_every_interface_is_listened_on(
    setting: str, listening: str, store_url: str, announced: str
) -> None:
    assert await advertised(setting, listening, store_url) == announced


async def test_a_store_that_is_not_known_leaves_it_to_the_operator() -> None:
    with pytest.raises(Unavailable, match=r"no-such-host\.invalid .*; set ADVERTISE"):
        await advertised("", "0.0.0.0:7402", "redis://no-such-host.invalid:6379/0")
