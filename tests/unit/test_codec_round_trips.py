"""The codec, forwards and back: every message survives the wire."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.codec import catalogue, decode, draft, generation, propose, types
from outrider.codec.chat import ROLES
from outrider.errors import OutriderError
from outrider.generation import (
    ChatMessage,
    ChatPrompt,
    Chunk,
    Figures,
    Finished,
    GenerationRequest,
    ModelDescription,
    Notice,
    PromptLogprobs,
    ResumeFrom,
    SessionSummary,
    SpeculationChoice,
    Started,
    TextPrediction,
    TextPrompt,
    TokenPrediction,
    TokenPrompt,
    ToolCall,
    Usage,
)
from outrider.ids import Epoch, FinishReason, Generation, Mode, SessionId, TokenClass, TokenKind, WorkerId
from outrider.messages import (
    COUNT_TOTAL,
    DecodeAttach,
    DecodeClose,
    DecodeOpen,
    DecodeProgress,
    DraftClose,
    DraftCommit,
    DraftOpen,
    DraftStatus,
    Draining,
    Grammar,
    GrammarKind,
    Pass,
    Preparing,
    PromptScores,
    Proposal,
    ProposalHeader,
    ProposeHello,
    ProposeWelcome,
    RollbackHint,
    SamplingParams,
    SparseRow,
    Speculation,
    TargetFeatures,
    Tensor,
    TokenLogprobs,
    Verdict,
    VerdictCause,
    Vocabulary,
    WorkerDescription,
)

MAX = 2**31 - 1
CAUSES = sorted(value for name, value in vars(VerdictCause).items() if name.isupper())

# --- strategies ---------------------------------------------------------------------------------------------------

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
sessions = names.map(SessionId)
clients_sessions = st.from_regex(r"[A-Za-z0-9_.:-]{1,128}", fullmatch=True).map(SessionId)
workers = names.map(WorkerId)
ints = st.integers(0, MAX)
id_lists = st.lists(ints, min_size=1, max_size=8).map(tuple)
seconds = st.integers(0, 10**15).map(lambda nanos: nanos // 10**9 + nanos % 10**9 / 1e9)
generations = st.builds(Generation, st.integers(0, 2**63), st.integers(0, 2**63))
epochs = st.builds(Epoch, generations, st.integers(0, 2**63))
speculations = st.just(Speculation()) | st.lists(st.integers(1, 256), min_size=3, max_size=3).map(
    lambda sizes: Speculation(sorted(sizes)[1], sorted(sizes)[0], sorted(sizes)[2])
)
unit = st.floats(0, 1)
finite = st.floats(allow_nan=False, allow_infinity=False)
biases = st.floats(max_value=100, allow_nan=False, allow_infinity=False)
grammars = st.builds(Grammar, st.sampled_from([*set(GrammarKind) - {GrammarKind.CHOICES}]), names) | st.lists(
    names, min_size=1, max_size=3, unique=True
).map(lambda choices: Grammar(GrammarKind.CHOICES, json.dumps(choices, ensure_ascii=False)))
few_ids = st.lists(ints, max_size=3, unique=True).map(tuple)
requested_samplings = st.builds(
    SamplingParams,
    allowed_token_ids=few_ids,
    logit_bias=st.lists(st.tuples(ints, biases), max_size=4, unique_by=lambda pair: pair[0]).map(tuple),
    repetition_penalty=st.floats(0.01, 100),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    temperature=st.floats(0, 100),
    top_k=ints,
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=unit,
    grammar=st.none() | grammars,
)
lengths = st.integers(0, 100)
samplings = st.builds(
    lambda sampling, least, ends: replace(
        sampling, min_tokens=0 if sampling.grammar else least, end_token_ids=ends, grammar_end_ids=ends
    ),
    requested_samplings,
    lengths,
    few_ids,
)
logprob = st.floats(max_value=0, allow_nan=False)
logprobs = st.builds(TokenLogprobs, logprob, st.lists(st.tuples(ints, logprob), max_size=3).map(tuple))
modes = st.sampled_from(Mode)
kinds = st.sampled_from(TokenKind)
vocabularies = st.builds(Vocabulary, names, st.integers(1, MAX))


def key_for(mode: Mode) -> bytes:
    return b"" if mode is Mode.GREEDY else bytes(range(16))


@st.composite
def rows(draw: st.DrawFn) -> SparseRow:
    ids = draw(st.lists(ints, min_size=1, max_size=6, unique=True))
    cuts = sorted(draw(st.sets(st.integers(1, COUNT_TOTAL - 1), min_size=len(ids) - 1, max_size=len(ids) - 1)))
    bounds = [0, *cuts, COUNT_TOTAL]
    return SparseRow(tuple(ids), tuple(high - low for low, high in pairwise(bounds)))


@st.composite
def proposals(draw: st.DrawFn) -> Proposal:
    drawn = tuple(draw(st.lists(rows(), max_size=3)))
    ids = tuple(draw(st.sampled_from(row.token_ids)) for row in drawn) or draw(id_lists)
    return Proposal(draw(sessions), draw(epochs), draw(ints), draw(ints), draw(ints), ids, drawn)


@st.composite
def passes(draw: st.DrawFn) -> Pass:
    base = draw(st.integers(0, MAX - 1))
    return Pass(draw(sessions), draw(epochs), base, draw(st.integers(base + 1, MAX)))


@st.composite
def verdicts(draw: st.DrawFn) -> Verdict:
    ids = tuple(draw(st.lists(ints, max_size=4)))
    tested = draw(ints)
    first, second = sorted((draw(epochs), draw(epochs)))
    per_token = st.lists(logprobs, min_size=len(ids), max_size=len(ids)).map(tuple)
    return Verdict(
        session_id=draw(sessions),
        epoch=first,
        start=draw(ints),
        token_ids=ids,
        kinds=tuple(draw(kinds) for _ in ids),
        num_accepted=draw(st.integers(0, tested)),
        num_tested=tested,
        next_epoch=second,
        cause=draw(st.sampled_from(CAUSES)),
        logprobs=draw(st.one_of(st.just(()), per_token)),
        verify_s=draw(seconds),
        queue_s=draw(seconds),
        num_rows=draw(ints),
        guarantee_void=draw(ints),
        num_stale=draw(ints),
        num_cached=draw(ints),
    )


@st.composite
def decode_opens(draw: st.DrawFn) -> DecodeOpen:
    ids = draw(id_lists)
    mode = draw(modes)
    return DecodeOpen(
        session_id=draw(sessions),
        generation=draw(generations),
        token_ids=ids,
        classes=tuple(draw(st.sampled_from(TokenClass)) for _ in ids),
        mode=mode,
        sampling=draw(samplings),
        key=key_for(mode),
        sample_index=draw(ints),
        prompt_len=draw(st.integers(0, len(ids))),
        num_logprobs=draw(st.integers(-1, 128)),
        num_prompt_logprobs=draw(st.integers(-1, 128)),
        processed_logprobs=draw(st.booleans()),
        commit_limit=draw(ints),
        speculation=draw(speculations),
        patience_s=draw(seconds),
        worker_id=WorkerId(draw(texts)),
    )


@st.composite
def draft_opens(draw: st.DrawFn) -> DraftOpen:
    ids = draw(id_lists)
    mode = draw(modes)
    return DraftOpen(
        session_id=draw(sessions),
        epoch=draw(epochs),
        token_ids=ids,
        mode=mode,
        sampling=draw(samplings),
        draft_key=key_for(mode),
        speculation=draw(speculations),
        verifier_id=draw(workers),
        verifier_address=draw(names),
        sample_index=draw(ints),
        prompt_len=draw(st.integers(0, len(ids))),
        max_len=draw(ints),
        prediction=tuple(draw(st.lists(ints, max_size=4))),
        drafter=draw(texts),
    )


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = tuple(draw(st.lists(st.integers(1, 3), min_size=3, max_size=3)))
    dtype, size = draw(st.sampled_from([("float32", 4), ("float16", 2), ("bfloat16", 2), ("int32", 4)]))
    length = math.prod(shape) * size
    return Tensor(dtype, shape, draw(st.binary(min_size=length, max_size=length)))


@st.composite
def choices(draw: st.DrawFn) -> SpeculationChoice:
    if draw(st.booleans()):
        return SpeculationChoice(off=draw(st.booleans()))
    gamma = draw(st.integers(1, 256))
    restart = draw(st.none() | st.integers(1, gamma))
    return SpeculationChoice(False, gamma, restart, draw(st.none() | st.integers(gamma, 1024)))


@st.composite
def requests(draw: st.DrawFn) -> GenerationRequest:
    least = draw(lengths)
    sampling = replace(draw(requested_samplings), min_tokens=least)
    if least:
        sampling = replace(sampling, grammar=None)
    seed = draw(st.none() | st.integers(0, 2**64 - 1))
    allowed = [None, Mode.REJECTION, Mode.BLOCK]
    allowed += [Mode.GREEDY] if sampling.temperature == 0 else []
    allowed += [Mode.COUPLED] if seed is not None else []
    prompt = st.one_of(
        st.builds(TextPrompt, names),
        st.builds(TokenPrompt, id_lists),
        chats(),
    )
    prediction = st.none() | st.builds(TextPrediction, names) | st.builds(TokenPrediction, id_lists)
    speculation = draw(choices())
    num_logprobs = draw(st.none() | st.integers(0, 128))
    of_prompt = draw(st.none() | st.integers(0, 128))
    return GenerationRequest(
        prompt=draw(prompt),
        model=draw(texts),
        session_id=draw(st.just(SessionId("")) | clients_sessions),
        max_tokens=draw(st.none() | st.integers(max(least, 1 if of_prompt is None else 0), MAX)),
        sampling=sampling,
        seed=seed,
        stop=tuple(draw(st.lists(names, max_size=3))),
        stop_token_ids=tuple(draw(st.lists(ints, max_size=3))),
        ignore_eos=sampling.grammar is None and draw(st.booleans()),
        mode=draw(st.sampled_from(allowed)),
        speculation=speculation,
        drafter=draw(texts),
        prediction=None if speculation.off else draw(prediction),
        num_logprobs=num_logprobs,
        num_prompt_logprobs=of_prompt,
        processed_logprobs=num_logprobs is not None and draw(st.booleans()),
        return_token_origin=draw(st.booleans()),
        sample_index=draw(ints),
        skip_special_tokens=draw(st.booleans()),
    )


@st.composite
def messages(draw: st.DrawFn) -> ChatMessage:
    role = draw(st.sampled_from(ROLES))
    calls = st.lists(st.builds(ToolCall, names, texts, texts), max_size=2).map(tuple)
    return ChatMessage(
        role,
        draw(names),
        draw(texts),
        draw(calls) if role == "assistant" else (),
        draw(texts) if role == "tool" else "",
        draw(texts) if role == "assistant" else "",
    )


@st.composite
def chats(draw: st.DrawFn) -> ChatPrompt:
    asks = draw(st.sampled_from([None, False, True]))
    return ChatPrompt(
        tuple(draw(st.lists(messages(), min_size=1, max_size=3))),
        draw(st.sampled_from(["", '[{"type": "function", "function": {"name": "f"}}]'])),
        draw(st.sampled_from(["", "{}", '{"enable_thinking": false, "deep": {"a": ["}"]}}'])),
        asks,
        draw(st.booleans()) if not asks else False,
        draw(texts),
        draw(st.booleans()),
    )


@st.composite
def chunks(draw: st.DrawFn) -> Chunk:
    ids = tuple(draw(st.lists(ints, max_size=3)))
    has_kinds, has_logprobs = draw(st.booleans()), draw(st.booleans())
    return Chunk(
        draw(ints),
        ids,
        draw(texts),
        tuple(draw(kinds) for _ in ids) if has_kinds else (),
        tuple(draw(logprobs) for _ in ids) if has_logprobs else (),
    )


@st.composite
def figures(draw: st.DrawFn) -> Figures:
    values: dict[str, Any] = {
        name: draw(seconds)
        for name in ("draft_s", "network_s", "queue_s", "verify_s", "commit_s", "time_to_first_token_s", "total_s")
    }
    counts = ("num_rounds", "num_rollbacks", "num_drafted", "num_tested", "num_accepted", "num_stale", "num_plain")
    values |= {name: draw(ints) for name in (*counts, "num_recovered", "num_bonus", "guarantee_void")}
    values |= {name: draw(ints) for name in ("accepted_prediction_tokens", "rejected_prediction_tokens")}
    values |= {name: draw(texts) for name in ("speculation_off", "engine_fingerprint", "drafter")}
    pairs = draw(st.lists(st.tuples(ints, ints), max_size=4))
    return Figures(
        **values,
        tested_per_position=tuple(pair[0] for pair in pairs),
        accepted_per_position=tuple(pair[1] for pair in pairs),
        tokens_per_second=draw(finite),
        tokens_per_round=draw(finite),
    )


usages = st.builds(Usage, ints, ints, ints)
events = st.one_of(
    st.builds(Started, sessions, ints, modes, st.sampled_from(["bitwise", "distribution"]), texts),
    chunks(),
    st.lists(st.tuples(ints, logprobs), min_size=1, max_size=3).map(
        lambda pairs: PromptLogprobs(0, tuple(own for own, _ in pairs), (None, *(own for _, own in pairs[1:])))
    ),
    st.builds(Notice, names, texts),
    st.builds(Finished, st.sampled_from(FinishReason), texts, usages, figures()),
)
drainings = st.builds(Draining, texts)
descriptions = st.builds(
    WorkerDescription,
    worker_id=workers,
    role=st.sampled_from(["verify", "draft", "orchestrate"]),
    address=names,
    model=texts,
    vocabulary=vocabularies,
    context_len=ints,
    dtype=texts,
    drafter=texts,
    exactness=st.sampled_from(["bitwise", "distribution"]),
    fingerprint=texts,
    capacity=ints,
    load=ints,
    draining=st.booleans(),
    attributes=st.dictionaries(texts, texts, max_size=2),
    label=texts,
    drafters=st.lists(names, max_size=3).map(tuple),
)

ROUND_TRIPS: dict[str, tuple[st.SearchStrategy[Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "decode_request": (
        st.one_of(
            decode_opens(),
            st.builds(DecodeAttach, generations, workers),
            st.builds(DecodeProgress, generations, ints, ints, speculations, seconds),
            st.builds(DecodeClose, st.booleans()),
        ),
        decode.decode_request_to_proto,
        decode.decode_request_from_proto,
    ),
    "decode_response": (
        st.one_of(
            verdicts(),
            drainings,
            st.just(Preparing()),
            st.builds(PromptScores, st.integers(1, MAX), st.lists(logprobs, max_size=3).map(tuple)),
        ),
        decode.decode_response_to_proto,
        decode.decode_response_from_proto,
    ),
    "propose_request": (
        st.one_of(
            st.builds(
                ProposeHello,
                workers,
                vocabularies,
                st.lists(st.integers(-1, 100), max_size=3).map(tuple),
                st.booleans(),
            ),
            st.builds(ProposalHeader, sessions, epochs, ints, st.integers(1, 256)),
            proposals(),
            passes(),
        ),
        propose.propose_request_to_proto,
        propose.propose_request_from_proto,
    ),
    "propose_response": (
        st.one_of(
            st.builds(ProposeWelcome, workers),
            st.builds(TargetFeatures, sessions, epochs, ints, tensors()),
            st.builds(RollbackHint, sessions, epochs, ints, st.none() | ints),
            drainings,
        ),
        propose.propose_response_to_proto,
        propose.propose_response_from_proto,
    ),
    "draft_request": (
        st.one_of(
            draft_opens(),
            st.builds(DraftCommit, epochs, ints, st.lists(ints, max_size=4).map(tuple), speculations),
            st.builds(DraftClose, st.booleans()),
        ),
        draft.draft_request_to_proto,
        draft.draft_request_from_proto,
    ),
    "draft_response": (
        st.one_of(st.builds(DraftStatus, st.booleans(), seconds, ints, ints, texts, st.integers(-1, MAX)), drainings),
        draft.draft_response_to_proto,
        draft.draft_response_from_proto,
    ),
    "generation_request": (requests(), generation.request_to_proto, generation.request_from_proto),
    "resume": (st.builds(ResumeFrom, clients_sessions, ints), generation.resume_to_proto, generation.resume_from_proto),
    "event": (events, generation.event_to_proto, generation.event_from_proto),
    "description": (descriptions, types.description_to_proto, types.description_from_proto),
    "session": (
        st.builds(SessionSummary, sessions, texts, st.booleans(), ints, ints, modes, id_lists, seconds),
        catalogue.session_to_proto,
        catalogue.session_from_proto,
    ),
    "model": (
        st.builds(
            ModelDescription, names, vocabularies, ints, ints, st.lists(texts, max_size=3).map(tuple), st.booleans()
        ),
        catalogue.model_to_proto,
        catalogue.model_from_proto,
    ),
}


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_every_message_survives_the_wire(name: str) -> None:
    strategy, encode, decode_back = ROUND_TRIPS[name]

    @settings(max_examples=100, deadline=None, database=None, derandomize=True)
    @given(strategy)
    def round_trip(value: Any) -> None:
        sent: Message = encode(value)
        received = type(sent).FromString(sent.SerializeToString())
        assert decode_back(received) == value

    round_trip()


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_damaged_bytes_are_refused_in_our_own_words_or_decode_to_a_legal_message(name: str) -> None:
    strategy, encode, decode_back = ROUND_TRIPS[name]

    @settings(max_examples=150, deadline=None, database=None, derandomize=True)
    @given(strategy, st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=3))
    def damage(value: Any, changes: list[tuple[int, int]]) -> None:
        sent: Message = encode(value)
        data = bytearray(sent.SerializeToString())
        for index, byte in changes if data else ():
            data[index % len(data)] = byte
        try:
            received = decode_back(type(sent).FromString(bytes(data)))
        except (DecodeError, OutriderError):  # the former ends the call inside gRPC, before our code sees anything
            return
        again = decode_back(encode(received))
        assert again == received or "nan" in repr(received)

    damage()
