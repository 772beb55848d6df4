"""What clients and peers must not send, over real connections: the answer names the field, and nobody else notices."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo
from grpc_status import rpc_status

from outrider.messages import SamplingParams
from outrider.rpc import channel
from outrider.rpc.ending import Ending
from outrider.v1 import (
    draft_pb2,
    draft_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    types_pb2,
    verify_pb2,
    verify_pb2_grpc,
)
from tests.e2e.toys import PROMPT, Heard, Toys, ask, expected, hear

pytestmark = pytest.mark.timeout(240)

SEED = 23
LIMIT_S = 60.0
INVALID = grpc.StatusCode.INVALID_ARGUMENT


def request(**fields: Any) -> generation_pb2.GenerateRequest:
    """Return a request that is good but for these fields."""
    good: dict[str, Any] = {} if {"token_ids", "chat", "input"} & fields.keys() else {"text": PROMPT}
    fields.pop("input", None)
    return generation_pb2.GenerateRequest(**{**good, "max_tokens": 3, **fields})


def ids(*token_ids: int) -> generation_pb2.TokenIds:
    return generation_pb2.TokenIds(token_ids=token_ids)


BAD: list[tuple[str, generation_pb2.GenerateRequest, str, str]] = [
    ("no prompt", request(input=None), "input", "None"),
    ("an empty text", request(text=""), "text", "''"),
    ("an empty list of ids", request(token_ids=ids()), "token_ids", "'0 entries'"),
    ("an empty conversation", request(chat=generation_pb2.Chat()), "chat.messages", "'0 entries'"),
    ("a prompt over the context", request(token_ids=ids(*[5] * 4096)), "prompt", "'4096 tokens'"),
    ("an unknown model", request(model="other"), "model", "'other'"),
    ("an id past the vocabulary", request(token_ids=ids(5, 267)), "token_ids[1]", "267"),
    ("an id below zero", request(token_ids=ids(5, 5, -1)), "token_ids[2]", "-1"),
    ("an id of 2**31", request(token_ids=ids(2**31)), "token_ids[0]", str(2**31)),
    ("a role that nobody has", request(chat={"messages": [{"role": "x"}]}), "chat.messages[0].role", "'x'"),
    ("no tokens wanted", request(max_tokens=0), "max_tokens", "0"),
    ("fewer than no tokens wanted", request(max_tokens=-5), "max_tokens", "-5"),
    ("a temperature below zero", request(sampling={"temperature": -1}), "sampling.temperature", "-1.0"),
    ("a temperature that is no number", request(sampling={"temperature": math.nan}), "sampling.temperature", "nan"),
    ("a temperature without end", request(sampling={"temperature": math.inf}), "sampling.temperature", "inf"),
    ("a top_p of zero", request(sampling={"top_p": 0}), "sampling.top_p", "0.0"),
    ("a top_p above one", request(sampling={"top_p": 1.5}), "sampling.top_p", "1.5"),
    ("a top_k below zero", request(sampling={"top_k": -1}), "sampling.top_k", "-1"),
    ("a min_p above one", request(sampling={"min_p": 2}), "sampling.min_p", "2.0"),
    ("no repetition penalty", request(sampling={"repetition_penalty": 0}), "sampling.repetition_penalty", "0.0"),
    ("a large penalty", request(sampling={"presence_penalty": 3}), "sampling.presence_penalty", "3.0"),
    ("a large negative penalty", request(sampling={"frequency_penalty": -3}), "sampling.frequency_penalty", "-3.0"),
    (
        "a bias of an id past the vocabulary",
        request(sampling={"logit_bias": [{"token_id": 300, "bias": 1}]}),
        "sampling.logit_bias.token_id[0]",
        "300",
    ),
    (
        "a bias that is no number",
        request(sampling={"logit_bias": [{"token_id": 3, "bias": math.nan}]}),
        "sampling.logit_bias.bias",
        "nan",
    ),
    ("an empty stop string", request(stop=["a", ""]), "stop[1]", "''"),
    ("too many stop strings", request(stop=["a"] * 65), "stop", "'65 entries'"),
    ("a stop id past the vocabulary", request(stop_token_ids=[400]), "stop_token_ids[0]", "400"),
    ("too many log-probabilities", request(logprobs=200), "logprobs", "200"),
    ("log-probabilities below zero", request(logprobs=-1), "logprobs", "-1"),
    ("an unknown mode", request(mode=99), "mode", "99"),
    (
        "greedy at a temperature",
        request(mode=types_pb2.MODE_GREEDY, sampling={"temperature": 1}),
        "sampling.temperature",
        "1.0",
    ),
    ("coupled without a seed", request(mode=2), "seed", "None"),
    ("a seed under rejection", request(mode=3, seed=4), "seed", "4"),
    ("no speculation, but a gamma", request(speculation={"off": True, "gamma": 3}), "speculation.off", "True"),
    ("a window below gamma", request(speculation={"gamma": 4, "window": 3}), "speculation.window", "3"),
    ("a window without gamma", request(speculation={"window": 3}), "speculation.gamma", "None"),
    ("a large gamma", request(speculation={"gamma": 1000}), "speculation.gamma", "1000"),
]


@pytest.fixture
async def neighbour(toys: Toys) -> AsyncIterator["asyncio.Task[Heard]"]:
    """A seeded generation that runs meanwhile, and whose text is looked at in the end."""
    running = asyncio.create_task(hear(await toys.client(), ask(max_tokens=120, seed=SEED, sampling=SamplingParams())))
    yield running
    assert (await running).token_ids == expected(PROMPT, 120, SEED)


@contextmanager
def refused(code: grpc.StatusCode) -> Iterator[list[grpc.aio.AioRpcError]]:
    """Require that a call in the block fails with a code; the error is put into the list."""
    caught: list[grpc.aio.AioRpcError] = []
    with pytest.raises(grpc.aio.AioRpcError) as error:
        yield caught
    caught.append(error.value)
    assert error.value.code() is code, error.value


async def test_every_bad_field_is_named_with_its_value_and_the_allowed_range(
    toys: Toys, neighbour: "asyncio.Task[Heard]"
) -> None:
    async with channel(await toys.address(toys.running("orchestrate")[0])) as to:
        stub = generation_pb2_grpc.GenerationServiceStub(to)
        for name, message, field, value in BAD:
            with refused(INVALID) as errors:
                async for _ in stub.Generate(message, timeout=LIMIT_S):
                    pytest.fail(f"{name} was taken")
            info, violation = details(errors[0])
            assert (info.metadata["field"], info.metadata["value"]) == (field, value), name
            assert info.metadata["allowed"], name
            assert violation.field_violations[0].field == field, name
            assert field in str(errors[0].details()), name
            assert "\n" not in str(errors[0].details()), name


def details(error: grpc.aio.AioRpcError) -> tuple[ErrorInfo, BadRequest]:
    """Return the details of an INVALID_ARGUMENT."""
    status = rpc_status.from_call(error)
    assert status is not None
    info, violation = ErrorInfo(), BadRequest()
    assert any(detail.Unpack(info) for detail in status.details)
    assert any(detail.Unpack(violation) for detail in status.details)
    return info, violation


async def test_calls_about_sessions_that_are_not_there_or_not_named_are_refused(toys: Toys) -> None:
    async with channel(await toys.address(toys.running("orchestrate")[0])) as to:
        stub = generation_pb2_grpc.GenerationServiceStub(to)
        for name, code in (("", INVALID), ("nobody", grpc.StatusCode.NOT_FOUND)):
            with refused(code):
                await stub.GetSession(generation_pb2.GetSessionRequest(session_id=name), timeout=LIMIT_S)
            with refused(code):
                await stub.DeleteSession(generation_pb2.DeleteSessionRequest(session_id=name), timeout=LIMIT_S)
            with refused(code):
                _ = [
                    event async for event in stub.Resume(generation_pb2.ResumeRequest(session_id=name), timeout=LIMIT_S)
                ]
        with refused(INVALID):
            bad = generation_pb2.ResumeRequest(session_id="nobody", next_position=-1)
            _ = [event async for event in stub.Resume(bad, timeout=LIMIT_S)]
        with refused(grpc.StatusCode.NOT_FOUND):
            _ = [event async for event in stub.Generate(request(session_id="nobody"), timeout=LIMIT_S)]


SERVICES = {
    "orchestrate": ("GenerationService", ["Generate", "Resume", "GetSession", "DeleteSession", "ListModels"]),
    "verify": ("VerifyService", ["Describe", "Decode", "Propose"]),
    "draft": ("DraftService", ["Describe", "Draft"]),
}
STREAMING = ("Decode", "Propose", "Draft")
NOISE = [b"\xff\xff\xff\xff", b"\x0a\xff\xff\xff\xff\x0f", bytes(range(1, 200)), b"\x0a\x05hello"]


@pytest.mark.parametrize("role", SERVICES)
async def test_bytes_that_are_no_message_end_that_call_alone(
    toys: Toys, neighbour: "asyncio.Task[Heard]", role: str
) -> None:
    service, methods = SERVICES[role]
    for name in toys.running(role):
        async with channel(await toys.address(name)) as to:
            for method in methods:
                call: Any = to.stream_stream(f"/outrider.v1.{service}/{method}")
                for noise in NOISE:
                    await _answers_or_refuses(call, [noise])


@pytest.mark.parametrize("role", SERVICES)
async def test_streams_that_break_off_at_once_or_say_nothing_are_let_go(
    toys: Toys, neighbour: "asyncio.Task[Heard]", role: str
) -> None:
    service, methods = SERVICES[role]
    async with channel(await toys.address(toys.running(role)[0])) as to:
        for method in methods:
            method_call: Any = to.stream_stream(f"/outrider.v1.{service}/{method}")
            if method in STREAMING:
                await _answers_or_refuses(method_call, [])
            silent = method_call(timeout=LIMIT_S)
            await asyncio.sleep(0.05)
            silent.cancel()


async def _answers_or_refuses(method: Callable[..., Any], messages: list[bytes]) -> None:
    """Send raw messages and half-close: the server ends the call in time, with whatever status, and not as a defect."""
    call = method(iter(messages), timeout=LIMIT_S)
    code, told = grpc.StatusCode.OK, ""
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        code, told = error.code(), str(error.details())
    # For a stream, INTERNAL is the status of a broken protocol, and must not be that of a defect.
    assert code is not grpc.StatusCode.DEADLINE_EXCEEDED
    assert code is not grpc.StatusCode.UNKNOWN
    assert "reading a stream failed" not in told
    assert "unexpected error" not in told


async def test_an_oversize_message_is_refused_and_the_service_goes_on(
    toys: Toys, neighbour: "asyncio.Task[Heard]"
) -> None:
    large = b"\x0a" + _varint(65 << 20) + bytes(65 << 20)
    for role, (service, methods) in SERVICES.items():
        address = await toys.address(toys.running(role)[0])
        async with channel(address, 128 << 20) as to:
            with refused(grpc.StatusCode.RESOURCE_EXHAUSTED):
                method: Any = to.stream_stream(f"/outrider.v1.{service}/{methods[0]}")
                call = method(iter([large]), timeout=LIMIT_S)
                ending = Ending(call)
                try:
                    _ = [answer async for answer in call]
                except grpc.aio.AioRpcError as error:  # the message was still being written
                    raise (await ending.of(error) or error) from None


def _varint(number: int) -> bytes:
    groups = []
    while number > 127:
        groups.append(number & 127 | 128)
        number >>= 7
    return bytes([*groups, number])


async def test_clients_that_vanish_in_mid_stream_disturb_nobody(toys: Toys, neighbour: "asyncio.Task[Heard]") -> None:
    address = await toys.address(toys.running("orchestrate")[0])
    for _ in range(5):
        async with channel(address) as to:
            stub = generation_pb2_grpc.GenerationServiceStub(to)
            call = stub.Generate(request(max_tokens=2000, ignore_eos=True), timeout=LIMIT_S)
            await call.read()
            await call.read()
            call.cancel()
    async with asyncio.timeout(LIMIT_S):
        names = toys.running("verify")
        while sum(toys.metric(name, "outrider_num_requests_running") for name in names) > 1:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_openings_that_make_no_sense_are_refused_by_verifier_and_draft_worker(
    toys: Toys, neighbour: "asyncio.Task[Heard]"
) -> None:
    """From peers: an error of that stream alone. 0 ids, an id past the vocabulary, a first message that is none."""
    verify = await toys.address(toys.running("verify")[0])
    draft = await toys.address(toys.running("draft")[0])
    async with channel(verify) as to_verify, channel(draft) as to_draft:
        decode = verify_pb2_grpc.VerifyServiceStub(to_verify)
        drafts = draft_pb2_grpc.DraftServiceStub(to_draft)
        for token_ids in ([], [267], [-1], [2**31]):
            opened = verify_pb2.DecodeOpen(
                session_id="x",
                token_ids=token_ids,
                classes=b"\x01" * len(token_ids),
                mode=types_pb2.MODE_GREEDY,
                sampling=types_pb2.SamplingParams(temperature=0.0),
                prompt_len=1,
                commit_limit=9,
            )
            await _refuses(decode.Decode, verify_pb2.DecodeRequest(open=opened))
            draft_opened = draft_pb2.DraftOpen(
                session_id="x",
                token_ids=token_ids,
                mode=types_pb2.MODE_GREEDY,
                sampling=types_pb2.SamplingParams(temperature=0.0),
                prompt_len=1,
                verifier_id="v",
                verifier_address=verify,
            )
            await _refuses(drafts.Draft, draft_pb2.DraftRequest(open=draft_opened))
        await _refuses(decode.Decode, verify_pb2.DecodeRequest(close=verify_pb2.DecodeClose()))
        await _refuses(drafts.Draft, draft_pb2.DraftRequest(close=draft_pb2.DraftClose()))
        await _refuses(decode.Propose, verify_pb2.ProposeRequest(pass_turn=verify_pb2.Pass()))


async def _refuses(method: Callable[..., Any], message: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        _ = [answer async for answer in method(iter([message]), timeout=LIMIT_S)]
    refusals = (INVALID, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INTERNAL)
    assert error.value.code() in refusals, error.value
    assert "unexpected error" not in str(error.value.details()), error.value
