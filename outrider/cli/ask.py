"""Options of the command line that say what is asked for."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from outrider.codec.generation import request_from_proto, request_to_proto
from outrider.errors import InvalidRequest
from outrider.generation import (
    ChatMessage,
    ChatPrompt,
    GenerationRequest,
    SpeculationChoice,
    TextPrediction,
    TextPrompt,
)
from outrider.ids import Mode
from outrider.messages import Grammar, GrammarKind, SamplingParams


@Parameter(name="*")
@dataclass(frozen=True)
class Ask:
    """What is asked for."""

    raw: Annotated[bool, Parameter(negative="")] = False
    """Continue the prompt as it is, without the chat template."""
    system: str = ""
    """System message."""
    max_tokens: int = 200
    """Most tokens of the answer."""
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    """Keep the likeliest tokens that reach this mass, (0, 1]."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the likeliest, [0, 1]."""
    min_tokens: int = 0
    """Tokens before which the answer does not end."""
    json_schema: Path | None = None
    """File with a JSON schema that the answer fits."""
    regex: str = ""
    """Regular expression that the whole answer matches."""
    seed: int | None = None
    """The same seed gives the same text."""
    mode: str = "auto"
    """auto, greedy, coupled, rejection or block."""
    gamma: int | None = None
    """Tokens per proposal; unset: measured."""
    window: int | None = None
    """Tokens the drafter may be ahead, at least gamma; unset: measured."""
    plain: Annotated[bool, Parameter(negative="")] = False
    """Decode without drafts."""
    drafter: str = ""
    """Kind of drafter, or label of draft workers; unset: any."""
    expect: Path | None = None
    """File that holds what the answer is expected to be, such as the text before an edit."""
    origins: Annotated[bool, Parameter(negative="")] = False
    """Colour tokens by where they came from."""

    def request(self, prompt: str) -> GenerationRequest:
        """Turn the options into a request.

        Raises:
            InvalidRequest: there is no such mode or file, or a value is out of its range. What depends on the model is
                the orchestrator's to check.
        """
        request = GenerationRequest(
            prompt=self._prompt(sys.stdin.read() if prompt == "-" else prompt),
            max_tokens=self.max_tokens,
            sampling=self._sampling(),
            seed=self.seed,
            mode=self._mode(),
            speculation=SpeculationChoice(off=self.plain, gamma=self.gamma, window=self.window),
            return_token_origin=True,
            drafter=self.drafter,
            prediction=None if self.expect is None else self._prediction(self.expect),
        )
        return request_from_proto(request_to_proto(request))  # the orchestrator's own checks, before one is started

    def _sampling(self) -> SamplingParams:
        grammar = Grammar(GrammarKind.REGEX, self.regex) if self.regex else None
        if self.json_schema is not None:
            if grammar is not None:
                raise InvalidRequest("regex", self.regex, "nothing beside json-schema")
            grammar = Grammar(GrammarKind.JSON_SCHEMA, _text_of("json-schema", self.json_schema))
        return SamplingParams(
            temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, min_p=self.min_p,
            min_tokens=self.min_tokens, grammar=grammar,
        )  # fmt: skip

    def _prediction(self, path: Path) -> TextPrediction:
        return TextPrediction(_text_of("expect", path))

    def _prompt(self, text: str) -> TextPrompt | ChatPrompt:
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise InvalidRequest("prompt", ascii(text), "valid UTF-8")
        if self.raw:
            return TextPrompt(text)
        before = (ChatMessage("system", self.system),) if self.system else ()
        return ChatPrompt((*before, ChatMessage("user", text)))

    def _mode(self) -> Mode | None:
        if self.mode == "auto":
            return None
        try:
            return Mode[self.mode.upper()]
        except KeyError:
            raise InvalidRequest("mode", self.mode, "auto, greedy, coupled, rejection or block") from None


def _text_of(option: str, path: Path) -> str:
    """Read a file that an option names.

    Raises:
        InvalidRequest: it cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(option, str(path), f"a file of UTF-8 that can be read ({error})") from error
