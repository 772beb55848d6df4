"""One answer of a request, told bit by bit or at once: from events to the `choices` of OpenAI's objects. Pure."""

from collections.abc import Sequence
from typing import Protocol, assert_never

from orchestrator.http.parsing import Called, Parser, Said, Thought
from orchestrator.http.tokens import Json, Tokens, joined
from outrider.generation import Chunk, Finished, GenerationEvent, GenerationRequest, Notice, PromptLogprobs, Started
from outrider.ids import FinishReason
from outrider.messages import TokenLogprobs

_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class Sample(Protocol):
    """One answer."""

    about: "About"

    def take(self, event: GenerationEvent) -> Json | None:
        """Take what happened, and return the choice of a chunk that tells it; None: there is nothing to tell."""
        ...

    def choice(self) -> Json:
        """Return the choice of a whole response, after the end; only of an answer that keeps what it takes."""
        ...


class About:
    """What is told of an answer beside its text."""

    def __init__(self, request: GenerationRequest, tokens: Tokens) -> None:
        """Know nothing yet.

        Args:
            request: what was asked for.
            tokens: of the served model.
        """
        self._tokens, self._wants_origin, self._stops = tokens, request.return_token_origin, request.stop
        self.started: Started | None = None
        self.finished: Finished | None = None
        self.waited_s = 0.0
        """For a place, before it began."""
        self.notices: list[Json] = []
        self.prompt_logprobs: list[Json | None] | None = None
        self._origins: list[Json] = []

    def take(self, event: GenerationEvent) -> None:
        """Remember what is not text."""
        match event:
            case Started():
                self.started = event
            case Notice():
                self.notices.append({"reason": event.reason, "text": event.text})
            case PromptLogprobs():
                shown = self._tokens.prompt_logprobs(event.token_ids, event.logprobs)
                self.prompt_logprobs = [*(self.prompt_logprobs or ()), *shown]
            case Finished():
                self.finished = event
            case Chunk():
                pass
            case _:
                assert_never(event)

    def origin(self, chunk: Chunk) -> Json:
        """Return ids, texts and kinds of a chunk's tokens as part of a choice; nothing if nobody asked."""
        if not self._wants_origin:
            return {}
        return {
            "outrider": {
                "start": chunk.start,
                "token_ids": list(chunk.token_ids),
                "texts": [self._tokens.text(token_id) for token_id in chunk.token_ids],
                "kinds": [kind.name.lower() for kind in chunk.kinds],
            }
        }

    def keep_origin(self, chunk: Chunk) -> None:
        """Remember where a chunk's tokens came from."""
        if self._wants_origin:
            self._origins.append(self.origin(chunk)["outrider"])

    def all_origins(self) -> Json:
        """Return what was remembered, as part of a choice."""
        if not self._origins:
            return {}
        names = ("token_ids", "texts", "kinds")
        whole = {name: [item for each in self._origins for item in each[name]] for name in names}
        return {"outrider": {"start": self._origins[0]["start"], **whole}}

    def reason(self, *, called: bool = False) -> str:
        """Return why the answer ended, in OpenAI's words."""
        if self.finished is None:
            return "stop"
        reason = _REASONS.get(self.finished.reason, "stop")
        return "tool_calls" if called and reason == "stop" else reason

    def matched(self) -> str | int | None:
        """Return the stop string, or the stop id, that ended the answer."""
        matched = self.finished.matched if self.finished is not None else ""
        return int(matched) if matched.isdecimal() and matched not in self._stops else matched or None


