"""Codec of `generation.proto`: requests are checked as a client's (`InvalidRequest`), events as a peer's."""

from typing import Literal, assert_never

from outrider.codec import types as t
from outrider.codec.chat import MAX_PROMPT_CHARS, chat_from_proto, chat_to_proto
from outrider.codec.checks import (
    CLIENT,
    MAX_GAMMA,
    MAX_LOGPROBS,
    MAX_PREDICTION_TOKENS,
    MAX_PRIORITY,
    MAX_TEXT_CHARS,
    MAX_WINDOW,
    PEER,
    duration,
)
from outrider.codec.figures import figures_from_proto, figures_to_proto
from outrider.codec.fitting import require_fitting
from outrider.generation import (
    ChatPrompt,
    Chunk,
    Finished,
    GenerationEvent,
    GenerationRequest,
    Notice,
    PromptLogprobs,
    ResumeFrom,
    SpeculationChoice,
    Started,
    TextPrediction,
    TextPrompt,
    TokenPrediction,
    TokenPrompt,
    Usage,
)
from outrider.ids import FinishReason, Mode, SessionId
from outrider.messages import SamplingParams
from outrider.parameters import MAX_INT, MAX_TOKENS
from outrider.v1 import generation_pb2 as pb

MAX_PROMPT_TOKENS = 1 << 20
"""Most ids of a prompt; no model's context is longer."""
MAX_PREDICTION_CHARS = 1 << 19
"""Most characters of a prediction."""
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_REQUEST_ID = 64
"""Most characters of a client's name for a request."""


# --- requests -----------------------------------------------------------------------------------------------------


def request_to_proto(request: GenerationRequest) -> pb.GenerateRequest:
    """Encode a request for a continuation.

    Raises:
        InvalidRequest: a value does not fit the wire; everything else is the server's to check.
    """
    require_fitting(request)
    message = pb.GenerateRequest(
        model=request.model,
        session_id=request.session_id,
        max_tokens=request.max_tokens,
        sampling=t.sampling_to_proto(request.sampling),
        seed=request.seed,
        stop=request.stop,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
        speculation=_choice_to_proto(request.speculation),
        drafter=request.drafter,
        logprobs=request.num_logprobs,
        prompt_logprobs=request.num_prompt_logprobs,
        processed_logprobs=request.processed_logprobs,
        return_token_origin=request.return_token_origin,
        sample_index=request.sample_index,
        request_id=request.request_id,
        priority=request.priority,
        max_wait=None if request.max_wait_s is None else duration(request.max_wait_s),
        prediction=_prediction_to_proto(request.prediction),
        skip_special_tokens=None if request.skip_special_tokens else False,
    )
    if request.mode is not None:
        message.mode = t.mode_to_proto(request.mode)
    _set_prompt(message, request)
    return message


def request_from_proto(message: pb.GenerateRequest) -> GenerationRequest:
    """Decode and check a client's request.

    Raises:
        InvalidRequest: a field is out of range, or fields contradict each other.
    """
    has = message.HasField
    sampling = t.sampling_from_proto(message.sampling, CLIENT)
    return GenerationRequest(
        prompt=_prompt_from_proto(message),
        model=CLIENT.text("model", message.model),
        session_id=SessionId(CLIENT.session("session_id", message.session_id) if message.session_id else ""),
        max_tokens=_max_tokens(message),
        sampling=sampling,
        seed=message.seed if has("seed") else None,
        stop=_stop_from_proto(message),
        stop_token_ids=CLIENT.ids("stop_token_ids", message.stop_token_ids, 0, MAX_STOPS),
        ignore_eos=message.ignore_eos,
        mode=_mode_from_proto(message, sampling),
        speculation=_choice_from_proto(message.speculation),
        drafter=CLIENT.text("drafter", message.drafter),
        num_logprobs=_num_logprobs("logprobs", message),
        num_prompt_logprobs=_num_logprobs("prompt_logprobs", message),
        processed_logprobs=message.processed_logprobs,
        return_token_origin=message.return_token_origin,
        sample_index=CLIENT.integer("sample_index", message.sample_index),
        request_id=_request_id(message.request_id),
        priority=CLIENT.integer("priority", message.priority, -MAX_PRIORITY, MAX_PRIORITY),
        max_wait_s=CLIENT.seconds("max_wait", message.max_wait) if message.HasField("max_wait") else None,
        prediction=_prediction_from_proto(message),
        skip_special_tokens=not has("skip_special_tokens") or message.skip_special_tokens,
    )


