"""The policy on drafters, on every server the store runs on."""

import secrets

import pytest

from outrider.drafter_policy import DrafterPolicy
from outrider.errors import InvalidRequest
from outrider.store.connect import StoreClient
from outrider.store.drafters import PolicyStore
from outrider.store.errors import StateUnreadable


@pytest.fixture
def prefix() -> str:
    return f"test-{secrets.token_hex(4)}"


@pytest.fixture
def policies(client: StoreClient, prefix: str) -> PolicyStore:
    return PolicyStore(client, prefix=prefix)


async def test_a_policy_is_read_back_as_it_was_changed_and_where_there_is_none_nothing_is_detached(
    policies: PolicyStore,
) -> None:
    assert await policies.read() == DrafterPolicy()
    changed = await policies.change(lambda policy: policy.detach("a").divide((("b", 80), ("c", 20))))
    assert changed == DrafterPolicy(("a",), (("b", 80), ("c", 20)))
    assert await policies.read() == changed
    await policies.reset()
    assert await policies.read() == DrafterPolicy()


async def test_of_two_operators_at_once_neither_loses_a_change(
    policies: PolicyStore, client: StoreClient, prefix: str
) -> None:
    other = PolicyStore(client, prefix=prefix)
    seen: list[DrafterPolicy] = []

    def first(policy: DrafterPolicy) -> DrafterPolicy:
        seen.append(policy)
        return policy.detach("a")

    raw = await policies._raw()
    await other.change(lambda policy: policy.detach("b"))
    assert not await policies._write(raw, DrafterPolicy(("a",))), "it has changed since it was read"
    assert await policies.change(first) == DrafterPolicy(("a", "b"))
    assert seen == [DrafterPolicy(("b",))]


async def test_a_record_that_cannot_be_read_is_an_error_that_a_reset_mends(
    policies: PolicyStore, client: StoreClient, prefix: str
) -> None:
    await client.set(f"{prefix}:{{drafters}}:policy", b'{"split": [["a", -1]]}')
    with pytest.raises(StateUnreadable, match=r"policy\.split\.0\.1"):
        await policies.read()
    with pytest.raises(StateUnreadable):
        await policies.change(lambda policy: policy.detach("a"))
    await policies.reset()
    assert await policies.read() == DrafterPolicy()


async def test_what_may_not_be_kept_is_refused_before_it_is_written(policies: PolicyStore) -> None:
    with pytest.raises(InvalidRequest, match="detached"):
        await policies.change(lambda policy: policy.detach("\n"))
    assert await policies.read() == DrafterPolicy()