class ChatSample:
    """One answer of a chat completion."""

    def __init__(
        self,
        index: int,
        about: About,
        parser: Parser | None,
        tokens: Tokens,
        *,
        keeps: bool,
        shows_thoughts: bool = True,
    ) -> None:
        """Start before the first event.

        Args:
            index: of the choice.
            about: what is told beside the text.
            parser: takes the text apart; None: it is content.
            tokens: of the served model.
            keeps: whether the whole answer will be asked for.
            shows_thoughts: whether thoughts are told at all.
        """
        self.about, self._index, self._parser, self._tokens, self._keeps = about, index, parser, tokens, keeps
        self._shows_thoughts = shows_thoughts
        self._content: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[Json] = []
        self._logprobs: list[Json] | None = None

    def take(self, event: GenerationEvent) -> Json | None:
        """Take what happened; see `Sample`."""
        self.about.take(event)
        match event:
            case Started():
                return self._choice({"role": "assistant", "content": ""})
            case Chunk():
                return self._chunk(event)
            case Finished():
                delta = self._delta("", ends=True)
                return self._choice(delta) | {
                    "finish_reason": self.about.reason(called=self._called),
                    "stop_reason": self.about.matched(),
                }
            case Notice() | PromptLogprobs():
                return None
            case _:
                assert_never(event)

    def choice(self) -> Json:
        """Return the whole choice."""
        content = "".join(self._content)
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if self._thoughts:
            message["reasoning_content"] = "".join(self._thoughts)
        if self._calls:
            message["tool_calls"] = [{name: call[name] for name in call if name != "index"} for call in self._calls]
            message["content"] = content or None
        return {
            "index": self._index,
            "message": message,
            "logprobs": None if self._logprobs is None else {"content": self._logprobs, "refusal": None},
            "finish_reason": self.about.reason(called=self._called),
            "stop_reason": self.about.matched(),
            **self.about.all_origins(),
        }

    @property
    def _called(self) -> bool:
        return self._parser is not None and self._parser.num_calls > 0

    def _choice(self, delta: Json, logprobs: Json | None = None) -> Json:
        return {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _chunk(self, chunk: Chunk) -> Json | None:
        delta = self._delta(chunk.text)
        shown = self._tokens.chat_logprobs(chunk.token_ids, chunk.logprobs) if chunk.logprobs else None
        if self._keeps:
            self.about.keep_origin(chunk)
            if shown is not None:
                self._logprobs = (self._logprobs or []) + shown
            return None
        origin = self.about.origin(chunk)
        if not delta and shown is None and not origin:
            return None
        return self._choice(delta, None if shown is None else {"content": shown, "refusal": None}) | origin

    def _delta(self, text: str, *, ends: bool = False) -> Json:
        """Return what a piece of text, or the end of it, adds to the message."""
        if self._parser is None:
            pieces: Sequence[Said | Thought | Called] = [Said(text)] if text else []
        else:
            pieces = self._parser.flush() if ends else self._parser.push(text)
        delta: Json = {}
        for piece in pieces:
            match piece:
                case Said():
                    delta["content"] = delta.get("content", "") + piece.text
                    self._keep(self._content, piece.text)
                case Thought() if not self._shows_thoughts:
                    continue
                case Thought():
                    delta["reasoning_content"] = delta.get("reasoning_content", "") + piece.text
                    self._keep(self._thoughts, piece.text)
                case Called():
                    delta.setdefault("tool_calls", []).append(self._call(piece))
                case _:
                    assert_never(piece)
        return delta

    def _keep(self, where: list[str], text: str) -> None:
        if self._keeps:
            where.append(text)

    def _call(self, piece: Called) -> Json:
        started, number = self.about.started, len(self._calls)
        # A session may go on, and its later calls are others.
        place = f"{started.session_id}_{started.prompt_len}" if started else ""
        call = {
            "index": number,
            "id": f"call_{place}_{number}",
            "type": "function",
            "function": {"name": piece.name, "arguments": piece.arguments},
        }
        self._calls.append(call)
        return call


class TextSample:
    """One answer of a completion."""

    def __init__(self, index: int, about: About, echo: str | None, tokens: Tokens, *, keeps: bool) -> None:
        """Start before the first event.

        Args:
            index: of the choice.
            about: what is told beside the text.
            echo: the prompt's text, to be told first; None: it is not.
            tokens: of the served model.
            keeps: whether the whole answer will be asked for.
        """
        self.about, self._index, self._echo, self._tokens, self._keeps = about, index, echo, tokens, keeps
        self._text: list[str] = []
        self._logprobs: Json | None = None
        self._offset = 0

    def take(self, event: GenerationEvent) -> Json | None:
        """Take what happened; see `Sample`."""
        self.about.take(event)
        match event:
            case Started():
                return self._told(self._echo or "", None)
            case PromptLogprobs():
                return self._told("", self._shown(event.token_ids, event.logprobs)) if self._echo is not None else None
            case Chunk():
                shown = self._shown(event.token_ids, event.logprobs) if event.logprobs else None
                if self._keeps:
                    self.about.keep_origin(event)
                origin = self.about.origin(event)
                told = self._told(event.text, shown)
                return told | origin if event.text or shown is not None or origin else None
            case Finished():
                ends = {"finish_reason": self.about.reason(), "stop_reason": self.about.matched()}
                return self._told("", None) | ends
            case Notice():
                return None
            case _:
                assert_never(event)

    def choice(self) -> Json:
        """Return the whole choice."""
        choice: Json = {
            "index": self._index,
            "text": "".join(self._text),
            "logprobs": self._logprobs,
            "finish_reason": self.about.reason(),
            "stop_reason": self.about.matched(),
            **self.about.all_origins(),
        }
        if self.about.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self.about.prompt_logprobs
        return choice

    def _shown(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> Json:
        shown, self._offset = self._tokens.completion_logprobs(token_ids, logprobs, self._offset)
        return shown

    def _told(self, text: str, shown: Json | None) -> Json:
        if self._keeps:
            self._text.append(text)
            if shown is not None:
                self._logprobs = joined(self._logprobs, shown)
        return {"index": self._index, "text": text, "logprobs": shown, "finish_reason": None}
