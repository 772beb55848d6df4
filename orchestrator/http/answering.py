"""The routes that generate: chat completions and completions."""

import secrets
import time
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from orchestrator.access import Caller
from orchestrator.http.asking import Asked, chat_asked, completion_asked
from orchestrator.http.front import Calling, Front, FrontHere
from orchestrator.http.generating import Generating, Work
from orchestrator.http.invalid import renamed
from orchestrator.http.parsing import Format, Parser
from orchestrator.http.reading import JsonRoute
from orchestrator.http.samples import About, ChatSample, Sample, TextSample
from orchestrator.http.schema import ChatRequest, CompletionRequest
from orchestrator.http.served import Served
from orchestrator.http.shown import ERRORS, ChatCompletion, Completion
from orchestrator.http.telling import Heading, Telling
from orchestrator.requests import check
from outrider.errors import InvalidRequest
from outrider.generation import GenerationRequest, TextPrompt, TokenPrompt

router = APIRouter(responses=ERRORS, route_class=JsonRoute)

STREAM: dict[str, Any] = {"text/event-stream": {}}
"""Server-sent events have no schema: each is an object of its own, but the last."""


@router.post(
    "/v1/chat/completions",
    tags=["generation"],
    response_class=Response,
    responses={200: {"model": ChatCompletion, "content": STREAM, "description": "The answers, or a stream of them."}},
)
async def chat_completions(body: ChatRequest, front: FrontHere, caller: Calling) -> Response:
    """Answer a conversation; with `stream` as server-sent events, a chunk per round."""
    desk, served = front.open_desk, front.served
    with desk.refusing():
        asked = chat_asked(body, served.model, calls_known=served.format.calls)

    def sample(index: int, request: GenerationRequest) -> Sample:
        marks = served.format
        wanted = Format(marks.thinks, marks.thinks_first, calls=marks.calls and asked.parses_calls)
        parser = Parser(wanted) if wanted.thinks or wanted.calls else None
        about = About(request, served.tokens)
        shows = body.include_reasoning
        return ChatSample(index, about, parser, served.tokens, keeps=not asked.streams, shows_thoughts=shows)

    return _generating(front, caller, asked, sample, "chat.completion")


@router.post(
    "/v1/completions",
    tags=["generation"],
    response_class=Response,
    responses={200: {"model": Completion, "content": STREAM, "description": "The answers, or a stream of them."}},
)
async def completions(body: CompletionRequest, front: FrontHere, caller: Calling) -> Response:
    """Continue texts; with `stream` as server-sent events, a chunk per round."""
    desk, served = front.open_desk, front.served
    with desk.refusing():
        asked = completion_asked(body, served.model)
        if asked.echoes and asked.requests[0].session_id:
            raise InvalidRequest("echo", True, "false beside outrider.session_id, whose earlier turns are not shown")
        if asked.echoes:
            # Their text is told before anything else looks at them.
            try:
                for request in asked.requests:
                    check(request, desk.sessions.language.vocabulary)
            except InvalidRequest as error:
                raise renamed(error, asked.names) from error

    def sample(index: int, request: GenerationRequest) -> Sample:
        echo = _echo(request, served) if asked.echoes else None
        return TextSample(index, About(request, served.tokens), echo, served.tokens, keeps=not asked.streams)

    return _generating(front, caller, asked, sample, "text_completion")


def _generating(
    front: Front, caller: Caller, asked: Asked, sample: Callable[[int, GenerationRequest], Sample], kind: str
) -> Generating:
    prefix = "chatcmpl" if kind == "chat.completion" else "cmpl"
    heading = Heading(f"{prefix}-{secrets.token_hex(12)}", kind, int(time.time()), front.served.model)
    samples = [sample(index, request) for index, request in enumerate(asked.requests)]
    telling = Telling(heading, samples, asked.num_samples, includes_usage=asked.includes_usage)
    return Generating(Work(front.open_desk, caller, asked, telling), _limit_headers(caller))


def _limit_headers(caller: Caller) -> dict[str, str]:
    """Return what a key may use, by the names that clients of OpenAI know."""
    limits = {
        "x-ratelimit-limit-requests": caller.limits.requests_per_minute,
        "x-ratelimit-limit-tokens": caller.limits.tokens_per_minute,
    }
    return {name: str(limit) for name, limit in limits.items() if limit}


def _echo(request: GenerationRequest, served: Served) -> str:
    """Return the text of a prompt."""
    match request.prompt:
        case TextPrompt(text):
            return text
        case TokenPrompt(token_ids):
            return served.tokens.texts(token_ids, skip_special_tokens=request.skip_special_tokens)
        case _:
            return ""
