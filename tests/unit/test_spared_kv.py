"""Drafts give way where their rows would cost a served session its KV."""

from outrider.ids import Mode
from outrider.messages import Speculation
from outrider.model.runner import BLOCK_LEN
from outrider.model.toy import ToyLanguage, ToyRunner
from tests.unit.verify_desk import VOCAB, Client, Desk, Request, noisy_draft


def test_a_run_is_cut_before_another_session_loses_its_kv() -> None:
    """Two sessions with a block each and none free: a whole run of the older one's would take the younger one's."""
    prompt = tuple(number % VOCAB for number in range(1, BLOCK_LEN - 8))
    desk = Desk(ToyRunner(ToyLanguage(VOCAB, seed=5), num_blocks=2))
    requests = [
        Request("older", (0, *prompt), Mode.GREEDY, max_tokens=20, speculation=Speculation(16, 16, 16)),
        Request("younger", (1, *prompt), Mode.GREEDY, max_tokens=4, speculation=Speculation(4, 4, 4)),
    ]
    clients = [Client(desk, request, noisy_draft(0.0), eager=1.0) for request in requests]
    desk.run(clients)
    assert [len(client.output) for client in clients] == [20, 4]
    assert desk.engine.counters["rows_spared_for_kv"] > 0
    assert desk.engine.counters["preempted"] == 0
