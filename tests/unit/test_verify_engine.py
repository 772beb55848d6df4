"""The verifier's engine, driven step by step: many sessions, one model, and nobody's text depends on anybody else."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from weakref import ref

import pytest
import torch

from outrider.errors import FailedPrecondition, Internal, OutriderError, ResourceExhausted
from outrider.ids import Epoch, Generation, Mode, SessionId, TokenClass, TokenKind, WorkerId
from outrider.messages import (
    COUNT_TOTAL,
    DecodeAttach,
    DecodeProgress,
    Draining,
    Preparing,
    Proposal,
    ProposalHeader,
    ProposeHello,
    RollbackHint,
    SamplingParams,
    SparseRow,
    Speculation,
    TargetFeatures,
    VerdictCause,
    Vocabulary,
)
from outrider.model.runner import Feed, Rows
from outrider.model.toy import ToyLanguage, ToyRunner
from outrider.sampling import UNSOUND
from tests.unit.verify_desk import KEY, OFF, VOCAB, WORKER, ClassesMatter, Client, Desk, Request, noisy_draft, twin
from verify_service.engine import EngineSettings
from verify_service.inbox import CloseSession, Drain, JoinWorker, Malformed, Stop, Ticket
from verify_service.roster import Limits

WARM = SamplingParams(temperature=0.8)
COLD = SamplingParams(temperature=0.0)


def params_of(mode: Mode) -> SamplingParams:
    return COLD if mode is Mode.GREEDY else WARM


def eight_requests(mode: Mode) -> list[Request]:
    """Prompts of 3 to 213 tokens, gammas of 1 to 8, windows of one to four gammas."""
    requests = []
    for index in range(8):
        gamma = 1 + index
        requests.append(
            Request(
                session_id=f"s{index}",
                prompt=tuple((index * 7 + at) % VOCAB for at in range(3 + 30 * index)),
                mode=mode,
                sampling=params_of(mode),
                key=b"" if mode is Mode.GREEDY else bytes([index]) * 16,
                speculation=Speculation(gamma, gamma, gamma * (1 + index % 4)),
            )
        )
    return requests


def untroubled(desk: Desk) -> bool:
    """Nothing failed, and all blocks are back."""
    counters = desk.engine.counters
    return (
        not counters["failed_sessions"]
        and not counters["kv_unbalanced"]
        and desk.runner.free_blocks == desk.runner.info.num_blocks
        and desk.engine.num_sessions == 0
    )


# --- text ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [Mode.GREEDY, Mode.COUPLED])
def test_eight_sessions_at_once_say_what_each_would_say_alone_without_a_drafter(mode: Mode) -> None:
    desk = Desk()
    clients = [
        Client(desk, request, noisy_draft(0.12 * index), seed=3) for index, request in enumerate(eight_requests(mode))
    ]
    desk.run(clients)
    for client in clients:
        assert client.output == twin(client.request), client.request.session_id
    assert untroubled(desk)
    assert all(TokenKind.ACCEPTED in client.kinds for client in clients[:6])


@pytest.mark.parametrize("mode", [Mode.REJECTION, Mode.BLOCK])
def test_eight_sessions_with_rows_finish_and_accept_a_perfect_drafter_more_often(mode: Mode) -> None:
    desk = Desk()
    clients = [Client(desk, request, noisy_draft(0.12 * index)) for index, request in enumerate(eight_requests(mode))]
    desk.run(clients)
    assert untroubled(desk)
    good, bad = clients[0].kinds.count(TokenKind.ACCEPTED), clients[-1].kinds.count(TokenKind.ACCEPTED)
    assert good > bad > 0
    assert desk.engine.counters["draft_row_mismatch"] == 0
    assert all(client.verdicts[-1].guarantee_void == 0 for client in clients)


def test_a_seeded_text_is_the_same_beside_unseeded_neighbours() -> None:
    seeded = Request("seeded", mode=Mode.COUPLED, sampling=WARM, key=KEY)
    desk = Desk()
    client = Client(desk, seeded, noisy_draft(0.3))
    others = [
        Client(desk, Request(f"n{index}", (index,), Mode.REJECTION, WARM, bytes([index]) * 16), noisy_draft(0.5))
        for index in range(5)
    ]
    desk.run([client, *others])
    assert client.output == twin(seeded)


@pytest.mark.parametrize("mode", list(Mode))
def test_runs_longer_than_a_pass_are_split_without_a_trace(mode: Mode) -> None:
    runner = ToyRunner(ToyLanguage(VOCAB, seed=5), row_classes=(2, 4))
    desk = Desk(runner)
    key = b"" if mode is Mode.GREEDY else KEY
    requests = [
        Request(f"s{index}", (index,), mode, params_of(mode), key, speculation=Speculation(16, 16, 32))
        for index in range(3)
    ]
    clients = [Client(desk, request, noisy_draft(0.05)) for request in requests]
    desk.run(clients)
    assert untroubled(desk)
    assert max(runner.passes) <= 64
    for client in clients if mode in (Mode.GREEDY, Mode.COUPLED) else []:
        assert client.output == twin(client.request)


def penalised_text(law: torch.Tensor, penalty: float, count: int) -> list[int]:
    """Say what a language without memory says under a frequency penalty, computed apart from all sampling code."""
    logits: list[float] = law.log().tolist()
    text: list[int] = []
    for _ in range(count):
        scores = [value - penalty * text.count(token) for token, value in enumerate(logits)]
        text.append(scores.index(max(scores)))
    return text


def test_a_drafter_that_repeats_a_token_under_a_penalty_changes_nothing() -> None:
    law = torch.full((VOCAB,), 1.0, dtype=torch.float64)
    law[7], law[9] = 60.0, 6.0
    language = ToyLanguage(VOCAB, order=0, table={(): (law / law.sum()).tolist()})
    request = Request(sampling=SamplingParams(temperature=0.0, frequency_penalty=1.5), max_tokens=12)
    desk = Desk(ToyRunner(language))
    client = Client(desk, request, lambda _: law)
    desk.run([client])
    assert client.output == penalised_text(law, 1.5, 12)
    assert client.output == twin(request, ToyRunner(language))
    assert client.verdicts[0].num_accepted == 2, "7 is right twice, and the third of the run has seen both"


@pytest.mark.parametrize("mode", list(Mode))
def test_a_banned_token_never_appears_however_often_it_is_proposed(mode: Mode) -> None:
    banned = twin(Request(sampling=COLD))[1]
    sampling = replace(params_of(mode), logit_bias=((banned, -100.0),))
    law = torch.full((VOCAB,), 0.1 / (VOCAB - 1), dtype=torch.float64)
    law[banned] = 0.9
    desk = Desk()
    key = b"" if mode is Mode.GREEDY else KEY
    client = Client(desk, Request(mode=mode, sampling=sampling, key=key, max_tokens=80), lambda _: law)
    desk.run([client])
    assert banned not in client.output
    assert TokenKind.RECOVERED in client.kinds


@pytest.mark.parametrize("mode", list(Mode))
def test_logprobs_are_those_of_a_teacher_forced_pass_bit_for_bit(mode: Mode) -> None:
    key = b"" if mode is Mode.GREEDY else KEY
    sampling = replace(params_of(mode), top_k=5, frequency_penalty=0.5)
    request = Request(mode=mode, sampling=sampling, key=key, num_logprobs=3, max_tokens=60)
    desk = Desk()
    client = Client(desk, request, noisy_draft(0.05))
    desk.run([client])
    logprobs = [entry for verdict in client.verdicts for entry in verdict.logprobs]
    assert len(logprobs) == len(client.output)
    assert {TokenKind.ACCEPTED, TokenKind.RECOVERED} <= set(client.kinds)

    runner = ToyRunner(ToyLanguage(VOCAB, seed=5))
    slot = runner.new_slot()
    forced = runner.forward([Feed(slot, tuple(client.committed), TokenClass.DECODE, len(client.committed))])[0].logits
    rows = torch.log_softmax(forced[len(request.prompt) - 1 : -1], dim=-1)
    for token, row, entry in zip(client.output, rows, logprobs, strict=True):
        assert entry.logprob == float(row[token])
        assert [value for _, value in entry.top] == row.sort(descending=True).values[:3].tolist()
        assert all(value == float(row[top]) for top, value in entry.top)


def test_no_logprobs_are_sent_unasked_and_empty_lists_when_none_are_wanted() -> None:
    desk = Desk()
    clients = [Client(desk, Request("a", num_logprobs=-1)), Client(desk, Request("b", num_logprobs=0))]
    desk.run(clients)
    assert all(not verdict.logprobs for verdict in clients[0].verdicts)
    assert all(entry.top == () for verdict in clients[1].verdicts for entry in verdict.logprobs)
    assert sum(len(verdict.logprobs) for verdict in clients[1].verdicts) == 40


def test_a_row_that_its_token_was_not_drawn_from_is_counted() -> None:
    desk = Desk()
    honest = desk.propose

    def lie(message: Proposal | ProposalHeader) -> None:
        if isinstance(message, Proposal):
            row = SparseRow(tuple(range(VOCAB)), (COUNT_TOTAL - VOCAB + 1, *(1,) * (VOCAB - 1)))
            message = replace(message, rows=(row,) * len(message.token_ids))
        honest(message)

    desk.propose = lie  # type: ignore[method-assign]
    client = Client(desk, Request(mode=Mode.REJECTION, sampling=WARM, key=KEY), noisy_draft(0.0))
    desk.run([client])
    assert desk.engine.counters["draft_row_mismatch"] > 10
    assert untroubled(desk)


# --- KV -----------------------------------------------------------------------------------------------------------


def test_ten_thousand_rounds_of_random_acceptance_give_all_blocks_back() -> None:
    desk = Desk(ToyRunner(ToyLanguage(VOCAB, seed=5), num_blocks=128))
    rounds = 0
    generation = 0
    while rounds < 10_000:
        generation += 1
        clients = [
            Client(
                desk,
                Request(f"s{index}", (index,), max_tokens=400, generation=Generation(generation, 0)),
                noisy_draft(0.2 + 0.1 * index, seed=generation),
                seed=generation,
            )
            for index in range(8)
        ]
        desk.run(clients)
        rounds += sum(len(client.verdicts) for client in clients)
        assert untroubled(desk)


def test_kv_that_gave_way_was_not_there_at_the_start() -> None:
    desk = Desk(ToyRunner(ToyLanguage(VOCAB, seed=5), num_blocks=7))
    prompts = [tuple((index + at * at) % VOCAB for at in range(100)) for index in range(3)]
    clients = [Client(desk, Request(f"s{index}", prompt, max_tokens=100)) for index, prompt in enumerate(prompts)]
    desk.run(clients)
    assert desk.engine.counters["preempted"] > 0
    assert {told.num_cached for client in clients for told in client.verdicts} == {0}


def test_sessions_that_lose_their_kv_say_the_same_in_the_end() -> None:
    desk = Desk(ToyRunner(ToyLanguage(VOCAB, seed=5), num_blocks=7))
    requests = [Request(f"s{index}", tuple(range(index, index + 20)), max_tokens=250) for index in range(4)]
    clients = [Client(desk, request, noisy_draft(0.1 * index)) for index, request in enumerate(requests)]
    desk.run(clients)
    assert desk.engine.counters["preempted"] > 0
    assert [client.output for client in clients] == [twin(request) for request in requests]
    assert untroubled(desk)


def test_kv_is_rebuilt_with_each_tokens_own_class() -> None:
    requests = [Request(f"s{index}", tuple(range(20)) * 4, max_tokens=200) for index in range(3)]
    desk = Desk(ClassesMatter(num_blocks=9))
    clients = [Client(desk, request, noisy_draft(0.1)) for request in requests]
    desk.run(clients)
    assert desk.engine.counters["preempted"] > 0
    assert [client.output for client in clients] == [twin(request, ClassesMatter()) for request in requests]


def test_a_session_reopened_from_its_log_continues_as_if_nothing_had_happened() -> None:
    request = Request(prompt=tuple(range(20)) * 5, max_tokens=120)
    expected = twin(request, ClassesMatter())
    for cut in (1, 27, 28, 29, 90):
        classes = (TokenClass.PROMPT,) * 100 + (TokenClass.DECODE,) * cut
        log = request.prompt + tuple(expected[:cut])
        again = replace(request, prompt=log, classes=classes, prompt_len=100, generation=Generation(2, 0))
        assert twin(again, ClassesMatter()) == expected, cut


def test_planted_mistake_a_rebuild_with_the_wrong_classes_is_noticed() -> None:
    request = Request(prompt=tuple(range(20)) * 5, max_tokens=120)
    expected = twin(request, ClassesMatter())
    log = request.prompt + tuple(expected[:60])
    lost = replace(request, prompt=log, classes=(TokenClass.PROMPT,) * 160, prompt_len=100)
    assert twin(lost, ClassesMatter()) != expected


def test_the_next_turn_reuses_what_is_its_own_by_ids_and_classes() -> None:
    desk = Desk(ClassesMatter())
    first = Client(desk, Request(prompt=tuple(range(20)) * 5, max_tokens=30))
    desk.run([first])  # closes without keeping
    kept = Client(desk, replace(first.request, generation=Generation(2, 0)))
    while len(kept.committed) < 120:
        desk.step()
    desk.post(CloseSession(kept.ticket, keep_kv=True))
    desk.step()
    decoded = len(kept.committed) - 100
    classes = (TokenClass.PROMPT,) * 99 + (TokenClass.DECODE,) * (decoded + 1)

    turn = (*kept.committed, 3, 4, 5)
    request = Request(
        prompt=turn, classes=(*classes, *(TokenClass.PROMPT,) * 3), max_tokens=20, generation=Generation(3, 0)
    )
    before = desk.engine.counters["kv_reused_tokens"]
    again = Client(desk, request)
    desk.run([again])
    assert desk.engine.counters["kv_reused_tokens"] - before == 64, "the whole blocks of the 130 tokens or so"
    assert {told.num_cached for told in again.verdicts if told.token_ids} == {64}
    assert {told.num_cached for told in (*first.verdicts, *kept.verdicts)} == {0}
    assert again.output == twin(request, ClassesMatter())

    other = replace(request, classes=(TokenClass.PROMPT,) * len(turn), generation=Generation(4, 0))
    reused = desk.engine.counters["kv_reused_tokens"]
    desk.run([Client(desk, other)])
    assert desk.engine.counters["kv_reused_tokens"] == reused, "nothing was kept, so nothing could be reused"


def test_a_resident_prefix_of_other_classes_is_reused_only_up_to_the_difference() -> None:
    desk = Desk(ClassesMatter())
    first = Client(desk, Request(prompt=tuple(range(20)) * 5, max_tokens=60))
    while len(first.committed) < 130:
        desk.step()
    desk.post(CloseSession(first.ticket, keep_kv=True))
    desk.step()
    log = tuple(first.committed[:130])
    request = Request(
        prompt=log, prompt_len=130, classes=(TokenClass.PROMPT,) * 130, max_tokens=20, generation=Generation(2, 0)
    )
    again = Client(desk, request)
    desk.run([again])
    assert desk.engine.counters["kv_reused_tokens"] == 64, "the block with position 99 has other classes"
    assert again.output == twin(request, ClassesMatter())


def test_a_log_shorter_than_the_resident_kv_wins() -> None:
    desk = Desk()
    first = Client(desk, Request(max_tokens=160))
    while len(first.committed) < 150:
        desk.step()
    desk.post(CloseSession(first.ticket, keep_kv=True))
    desk.step()
    log = tuple(first.committed[:100])
    again = Client(desk, Request(prompt=log, prompt_len=3, max_tokens=160, generation=Generation(2, 0)))
    desk.run([again])
    assert desk.engine.counters["kv_reused_tokens"] == 64
    assert again.committed[3:] == twin(first.request)


def test_kept_kv_is_given_up_before_anybody_runs_short() -> None:
    desk = Desk(ToyRunner(ToyLanguage(VOCAB, seed=5), num_blocks=4))
    idle = Client(desk, Request("idle", tuple(range(20)) * 7, max_tokens=5))
    while len(idle.committed) < 142:
        desk.step()
    desk.post(CloseSession(idle.ticket, keep_kv=True))
    desk.step()
    assert (desk.runner.kv_usage.cached, desk.runner.free_blocks) == (2, 4)
    desk.run([Client(desk, Request("big", tuple(range(1, 20)) * 10, max_tokens=20))])
    assert desk.engine.counters["preempted"] == 0
    assert desk.engine.counters["kv_reused_tokens"] == 0
    assert desk.runner.kv_usage.cached == 0


def test_a_session_larger_than_the_pool_is_refused_or_ends_but_harms_nobody() -> None:
    desk = Desk(ToyRunner(ToyLanguage(VOCAB, seed=5), num_blocks=2))
    too_long = Client(desk, Request("long", tuple(range(20)) * 10))
    growing = Client(desk, Request("growing", tuple(range(20)) * 6, max_tokens=100))
    small = Client(desk, Request("small", (1,), max_tokens=10))
    desk.run([too_long, growing, small])
    assert isinstance(too_long.errors[0], ResourceExhausted)
    assert isinstance(growing.errors[0], ResourceExhausted)
    assert small.output == twin(small.request)
    assert desk.runner.free_blocks == 2


# --- scheduling ---------------------------------------------------------------------------------------------------


def test_everybody_gets_rows_when_there_are_not_enough_for_all() -> None:
    desk = Desk(ToyRunner(ToyLanguage(VOCAB, seed=5), row_classes=(4,)))
    clients = [Client(desk, Request(f"s{index}", (index,), max_tokens=200)) for index in range(9)]
    for _ in range(90):
        desk.step()
    served = [len(client.output) for client in clients]
    assert sum(served) == pytest.approx(4 * 90, abs=8)
    assert max(served) - min(served) <= 1


def test_a_long_prompt_does_not_stop_the_others_from_decoding() -> None:
    runner = ToyRunner(ToyLanguage(VOCAB, seed=5))
    desk = Desk(runner)
    talker = Client(desk, Request("talker", (1,), max_tokens=100))
    for _ in range(5):
        desk.step()
    reader = Client(desk, Request("reader", tuple(range(20)) * 64, max_tokens=5))
    said = len(talker.output)
    runner.passes.clear()
    for _ in range(20):
        desk.step()
    assert len(talker.output) - said == 20
    assert runner.passes.count(64) == 20
    desk.run([reader, talker])
    assert reader.output == twin(reader.request)


def test_prompts_share_steps_when_nobody_decodes() -> None:
    runner = ToyRunner(ToyLanguage(VOCAB, seed=5))
    desk = Desk(runner)
    for index in range(5):
        Client(desk, Request(f"s{index}", (index, *range(20)) * 12))
    desk.step()
    assert runner.passes == [64] * 5


def test_drafting_begins_while_the_prompt_is_still_being_read() -> None:
    desk = Desk()
    client = Client(desk, Request(prompt=tuple(range(20)) * 20, max_tokens=8), noisy_draft(0.0), eager=1.0)
    client.act()
    desk.step()
    assert not client.verdicts
    while not client.verdicts:
        desk.step()
    assert client.verdicts[0].num_accepted == 4
    assert client.verdicts[0].queue_s > 0
    assert client.verdicts[0].num_rows == 5


def test_sessions_beyond_the_places_wait_in_line_and_beyond_the_line_are_refused() -> None:
    desk = Desk(settings=EngineSettings(limits=Limits(max_sessions=1, max_waiting=1, retry_delay_s=2.5)))
    first, second, third = (Client(desk, Request(f"s{index}", max_tokens=10)) for index in range(3))
    desk.step()
    assert isinstance(third.errors[0], ResourceExhausted)
    assert third.errors[0].retry_delay_s == 2.5
    assert desk.engine.num_waiting == 1
    desk.run([first, second])
    assert second.output == first.output == twin(first.request)


def test_a_burst_at_full_capacity_passes_after_a_disconnect_at_any_moment() -> None:
    limits = EngineSettings(limits=Limits(max_sessions=4, max_waiting=0))
    for moment in range(6):
        desk = Desk(settings=limits)
        gone = [Client(desk, Request(f"gone{index}", (index,)), noisy_draft(0.2)) for index in range(4)]
        for at in range(moment):
            for client in gone[: 1 + at % 4]:
                client.act()
            desk.step()
        for client in gone:
            desk.post(CloseSession(client.ticket, keep_kv=True))
        burst = [Client(desk, Request(f"new{index}", (index,), max_tokens=5)) for index in range(4)]
        desk.run(burst)
        assert all(client.output == twin(client.request) for client in burst)


# --- waiting ------------------------------------------------------------------------------------------------------


def test_a_silent_drafter_costs_patience_three_times_and_then_nothing() -> None:
    desk = Desk()
    client = Client(desk, Request(patience_s=0.5, max_tokens=12), noisy_draft(0.0), eager=0.0)
    started = desk.clock.now_s
    desk.run([client])
    causes = [verdict.cause for verdict in client.verdicts]
    assert causes == [VerdictCause.PATIENCE] * 3 + [VerdictCause.PLAIN] * 9
    assert desk.clock.now_s - started == pytest.approx(3 * 0.5, abs=0.3)
    assert client.output == twin(client.request)


def test_a_session_that_is_over_is_not_kept_until_its_patience_would_have_run_out() -> None:
    desk = Desk()
    client = Client(desk, Request(patience_s=1e9), noisy_draft(0.0), eager=0.0)
    for _ in range(3):
        desk.step()
    assert client.received == [], "it waits for its drafter"
    kept = [ref(each) for each in desk.engine._roster.sessions()]
    desk.post(CloseSession(client.ticket, keep_kv=True))
    desk.step()
    gc.collect()
    assert [each() for each in kept] == [None]


def test_an_announced_body_is_waited_for_up_to_the_hard_limit_which_is_counted() -> None:
    desk = Desk(settings=EngineSettings(body_limit_s=5.0))
    request = Request(mode=Mode.REJECTION, sampling=WARM, key=KEY, patience_s=0.5)
    client = Client(desk, request, noisy_draft(0.0), eager=0.0)
    desk.step()
    desk.propose(ProposalHeader(SessionId("s"), client.epoch, 3, 4))
    desk.step(dt_s=0.01)
    desk.step(dt_s=4.9)
    assert not client.verdicts
    desk.step(dt_s=0.2)
    assert (client.verdicts[0].cause, client.verdicts[0].guarantee_void) == (VerdictCause.QUARANTINED, 1)
    assert client.verdicts[1].kinds == (TokenKind.PLAIN,)


def test_a_session_that_waits_hears_that_it_is_not_forgotten_and_one_that_runs_does_not() -> None:
    desk = Desk(settings=EngineSettings(Limits(max_sessions=1), sign_of_life_s=5.0))
    running = Client(desk, Request(max_tokens=40))
    waiting = Client(desk, Request(session_id="t", max_tokens=4))
    desk.step(dt_s=4.9)
    assert waiting.received == []
    desk.step(dt_s=0.2)
    desk.step(dt_s=5.1)
    assert waiting.received == [Preparing(), Preparing()]
    assert Preparing() not in running.received
    desk.run([running, waiting])
    assert waiting.output == twin(waiting.request)


def test_a_session_whose_prompt_is_still_read_hears_that_it_is_not_forgotten() -> None:
    desk = Desk(settings=EngineSettings(sign_of_life_s=1.0, fill_alone=1))
    client = Client(desk, Request(prompt=tuple(range(20)) * 20, max_tokens=1))
    for _ in range(3):
        desk.step(dt_s=1.1)
    assert client.received == [Preparing()] * 3


def test_patience_does_not_run_while_the_prompt_is_read() -> None:
    desk = Desk()
    client = Client(desk, Request(prompt=tuple(range(20)) * 20, patience_s=0.05), noisy_draft(0.0), eager=0.0)
    client.tell(DecodeProgress(Generation(1, 0), 400, client.limit, client.request.speculation, 0.05))
    for _ in range(7):
        desk.step(dt_s=1.0)
    desk.step(dt_s=0.04)
    assert not client.verdicts
    desk.step(dt_s=0.02)
    assert client.verdicts[0].cause == VerdictCause.PATIENCE


def test_a_session_stops_at_its_commit_limit_until_that_is_moved() -> None:
    desk = Desk()
    client = Client(desk, Request(max_tokens=40))
    desk.step()
    client.tell(DecodeProgress(Generation(1, 0), 3, 10, OFF, 1.0))
    desk.run([client])
    assert len(client.output) == 40


# --- streams ------------------------------------------------------------------------------------------------------


def test_a_newer_generation_takes_over_and_an_older_one_is_refused() -> None:
    desk = Desk()
    old = Client(desk, Request(generation=Generation(1, 3), max_tokens=80))
    for _ in range(70):
        desk.step()
    log = tuple(old.committed)
    new = Client(desk, Request(prompt=log, prompt_len=3, generation=Generation(2, 0), max_tokens=80))
    desk.step()
    assert isinstance(old.errors[0], FailedPrecondition)
    assert "superseded" in old.errors[0].message
    desk.post(CloseSession(old.ticket, keep_kv=False))  # the old stream's end comes late
    late = Client(desk, Request(generation=Generation(1, 9)))
    desk.run([new, late])
    assert isinstance(late.errors[0], FailedPrecondition)
    assert new.committed[3:] == twin(old.request)
    assert desk.engine.counters["kv_reused_tokens"] == 64


def test_an_attached_generation_counts_when_an_older_one_tries_to_open() -> None:
    desk = Desk()
    client = Client(desk, Request())
    client.tell(DecodeAttach(Generation(1, 5), WORKER))
    desk.step()
    assert client.verdicts[0].cause == VerdictCause.ATTACHED
    assert client.verdicts[0].next_epoch == Epoch(Generation(1, 5))
    late = Client(desk, Request(generation=Generation(1, 4)))
    desk.step()
    assert isinstance(late.errors[0], FailedPrecondition)


def test_a_proposal_that_comes_before_its_session_is_parked_and_delivered() -> None:
    desk = Desk()
    expected = tuple(twin(Request()))
    epoch = Epoch(Generation(1, 0))
    desk.propose(Proposal(SessionId("s"), epoch, 3, 3, 11, expected[:4]))
    desk.step(dt_s=0.5)
    client = Client(desk, Request(), noisy_draft(0.0), eager=0.0)
    for _ in range(3):
        desk.step()
    assert client.verdicts[0].token_ids == expected[:4]
    assert client.verdicts[0].num_accepted == 4


def test_a_parked_proposal_is_dropped_after_a_second_and_too_many_at_once() -> None:
    desk = Desk()
    message = Proposal(SessionId("s"), Epoch(Generation(1, 0)), 3, 3, 11, (1,))
    for _ in range(17):
        desk.propose(message)
    desk.step(dt_s=1.1)
    desk.step(dt_s=1.1)
    Client(desk, Request(), noisy_draft(0.0), eager=0.0)
    desk.step()
    assert desk.engine.counters["parked_overflow"] == 1
    assert desk.engine.counters["parked_expired"] == 16


def test_what_was_parked_too_long_leaves_room_for_what_comes_in_time() -> None:
    desk = Desk()
    late = Proposal(SessionId("s"), Epoch(Generation(1, 0)), 3, 3, 11, (1,))
    for _ in range(16):
        desk.propose(late)
    desk.step()
    expected = tuple(twin(Request()))
    desk.propose(replace(late, token_ids=expected[:4]))
    desk.step(dt_s=1.1)
    client = Client(desk, Request(), noisy_draft(0.0), eager=0.0)
    for _ in range(3):
        desk.step()
    assert desk.engine.counters["parked_overflow"] == 0
    assert client.verdicts[0].token_ids == expected[:4]


def test_what_arrives_while_the_inbox_is_read_waits_for_the_next_step() -> None:
    desk, ended = Desk(), list[object]()

    def opens_again(item: object) -> None:
        """Answer the end of a stream with another one, as a worker does that is started twice."""
        ended.append(item)
        if len(ended) < 50:
            desk.post(JoinWorker(Ticket(100 + len(ended)), hello, opens_again))

    hello = ProposeHello(WorkerId("twice"), Vocabulary("toy", VOCAB))
    desk.post(JoinWorker(Ticket(98), hello, opens_again))
    desk.post(JoinWorker(Ticket(99), hello, opens_again))
    desk.step()
    assert len(ended) == 1
    desk.step()
    assert len(ended) == 2


def test_a_proposal_of_a_generation_not_yet_attached_waits_for_it_one_second() -> None:
    desk = Desk()
    client = Client(desk, Request(), noisy_draft(0.0), eager=0.0)
    desk.step()
    expected = tuple(twin(Request()))
    ahead = Proposal(SessionId("s"), Epoch(Generation(1, 1)), 3, 3, 11, expected[:4])
    desk.propose(ahead)
    desk.step(dt_s=0.5)
    client.tell(DecodeAttach(Generation(1, 1), WORKER))
    desk.step()
    desk.step()
    assert client.verdicts[-1].token_ids == expected[:4]
    desk.propose(replace(ahead, epoch=Epoch(Generation(1, 2))))
    desk.step()
    desk.step(dt_s=1.1)
    assert desk.engine.counters["parked_expired"] == 1


def test_what_waits_for_a_generation_is_dropped_together_as_the_second_of_the_first_ends() -> None:
    desk = Desk()
    Client(desk, Request(), noisy_draft(0.0), eager=0.0)
    desk.step()
    ahead = Proposal(SessionId("s"), Epoch(Generation(1, 1)), 3, 3, 11, tuple(twin(Request()))[:4])
    for _ in range(2):
        desk.propose(ahead)
        desk.step(dt_s=0.6)
    assert desk.engine.counters["parked_expired"] == 0
    desk.step(dt_s=0.5)
    assert desk.engine.counters["parked_expired"] == 2


def test_what_waits_for_a_session_has_a_second_of_its_own() -> None:
    desk = Desk()
    Client(desk, Request(), noisy_draft(0.0), eager=0.0)
    desk.step()
    ahead = Proposal(SessionId("not open"), Epoch(Generation(1, 1)), 3, 3, 11, tuple(twin(Request()))[:4])
    for num_dropped in (0, 0, 1, 2):
        desk.propose(ahead)
        desk.step(dt_s=0.6)
        assert desk.engine.counters["parked_expired"] == num_dropped


@pytest.mark.parametrize("how", ["leaves", "opens again"])
def test_a_broken_propose_stream_resets_the_sessions_of_that_worker_only(how: str) -> None:
    desk = Desk()
    client = Client(desk, Request("s"), noisy_draft(0.0), eager=0.0)
    alone = Client(desk, Request("alone"))
    desk.step()
    before = len(alone.verdicts)
    if how == "leaves":
        desk.leave()
    else:
        old = desk.worker_ticket
        desk.join()
        desk.propose(Proposal(SessionId("s"), client.epoch, 3, 3, 11, (1,)))  # of the round that is over by then
        desk.worker_ticket, new = old, desk.worker_ticket
        desk.propose(Proposal(SessionId("s"), client.epoch, 3, 3, 11, (1,)))  # of a stream that is over
        desk.worker_ticket = new
    desk.step()
    assert [verdict.cause for verdict in client.verdicts] == [VerdictCause.RESET]
    assert client.verdicts[0].token_ids == ()
    assert client.epoch == Epoch(Generation(1, 0), 1)
    assert all(verdict.cause == VerdictCause.PLAIN for verdict in alone.verdicts[before:])
    if how == "opens again":
        assert isinstance(desk.to_worker[0], FailedPrecondition)
        assert desk.engine.counters["stale"] == 2


GARBAGE: dict[str, Callable[[Client], object]] = {
    "an id below 0": lambda client: bad(client, token_ids=(-1,)),
    "an id past 2**31": lambda client: bad(client, token_ids=(2**31,)),
    "the vocabulary's size": lambda client: bad(client, token_ids=(VOCAB,)),
    "an empty list": lambda client: bad(client, token_ids=()),
    "more than asked": lambda client: bad(client, token_ids=(1,) * 5),
    "a limit behind its own end": lambda client: bad(client, token_ids=(1,), limit=3),
    "a future round": lambda client: bad(client, token_ids=(1,), epoch=Epoch(Generation(1, 0), 999)),
}


def bad(client: Client, **changes: object) -> Proposal:
    base = len(client.ids)
    honest = Proposal(SessionId("s"), client.epoch, base, len(client.committed), base + 8, (1,))
    return replace(honest, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_is_dropped_and_counted_and_the_text_stays(kind: str) -> None:
    desk = Desk()
    client = Client(desk, Request(), noisy_draft(0.2))
    for at in range(4):
        desk.propose(GARBAGE[kind](client))  # type: ignore[arg-type]
        for _ in range(at):
            client.act()
            desk.step()
    desk.run([client])
    assert desk.engine.counters["garbage"] > 0
    assert client.output == twin(client.request)
    assert untroubled(desk)


def test_a_worker_that_sends_nothing_but_unreadable_messages_is_cut_off_from_that_session() -> None:
    desk = Desk()
    client = Client(desk, Request(), noisy_draft(0.0), eager=0.0)
    neighbour = Client(desk, Request("neighbour"), noisy_draft(0.0))
    for _ in range(8):
        desk.post(Malformed(desk.worker_ticket, SessionId("s")))
    desk.post(Malformed(desk.worker_ticket, SessionId("nobody")))
    desk.run([client, neighbour])
    assert VerdictCause.QUARANTINED in [verdict.cause for verdict in client.verdicts]
    assert TokenKind.ACCEPTED in neighbour.kinds
    assert client.output == neighbour.output == twin(client.request)
    assert desk.engine.counters["garbage"] == 9


@pytest.mark.parametrize("fault", ["repeated", "lost", "swapped"])
def test_messages_repeated_lost_or_swapped_leave_the_text_alone(fault: str) -> None:
    desk = Desk()
    honest = desk.propose
    waiting: list[Proposal | ProposalHeader] = []
    number = 0

    def unreliable(message: Proposal | ProposalHeader) -> None:
        nonlocal number
        number += 1
        if fault == "repeated":
            honest(message)
            honest(message)
        elif fault == "lost" and number % 3:
            honest(message)
        elif fault == "swapped":
            waiting.append(message)
            if len(waiting) == 2:
                honest(waiting.pop())
                honest(waiting.pop())

    desk.propose = unreliable  # type: ignore[method-assign]
    client = Client(desk, Request(), noisy_draft(0.1), eager=1.0)
    neighbour = Client(desk, Request("neighbour", (5,)))
    desk.run([client, neighbour])
    assert client.output == twin(client.request)
    assert neighbour.output == twin(neighbour.request)
    assert desk.engine.counters["duplicate"] + desk.engine.counters["gap"] > 0


# --- to draft workers ---------------------------------------------------------------------------------------------


def test_a_worker_that_asks_gets_the_hidden_state_of_every_committed_position() -> None:
    desk = Desk(feature_layers=(-1,))
    client = Client(desk, Request(prompt=tuple(range(20)) * 4, max_tokens=30), noisy_draft(0.3))
    desk.run([client])
    features = [item for item in desk.to_worker if isinstance(item, TargetFeatures)]
    seen: list[float] = []
    for item in features:
        assert item.position == len(seen)
        assert item.features.shape[::2] == (1, 1)
        seen += torch.frombuffer(bytearray(item.features.data), dtype=torch.float32).tolist()
    # The toy's hidden state of a position is the length up to it; the last token has not been fed.
    assert seen == [float(at + 1) for at in range(len(client.committed) - (client.kinds[-1] is not TokenKind.ACCEPTED))]


def test_of_a_long_prompt_the_features_of_its_end_are_sent() -> None:
    desk = Desk(feature_layers=(-1,))
    client = Client(desk, Request(prompt=tuple(range(20)) * 10, max_tokens=8), noisy_draft(0.3))
    desk.run([client])
    positions = [item.position for item in desk.to_worker if isinstance(item, TargetFeatures)]
    assert positions[0] == 128, "the stretch [64, 128) ends before the last 32 of 200, and the next one does not"


def test_no_features_are_sent_while_nothing_is_drafted() -> None:
    desk = Desk(feature_layers=(-1,))
    client = Client(desk, Request(speculation=OFF), noisy_draft(0.6))
    desk.run([client])
    assert len(client.committed) == len(Request().prompt) + Request().max_tokens
    assert not [item for item in desk.to_worker if isinstance(item, TargetFeatures)]


def test_features_come_before_the_hint_that_lets_the_drafter_go_on_from_them() -> None:
    desk = Desk(feature_layers=(-1,), takes_hints=True)
    client = Client(desk, Request(), noisy_draft(0.6))
    desk.run([client])
    known, num_hints = 0, 0
    for item in desk.to_worker:
        if isinstance(item, TargetFeatures):
            known = item.position + item.features.shape[1]
        elif isinstance(item, RollbackHint):
            num_hints += 1
            assert known == item.start
    assert num_hints > 3


@pytest.mark.parametrize("sends", [True, False])
@pytest.mark.parametrize("takes", [True, False])
def test_rollback_hints_name_the_verifiers_own_token_to_workers_that_want_them(sends: bool, takes: bool) -> None:
    desk = Desk(settings=EngineSettings(send_hints=sends), takes_hints=takes)
    client = Client(desk, Request(), noisy_draft(0.6))
    desk.run([client])
    hints = [item for item in desk.to_worker if isinstance(item, RollbackHint)]
    assert bool(hints) is (sends and takes)
    for hint in hints:
        assert client.committed[hint.start] == hint.token_id


def test_no_hint_is_sent_while_the_verifier_goes_on_without_its_drafter() -> None:
    desk = Desk(takes_hints=True)
    client = Client(desk, Request(speculation=OFF), noisy_draft(0.6))
    desk.run([client])
    assert len(client.committed) == len(Request().prompt) + Request().max_tokens
    assert not [item for item in desk.to_worker if isinstance(item, RollbackHint)]


# --- faults -------------------------------------------------------------------------------------------------------


class Breakable(ToyRunner):
    """A toy that raises in the passes it is told to."""

    broken = False

    def forward(self, feeds: Sequence[Feed]) -> list[Rows]:
        if self.broken:
            raise RuntimeError("the model broke")
        return super().forward(feeds)


def test_a_model_error_ends_the_sessions_of_that_pass_and_nobody_else() -> None:
    runner = Breakable(ToyLanguage(VOCAB, seed=5))
    desk = Desk(runner)
    running = [Client(desk, Request(f"s{index}")) for index in range(2)]
    waiting = Client(desk, Request("waiting"), noisy_draft(0.1), eager=0.0)
    for _ in range(3):
        desk.step()
    runner.broken = True
    desk.step()
    runner.broken = False
    for client in running:
        assert isinstance(client.errors[0], Internal)
        assert "the model broke" in client.errors[0].message
    waiting.eager = 1.0
    after = Client(desk, Request("after"))
    desk.run([waiting, after])
    assert waiting.output == after.output == twin(after.request)


class Watched(ToyRunner):
    """A toy that notes what is asked of it, and may give rows that are no numbers to the last feed of a pass."""

    def __init__(self, language: ToyLanguage) -> None:
        super().__init__(language)
        self.asked: set[int] = set()
        self.unsound = False

    def forward(self, feeds: Sequence[Feed]) -> list[Rows]:
        self.asked |= {feed.best_below for feed in feeds if feed.num_rows}
        outputs = super().forward(feeds)
        best = outputs[-1].best
        if self.unsound and best is not None:
            outputs[-1].best = torch.full_like(best, UNSOUND)
        return outputs


@pytest.mark.parametrize("eager", [0.0, 0.7])
def test_a_greedy_session_has_the_same_text_by_likeliest_ids_as_by_logits(eager: float) -> None:
    bare, full = Watched(ToyLanguage(VOCAB, seed=5)), Watched(ToyLanguage(VOCAB, seed=5))
    texts = []
    for runner, num_logprobs in ((bare, -1), (full, 0)):
        desk = Desk(runner)
        client = Client(desk, Request(num_logprobs=num_logprobs, max_tokens=200), noisy_draft(0.5), eager=eager)
        desk.run([client])
        texts.append(client.output)
    assert texts[0] == texts[1]
    assert (bare.asked, full.asked) == ({VOCAB}, {0})


def test_a_row_that_is_no_output_of_a_sound_model_ends_its_own_session_only() -> None:
    runner = Watched(ToyLanguage(VOCAB, seed=5))
    desk = Desk(runner)
    clients = [Client(desk, Request(f"s{index}", max_tokens=5)) for index in range(2)]
    runner.unsound = True
    while not any(client.errors for client in clients):
        desk.step()
    runner.unsound = False
    broken = next(client for client in clients if client.errors)
    assert isinstance(broken.errors[0], Internal)
    assert "not finite" in broken.errors[0].message
    other = next(client for client in clients if client is not broken)
    desk.run([other])
    assert other.output == twin(other.request)


class Forgetful(ToyRunner):
    """A toy that loses a token of KV once."""

    def forward(self, feeds: Sequence[Feed]) -> list[Rows]:
        outputs = super().forward(feeds)
        slot = feeds[0].slot
        if slot.length == 10:
            slot.truncate(9)
        return outputs


def test_planted_mistake_kv_of_the_wrong_length_is_found_at_once() -> None:
    desk = Desk(Forgetful(ToyLanguage(VOCAB, seed=5)))
    client = Client(desk, Request())
    desk.run([client])
    assert isinstance(client.errors[0], Internal)
    assert "length 9 to 10" in client.errors[0].message
    assert len(client.committed) <= 11


# --- thread -------------------------------------------------------------------------------------------------------


def test_every_open_stream_is_told_of_draining() -> None:
    desk = Desk()
    client = Client(desk, Request())
    desk.post(Drain("going down"))
    desk.step()
    assert Draining("going down") in client.received
    assert desk.to_worker == [Draining("going down")]


def test_the_thread_serves_sleeps_and_stops() -> None:
    desk = Desk()
    ends: list[Exception | None] = []
    desk.engine.start(ends.append)
    client = Client(desk, Request(max_tokens=20))
    for _ in range(6000):
        if client.done:
            break
        torch.zeros(1).add_(1)
        desk.engine.join(0.01)
    assert client.output == twin(client.request)
    left = Client(desk, Request("left"), noisy_draft(0.0), eager=0.0)
    desk.post(Stop())
    assert desk.engine.join(60.0)
    assert ends == [None]
    assert isinstance(left.errors[0], OutriderError)
