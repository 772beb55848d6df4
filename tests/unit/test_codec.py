"""The codec, guarding: nothing illegal gets through it, and whoever sent it is told what was wrong."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.message import Message

from outrider.codec import decode, draft, figures, generation, propose, types
from outrider.codec.checks import PEER
from outrider.errors import InvalidRequest, ProtocolError
from outrider.generation import (
    Figures,
    GenerationRequest,
    TextPrompt,
)
from outrider.ids import Epoch, Generation, Mode, SessionId, TokenClass, TokenKind
from outrider.messages import (
    COUNT_TOTAL,
    DecodeOpen,
    DecodeProgress,
    Pass,
    Proposal,
    SamplingParams,
    SparseRow,
    Speculation,
    Tensor,
    TokenLogprobs,
    Verdict,
    VerdictCause,
)
from outrider.parameters import validate
from outrider.v1 import draft_pb2, generation_pb2, types_pb2, verify_pb2

# --- what peers may not send --------------------------------------------------------------------------------------

EPOCH = Epoch(Generation(3, 1), 4)
ROW = SparseRow((7, 9), (COUNT_TOTAL - 1, 1))


def good_proposal() -> verify_pb2.ProposeRequest:
    return propose.propose_request_to_proto(Proposal(SessionId("s"), EPOCH, 10, 9, 14, (7, 9), (ROW, ROW)))


def a_proposal_with_rows(*proposal_rows: SparseRow) -> verify_pb2.ProposeRequest:
    message = good_proposal()
    packed = types.rows_to_proto(proposal_rows)
    assert packed is not None
    message.proposal.rows.CopyFrom(packed)
    return message


@pytest.mark.parametrize("bad", [-1, 2**31, 2**40])
def test_an_id_out_of_range_in_a_proposal_is_refused_by_its_index(bad: int) -> None:
    message = good_proposal()
    message.proposal.token_ids[1] = bad
    with pytest.raises(ProtocolError, match=r"proposal\.token_ids\[1\]"):
        propose.propose_request_from_proto(message)


def test_an_empty_or_overlong_proposal_is_refused() -> None:
    empty, overlong = good_proposal(), good_proposal()
    del empty.proposal.token_ids[:]
    overlong.proposal.token_ids.extend([1] * 256)
    for message in (empty, overlong):
        with pytest.raises(ProtocolError, match="entries"):
            propose.propose_request_from_proto(message)


@pytest.mark.parametrize(
    ("bad_rows", "words"),
    [
        ((ROW,), "proposal.rows"),
        ((ROW, SparseRow((7, 9), (COUNT_TOTAL - 2, 1))), "sum to"),
        ((ROW, SparseRow((9, 9), (COUNT_TOTAL - 1, 1))), "distinct ids"),
        ((ROW, SparseRow((2**31, 9), (COUNT_TOTAL - 1, 1))), "token id in"),
        ((ROW, SparseRow((1, 2), (COUNT_TOTAL - 1, 1))), "listed in its row"),
        ((ROW, SparseRow(tuple(range(129)), (COUNT_TOTAL - 128, *[1] * 128))), "rows.lengths"),
    ],
)
def test_rows_that_are_no_distribution_of_the_proposed_tokens_are_refused(
    bad_rows: tuple[SparseRow, ...], words: str
) -> None:
    with pytest.raises(ProtocolError, match=words):
        propose.propose_request_from_proto(a_proposal_with_rows(*bad_rows))


def test_packed_rows_of_the_wrong_size_are_refused() -> None:
    for field in ("token_ids", "counts"):
        message = good_proposal()
        setattr(message.proposal.rows, field, getattr(message.proposal.rows, field) + b"\0")
        with pytest.raises(ProtocolError, match=f"rows.{field}"):
            propose.propose_request_from_proto(message)


def test_a_one_hot_row_costs_six_bytes_of_payload_and_survives() -> None:
    packed = types.rows_to_proto([SparseRow((5,), (COUNT_TOTAL,))])
    assert packed is not None
    assert (len(packed.token_ids), len(packed.counts)) == (4, 2)
    assert types.rows_from_proto(packed) == (SparseRow((5,), (COUNT_TOTAL,)),)


def test_a_pass_that_passes_nothing_is_refused() -> None:
    message = propose.propose_request_to_proto(Pass(SessionId("s"), EPOCH, 10, 11))
    message.pass_turn.until_len = 10
    with pytest.raises(ProtocolError, match="until_len"):
        propose.propose_request_from_proto(message)


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        (propose.propose_request_from_proto, verify_pb2.ProposeRequest()),
        (propose.propose_response_from_proto, verify_pb2.ProposeResponse()),
        (decode.decode_request_from_proto, verify_pb2.DecodeRequest()),
        (decode.decode_response_from_proto, verify_pb2.DecodeResponse()),
        (draft.draft_request_from_proto, draft_pb2.DraftRequest()),
        (draft.draft_response_from_proto, draft_pb2.DraftResponse()),
        (generation.event_from_proto, generation_pb2.GenerationEvent()),
    ],
)
def test_a_message_with_nothing_in_it_is_refused(decoder: Callable[[Any], Any], message: Message) -> None:
    with pytest.raises(ProtocolError, match="one of"):
        decoder(message)


def good_verdict() -> verify_pb2.DecodeResponse:
    return decode.decode_response_to_proto(
        Verdict(
            SessionId("s"),
            EPOCH,
            10,
            (1, 2),
            (TokenKind.ACCEPTED, TokenKind.RECOVERED),
            1,
            2,
            EPOCH.next_round(),
            VerdictCause.TESTED,
            (TokenLogprobs(-0.5), TokenLogprobs(-math.inf)),
        )
    )


def _more_accepted_than_tested(verdict: verify_pb2.Verdict) -> None:
    verdict.num_accepted = 3


def _one_kind_missing(verdict: verify_pb2.Verdict) -> None:
    del verdict.kinds[-1]


def _unspecified_kind(verdict: verify_pb2.Verdict) -> None:
    verdict.kinds[0] = types_pb2.TOKEN_KIND_UNSPECIFIED


def _one_logprob_missing(verdict: verify_pb2.Verdict) -> None:
    del verdict.logprobs[-1]


def _nan_logprob(verdict: verify_pb2.Verdict) -> None:
    verdict.logprobs[0].logprob = math.nan


def _unspecified_cause(verdict: verify_pb2.Verdict) -> None:
    verdict.cause = verify_pb2.VERDICT_CAUSE_UNSPECIFIED


def _epoch_runs_backwards(verdict: verify_pb2.Verdict) -> None:
    verdict.next_epoch.round = 0


def _negative_time(verdict: verify_pb2.Verdict) -> None:
    verdict.verify_time.seconds = -1


@pytest.mark.parametrize(
    "damage",
    [
        _more_accepted_than_tested,
        _one_kind_missing,
        _unspecified_kind,
        _one_logprob_missing,
        _nan_logprob,
        _unspecified_cause,
        _epoch_runs_backwards,
        _negative_time,
    ],
)
def test_a_verdict_that_contradicts_itself_is_refused(damage: Callable[[verify_pb2.Verdict], None]) -> None:
    message = good_verdict()
    assert isinstance(decode.decode_response_from_proto(message), Verdict)
    damage(message.verdict)
    with pytest.raises(ProtocolError, match=r"verdict\."):
        decode.decode_response_from_proto(message)


def test_an_open_without_mode_key_or_classes_is_refused() -> None:
    value = DecodeOpen(
        SessionId("s"), Generation(1, 1), (1, 2), (TokenClass.PROMPT,) * 2, Mode.COUPLED, SamplingParams(), bytes(16)
    )
    for field in ("mode", "key", "classes", "token_ids", "session_id"):
        message = decode.decode_request_to_proto(value)
        message.open.ClearField(field)
        with pytest.raises(ProtocolError, match=f"open.{field}"):
            decode.decode_request_from_proto(message)


def test_patience_that_is_not_set_takes_its_default() -> None:
    message = decode.decode_request_to_proto(DecodeProgress(Generation(1, 1), 5, 9, Speculation(), 0.25))
    message.progress.ClearField("patience")
    decoded = decode.decode_request_from_proto(message)
    assert isinstance(decoded, DecodeProgress)
    assert decoded.patience_s == decode.DEFAULT_PATIENCE_S


def test_a_tensor_whose_data_does_not_fit_its_shape_is_refused() -> None:
    message = types.tensor_to_proto(Tensor("float32", (2, 3), bytes(24)))
    assert types.tensor_from_proto(message).shape == (2, 3)
    message.shape[0] = 1
    with pytest.raises(ProtocolError, match=r"tensor\.data"):
        types.tensor_from_proto(message)


# --- what clients may not send ------------------------------------------------------------------------------------


def a_request(**fields: Any) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(**({"text": "hello"} | fields))


def test_a_bare_text_is_a_whole_request_with_documented_defaults() -> None:
    assert generation.request_from_proto(a_request()) == GenerationRequest(TextPrompt("hello"))


def a_chat(message: dict[str, Any] | None = None, **fields: Any) -> generation_pb2.GenerateRequest:
    spoken = generation_pb2.ChatMessage(**(message or {"role": "user", "content": "x"}))
    return generation_pb2.GenerateRequest(chat=generation_pb2.Chat(messages=[spoken], **fields))


SamplingPb = types_pb2.SamplingParams
OverridePb = generation_pb2.SpeculationOverride
PredictionPb, IdsPb = generation_pb2.Prediction, generation_pb2.TokenIds


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (generation_pb2.GenerateRequest(), "input"),
        (a_request(text=""), "text"),
        (generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds()), "token_ids"),
        (generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(token_ids=[1, -1])), "token_ids[1]"),
        (generation_pb2.GenerateRequest(chat=generation_pb2.Chat()), "chat.messages"),
        (
            generation_pb2.GenerateRequest(
                chat=generation_pb2.Chat(messages=[generation_pb2.ChatMessage(role="king", content="x")])
            ),
            "chat.messages[0].role",
        ),
        (a_chat({"role": "user", "reasoning": "x"}), "chat.messages[0].reasoning"),
        (a_chat({"role": "tool", "tool_calls": [{"name": "f"}]}), "chat.messages[0].tool_calls"),
        (a_chat({"role": "assistant", "tool_calls": [{}]}), "chat.messages[0].tool_calls[0].name"),
        (a_chat({"role": "user", "content": "x", "tool_call_id": "c"}), "chat.messages[0].tool_call_id"),
        (a_chat(tools="{}"), "chat.tools"),
        (a_chat(tools="[]"), "chat.tools"),
        (a_chat(tools="[1]"), "chat.tools[0]"),
        (a_chat(tools="[{"), "chat.tools"),
        (a_chat(template_arguments="[]"), "chat.template_arguments"),
        (a_chat(template_arguments='{"a": NaN}'), "chat.template_arguments"),
        (a_chat(template_arguments='{"a": "\\ud800"}'), "chat.template_arguments"),
        (a_chat(template_arguments='{"tokenize": false}'), "chat.template_arguments"),
        (a_chat(continue_final_message=True, add_generation_prompt=True), "chat.add_generation_prompt"),
        (a_chat({"role": "assistant"}, continue_final_message=True), "chat.continue_final_message"),
        (a_request(max_tokens=0), "max_tokens"),
        (a_request(max_tokens=-5), "max_tokens"),
        (a_request(sampling=SamplingPb(temperature=-0.1)), "sampling.temperature"),
        (a_request(sampling=SamplingPb(temperature=math.nan)), "sampling.temperature"),
        (a_request(sampling=SamplingPb(temperature=math.inf)), "sampling.temperature"),
        (a_request(sampling=SamplingPb(top_p=0)), "sampling.top_p"),
        (a_request(sampling=SamplingPb(top_p=1.5)), "sampling.top_p"),
        (a_request(sampling=SamplingPb(min_p=-0.5)), "sampling.min_p"),
        (a_request(sampling=SamplingPb(top_k=-1)), "sampling.top_k"),
        (a_request(sampling=SamplingPb(repetition_penalty=0)), "sampling.repetition_penalty"),
        (a_request(sampling=SamplingPb(presence_penalty=3)), "sampling.presence_penalty"),
        (a_request(sampling=SamplingPb(frequency_penalty=-3)), "sampling.frequency_penalty"),
        (
            a_request(sampling=SamplingPb(logit_bias=[types_pb2.LogitBias(token_id=1, bias=math.nan)])),
            "sampling.logit_bias.bias",
        ),
        (
            a_request(sampling=SamplingPb(logit_bias=[types_pb2.LogitBias(token_id=1)] * 2)),
            "sampling.logit_bias.token_id",
        ),
        (a_request(stop=["a", ""]), "stop[1]"),
        (a_request(stop=["a"] * 65), "stop"),
        (a_request(stop_token_ids=[2**31]), "stop_token_ids[0]"),
        (a_request(mode=types_pb2.MODE_GREEDY), "sampling.temperature"),
        (a_request(mode=types_pb2.MODE_COUPLED), "seed"),
        (a_request(mode=77), "mode"),
        (a_request(logprobs=-1), "logprobs"),
        (a_request(logprobs=129), "logprobs"),
        (a_request(speculation=OverridePb(gamma=0)), "speculation.gamma"),
        (a_request(speculation=OverridePb(gamma=4, restart_gamma=5)), "speculation.restart_gamma"),
        (a_request(speculation=OverridePb(gamma=4, window=3)), "speculation.window"),
        (a_request(speculation=OverridePb(window=3)), "speculation.gamma"),
        (a_request(speculation=OverridePb(off=True, gamma=3)), "speculation.off"),
        (a_request(prediction=PredictionPb()), "prediction"),
        (a_request(prediction=PredictionPb(text="")), "prediction.text"),
        (a_request(prediction=PredictionPb(text="x" * (1 << 19) + "x")), "prediction.text"),
        (a_request(prediction=PredictionPb(token_ids=IdsPb())), "prediction.token_ids"),
        (a_request(prediction=PredictionPb(token_ids=IdsPb(token_ids=[1, -1]))), "prediction.token_ids[1]"),
        (a_request(prediction=PredictionPb(token_ids=IdsPb(token_ids=[1] * 32769))), "prediction.token_ids"),
        (a_request(prediction=PredictionPb(text="x"), speculation=OverridePb(off=True)), "speculation.off"),
        (a_request(drafter="x" * 257), "drafter"),
    ],
)
def test_a_clients_bad_field_is_named_with_its_allowed_range(
    message: generation_pb2.GenerateRequest, field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        generation.request_from_proto(message)
    assert caught.value.field == field
    assert caught.value.allowed


def test_a_resume_without_session_or_with_a_negative_position_is_refused() -> None:
    for message, field in (
        (generation_pb2.ResumeRequest(next_position=1), "session_id"),
        (generation_pb2.ResumeRequest(session_id="s", next_position=-1), "next_position"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            generation.resume_from_proto(message)
        assert caught.value.field == field


def test_long_per_position_counts_are_cut_when_sent_and_refused_when_received() -> None:
    long = Figures(tested_per_position=(1,) * 5000, accepted_per_position=(1,) * 5000)
    message = figures.figures_to_proto(long)
    expected = replace(long, tested_per_position=(1,) * 4096, accepted_per_position=(1,) * 4096)
    assert figures.figures_from_proto(message) == expected
    message.tested_per_position.append(1)
    with pytest.raises(ProtocolError, match="tested_per_position"):
        figures.figures_from_proto(message)


def test_a_long_bad_value_is_shortened_in_its_message() -> None:
    with pytest.raises(ProtocolError) as caught:
        PEER.require(False, "field", list(range(10_000)), "something else")
    assert len(caught.value.message) < 300


def test_a_measured_time_slightly_below_zero_is_sent_as_zero() -> None:
    assert figures.figures_from_proto(figures.figures_to_proto(Figures(network_s=-1e-7))).network_s == 0.0


@pytest.mark.parametrize(
    ("field", "values", "allowed"),
    [
        ("temperature", (-1.0, 101.0, math.inf), "a number in 0 .. 100"),
        ("repetition_penalty", (0.0, 200.0), "a number in 0.01 .. 100"),
        ("presence_penalty", (-3.0, 3.0), "a number in -2 .. 2"),
        ("top_p", (0.0, 2.0), "a number in (0, 1]"),
        ("min_p", (-0.5, 1.5), "a number in 0 .. 1"),
        ("top_k", (-2, 2**31), "an integer in 0 .. 2147483647; 0 keeps all"),
    ],
)
def test_a_range_is_told_in_one_sentence_wherever_and_on_whichever_side_it_is_left(
    field: str, values: tuple[float, ...], allowed: str
) -> None:
    for value in values:
        given: dict[str, Any] = {field: value}
        with pytest.raises(InvalidRequest) as at_the_door:
            generation.request_from_proto(a_request(sampling=SamplingPb(**given)))
        with pytest.raises(InvalidRequest) as at_the_worker:
            validate(SamplingParams(**given), 10)
        assert at_the_door.value.allowed == at_the_worker.value.allowed == allowed