def _set_prompt(message: pb.GenerateRequest, request: GenerationRequest) -> None:
    match request.prompt:
        case TextPrompt(text):
            message.text = text
        case TokenPrompt(token_ids):
            message.token_ids.token_ids.extend(token_ids)
        case ChatPrompt() as chat:
            message.chat.CopyFrom(chat_to_proto(chat))
        case other:
            assert_never(other)


def _prompt_from_proto(message: pb.GenerateRequest) -> TextPrompt | TokenPrompt | ChatPrompt:
    match message.WhichOneof("input"):
        case "text":
            CLIENT.require(bool(message.text), "text", message.text, "a non-empty string")
            return TextPrompt(CLIENT.text("text", message.text, MAX_PROMPT_CHARS))
        case "token_ids":
            return TokenPrompt(CLIENT.ids("token_ids", message.token_ids.token_ids, 1, MAX_PROMPT_TOKENS))
        case "chat":
            return chat_from_proto(message.chat)
        case None:
            raise CLIENT.fault("input", None, "one of text, token_ids, chat")
        case other:
            assert_never(other)


def _prediction_to_proto(prediction: TextPrediction | TokenPrediction | None) -> pb.Prediction | None:
    match prediction:
        case TextPrediction(text):
            return pb.Prediction(text=text)
        case TokenPrediction(token_ids):
            return pb.Prediction(token_ids=pb.TokenIds(token_ids=token_ids))
        case None:
            return None
        case other:
            assert_never(other)


def _prediction_from_proto(message: pb.GenerateRequest) -> TextPrediction | TokenPrediction | None:
    """Decode what the answer is expected to be; without drafts there is nothing that it could be used for."""
    if not message.HasField("prediction"):
        return None
    CLIENT.require(not message.speculation.off, "speculation.off", True, "false beside a prediction")
    content = message.prediction
    match content.WhichOneof("content"):
        case "text":
            CLIENT.require(bool(content.text), "prediction.text", content.text, "a non-empty string")
            return TextPrediction(CLIENT.text("prediction.text", content.text, MAX_PREDICTION_CHARS))
        case "token_ids":
            ids = content.token_ids.token_ids
            return TokenPrediction(CLIENT.ids("prediction.token_ids", ids, 1, MAX_PREDICTION_TOKENS))
        case None:
            raise CLIENT.fault("prediction", None, "one of text, token_ids")
        case other:
            assert_never(other)


def _max_tokens(message: pb.GenerateRequest) -> int | None:
    """Decode the most tokens to generate; none at all are sensible only where the prompt itself is asked about."""
    if not message.HasField("max_tokens"):
        return None
    low = 0 if message.HasField("prompt_logprobs") else 1
    CLIENT.require(low <= message.max_tokens <= MAX_INT, "max_tokens", message.max_tokens, MAX_TOKENS)
    return message.max_tokens


def _num_logprobs(field: Literal["logprobs", "prompt_logprobs"], message: pb.GenerateRequest) -> int | None:
    value: int = getattr(message, field)
    return CLIENT.integer(field, value, 0, MAX_LOGPROBS) if message.HasField(field) else None


def _request_id(value: str) -> str:
    CLIENT.require(len(value) <= MAX_REQUEST_ID, "request_id", value, f"at most {MAX_REQUEST_ID} characters")
    return value


def _stop_from_proto(message: pb.GenerateRequest) -> tuple[str, ...]:
    CLIENT.count("stop", message.stop, 0, MAX_STOPS)
    for index, text in enumerate(message.stop):
        allowed = f"1 .. {MAX_STOP_CHARS} characters"
        CLIENT.require(1 <= len(text) <= MAX_STOP_CHARS, f"stop[{index}]", text, allowed)
    return tuple(message.stop)


def _mode_from_proto(message: pb.GenerateRequest, sampling: SamplingParams) -> Mode | None:
    """Decode the mode, and refuse one that contradicts temperature or seed."""
    if message.mode == 0:
        return None
    mode = CLIENT.enum("mode", message.mode, Mode)
    if mode is Mode.GREEDY:
        CLIENT.require(sampling.temperature == 0, "sampling.temperature", sampling.temperature, "0 in mode GREEDY")
    if mode is Mode.COUPLED:
        CLIENT.require(message.HasField("seed"), "seed", None, "a seed in mode COUPLED")
    return mode


def _choice_to_proto(choice: SpeculationChoice) -> pb.SpeculationOverride:
    return pb.SpeculationOverride(
        off=choice.off,
        gamma=choice.gamma,
        restart_gamma=choice.restart_gamma,
        window=choice.window,
        max_gamma=choice.max_gamma,
    )


def _choice_from_proto(message: pb.SpeculationOverride) -> SpeculationChoice:
    gamma = message.gamma if message.HasField("gamma") else None
    restart_gamma = message.restart_gamma if message.HasField("restart_gamma") else None
    window = message.window if message.HasField("window") else None
    max_gamma = message.max_gamma if message.HasField("max_gamma") else None
    if message.off:
        extra = any(value is not None for value in (gamma, restart_gamma, window, max_gamma))
        CLIENT.require(not extra, "speculation.off", True, "no other field of speculation beside off")
    if max_gamma is not None:
        CLIENT.require(
            gamma is None, "speculation.max_gamma", max_gamma, "nothing beside gamma, which is a choice already"
        )
        CLIENT.integer("speculation.max_gamma", max_gamma, 1, MAX_GAMMA)
    if gamma is not None:
        CLIENT.integer("speculation.gamma", gamma, 1, MAX_GAMMA)
    if restart_gamma is not None:
        CLIENT.integer("speculation.restart_gamma", restart_gamma, 1, MAX_GAMMA if gamma is None else gamma)
    if window is not None:
        CLIENT.require(gamma is not None, "speculation.gamma", None, "a gamma beside window")
        CLIENT.integer("speculation.window", window, gamma or 1, MAX_WINDOW)
    return SpeculationChoice(message.off, gamma, restart_gamma, window, max_gamma)


def resume_to_proto(resume: ResumeFrom) -> pb.ResumeRequest:
    """Encode a request to go on.

    Raises:
        InvalidRequest: the position is none.
    """
    CLIENT.integer("next_position", resume.next_position)
    return pb.ResumeRequest(session_id=resume.session_id, next_position=resume.next_position)


def resume_from_proto(message: pb.ResumeRequest) -> ResumeFrom:
    """Decode and check a client's request to go on.

    Raises:
        InvalidRequest: the session is empty, or the position out of range.
    """
    session_id = SessionId(CLIENT.session("session_id", message.session_id))
    return ResumeFrom(session_id, CLIENT.integer("next_position", message.next_position))


# --- events -------------------------------------------------------------------------------------------------------


def event_to_proto(event: GenerationEvent) -> pb.GenerationEvent:
    """Encode an event; both `GenerateResponse` and `ResumeResponse` carry it."""
    match event:
        case Started():
            return pb.GenerationEvent(started=_started_to_proto(event))
        case Chunk():
            return pb.GenerationEvent(chunk=_chunk_to_proto(event))
        case PromptLogprobs():
            return pb.GenerationEvent(prompt_logprobs=_prompt_logprobs_to_proto(event))
        case Notice():
            return pb.GenerationEvent(notice=pb.Notice(reason=event.reason, text=event.text))
        case Finished():
            return pb.GenerationEvent(finished=_finished_to_proto(event))
        case _:
            assert_never(event)


def event_from_proto(message: pb.GenerationEvent) -> GenerationEvent:
    """Decode an orchestrator's event.

    Raises:
        ProtocolError: nothing is set, or a field is out of range.
    """
    match message.WhichOneof("event"):
        case "started":
            return _started_from_proto(message.started)
        case "chunk":
            return _chunk_from_proto(message.chunk)
        case "prompt_logprobs":
            return _prompt_logprobs_from_proto(message.prompt_logprobs)
        case "notice":
            text = PEER.text("notice.text", message.notice.text, MAX_TEXT_CHARS)
            return Notice(PEER.name("notice.reason", message.notice.reason), text)
        case "finished":
            return _finished_from_proto(message.finished)
        case None:
            raise PEER.fault("event", None, "one of started, prompt_logprobs, chunk, notice, finished")
        case other:
            assert_never(other)


def _started_to_proto(event: Started) -> pb.Started:
    return pb.Started(
        session_id=event.session_id,
        prompt_len=event.prompt_len,
        mode=t.mode_to_proto(event.mode),
        guarantee=t.guarantee_to_proto(event.exactness),
        model=event.model,
    )


def _started_from_proto(message: pb.Started) -> Started:
    return Started(
        session_id=SessionId(PEER.name("started.session_id", message.session_id)),
        prompt_len=PEER.integer("started.prompt_len", message.prompt_len),
        mode=PEER.enum("started.mode", message.mode, Mode),
        exactness=t.guarantee_from_proto("started.guarantee", message.guarantee),
        model=message.model,
    )


def _chunk_to_proto(event: Chunk) -> pb.Chunk:
    return pb.Chunk(
        start=event.start,
        token_ids=event.token_ids,
        text=event.text,
        kinds=t.kinds_to_proto(event.kinds),
        logprobs=t.logprobs_to_proto(event.logprobs),
    )


def _chunk_from_proto(message: pb.Chunk) -> Chunk:
    token_ids = PEER.ids("chunk.token_ids", message.token_ids)
    kinds = t.kinds_from_proto("chunk.kinds", message.kinds, PEER)
    logprobs = t.logprobs_from_proto("chunk.logprobs", message.logprobs)
    for field, items in (("chunk.kinds", kinds), ("chunk.logprobs", logprobs)):
        if items:
            PEER.count(field, items, len(token_ids), len(token_ids))
    return Chunk(PEER.integer("chunk.start", message.start), token_ids, message.text, kinds, logprobs)


def _prompt_logprobs_to_proto(event: PromptLogprobs) -> pb.PromptLogprobs:
    scores = [entry for entry in event.logprobs if entry is not None]
    return pb.PromptLogprobs(start=event.start, token_ids=event.token_ids, logprobs=t.logprobs_to_proto(scores))


def _prompt_logprobs_from_proto(message: pb.PromptLogprobs) -> PromptLogprobs:
    token_ids = PEER.ids("prompt_logprobs.token_ids", message.token_ids, 1)
    scores = t.logprobs_from_proto("prompt_logprobs.logprobs", message.logprobs)
    start = PEER.integer("prompt_logprobs.start", message.start)
    count = len(token_ids) - (not start)
    PEER.count("prompt_logprobs.logprobs", scores, count, count)
    return PromptLogprobs(start, token_ids, scores if start else (None, *scores))


def _finished_to_proto(event: Finished) -> pb.Finished:
    usage = event.usage
    return pb.Finished(
        reason=pb.FinishReason.ValueType(event.reason.value),
        matched=event.matched,
        usage=pb.Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
        ),
        figures=figures_to_proto(event.figures),
    )


def _finished_from_proto(message: pb.Finished) -> Finished:
    usage = Usage(
        PEER.integer("usage.prompt_tokens", message.usage.prompt_tokens),
        PEER.integer("usage.completion_tokens", message.usage.completion_tokens),
        PEER.integer("usage.cached_tokens", message.usage.cached_tokens),
    )
    reason = PEER.enum("finished.reason", message.reason, FinishReason)
    return Finished(reason, message.matched, usage, figures_from_proto(message.figures))
