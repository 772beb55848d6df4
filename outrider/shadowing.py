"""Sessions that are over, and what a drafter would have made of them: values, and their form as lines of JSON. Pure.

A line is what a file of sessions holds, and what goes to the process that drafts:

    token_ids     the whole text: the prompt, then what was generated
    prompt_len    how many of them are the prompt
    session_id, model    names; may be left out
    sampling      fields of `SamplingParams` that differ from their defaults; left out: temperature 0
    seed, sample_index   of a seeded session
    mode, key     as the session's state has them, where it is at hand; else they follow from temperature and seed
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from outrider.errors import InvalidRequest
from outrider.ids import Mode
from outrider.messages import Grammar, GrammarKind, SamplingParams
from outrider.noise import KEY_BYTES, Purpose, derive_key, seed_key

FIELD = "file"
"""Name of the option that names a file of sessions."""


@dataclass(frozen=True, slots=True)
class Logged:
    """A session that is over, or its latest turn."""

    session_id: str
    token_ids: tuple[int, ...]
    prompt_len: int
    mode: Mode
    sampling: SamplingParams
    key: bytes = b""
    """The session's key, from which all its randomness came; empty in greedy mode, and where it is not known."""
    sample_index: int = 0
    model: str = ""

    @property
    def exact(self) -> bool:
        """Whether replaying it meets the very tests that a live session would have."""
        return self.mode is Mode.GREEDY or (self.mode is Mode.COUPLED and bool(self.key))

    @property
    def drafted_as(self) -> Mode:
        """The mode in which a drafter is asked."""
        return Mode.REJECTION if self.mode is Mode.COUPLED and not self.key else self.mode

    @property
    def draft_key(self) -> bytes:
        """What a draft worker is told of the session's randomness; some key where it does not matter which."""
        if self.mode is Mode.GREEDY:
            return b""
        purpose = Purpose.FIELD if self.drafted_as is Mode.COUPLED else Purpose.DRAFT
        return derive_key(self.key or bytes(KEY_BYTES), purpose)


@dataclass(frozen=True, slots=True)
class Shadowed:
    """What a drafter would have made of a session, in sequential rounds."""

    session_id: str
    exact: bool = True
    tested: tuple[int, ...] = ()
    """By position in the proposal."""
    accepted: tuple[int, ...] = ()
    """By position; as long as the tests."""
    num_tokens: int = 0
    """Tokens of the text that were replayed."""
    num_rounds: int = 0
    """Passes of the target that they would have taken."""
    num_undrafted: int = 0
    """Tokens for which the drafter had nothing."""
    num_drafted: int = 0
    draft_s: float = 0.0
    """Time that drafting took."""
    skipped: str = ""
    """Why the session was left out; empty: it was not."""


# --- lines ----------------------------------------------------------------------------------------------------------


ModeName = Literal["greedy", "coupled", "rejection", "block"]
_NAMES: dict[Mode, ModeName] = {
    Mode.GREEDY: "greedy",
    Mode.COUPLED: "coupled",
    Mode.REJECTION: "rejection",
    Mode.BLOCK: "block",
}


class _Grammar(BaseModel):
    """`Grammar`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    kind: GrammarKind
    text: str


class _Sampling(BaseModel):
    """`SamplingParams`, with the ranges of each field."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    temperature: float = Field(default=1.0, ge=0, le=100)
    top_k: int = Field(default=0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    allowed_token_ids: tuple[int, ...] = ()
    min_tokens: int = Field(default=0, ge=0)
    grammar: _Grammar | None = None
    end_token_ids: tuple[int, ...] = ()
    grammar_end_ids: tuple[int, ...] = ()

    def as_params(self) -> SamplingParams:
        """Return the value that services use."""
        grammar = None if self.grammar is None else Grammar(self.grammar.kind, self.grammar.text)
        return SamplingParams(**self.model_dump() | {"grammar": grammar})


class _Line(BaseModel):
    """One session."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    token_ids: tuple[Annotated[int, Field(ge=0, lt=1 << 32)], ...] = Field(min_length=2)
    prompt_len: int = Field(ge=1)
    session_id: str = ""
    model: str = ""
    sampling: _Sampling = _Sampling(temperature=0.0)
    seed: int | None = Field(default=None, ge=-(1 << 63), lt=1 << 64)
    sample_index: int = Field(default=0, ge=0)
    mode: ModeName | None = None
    key: str = Field(default="", pattern=f"^([0-9a-f]{{{2 * KEY_BYTES}}})?$")


def to_line(session: Logged) -> str:
    """Return a session as one line, without its end."""
    line = _Line(
        token_ids=session.token_ids,
        prompt_len=session.prompt_len,
        session_id=session.session_id,
        model=session.model,
        sampling=_Sampling(**asdict(session.sampling)),
        sample_index=session.sample_index,
        mode=_NAMES[session.mode],
        key=session.key.hex(),
    )
    return line.model_dump_json()


def from_line(text: str, at: str) -> Logged:
    """Read a session.

    Args:
        text: the line.
        at: where it is, for the error.

    Raises:
        InvalidRequest: it is no session, or a field is unknown, missing or out of its range.
    """
    try:
        line = _Line.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the line"
        raise InvalidRequest(FIELD, at, f"{where} to be right: {first['msg']}") from None
    if line.prompt_len >= len(line.token_ids):
        raise InvalidRequest(FIELD, at, f"prompt_len in 1 to {len(line.token_ids) - 1}, not {line.prompt_len}")
    sampling = line.sampling.as_params()
    key = bytes.fromhex(line.key) or (b"" if line.seed is None else seed_key(line.seed))
    return Logged(
        line.session_id or at, line.token_ids, line.prompt_len, _mode(line, sampling), sampling, key,
        line.sample_index, line.model,
    )  # fmt: skip


def _mode(line: _Line, sampling: SamplingParams) -> Mode:
    if line.mode is not None:
        return Mode[line.mode.upper()]
    if sampling.temperature == 0.0:
        return Mode.GREEDY
    return Mode.REJECTION if line.seed is None else Mode.COUPLED


def read_sessions(path: Path) -> list[Logged]:
    """Return the sessions of a file, one a line; empty lines are skipped.

    Raises:
        InvalidRequest: the file cannot be read, holds none, or a line is wrong, which is named by its number.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(FIELD, str(path), f"a file in UTF-8 that can be read ({error})") from error
    sessions = [from_line(line, f"{path.name}, line {at}") for at, line in enumerate(lines, 1) if line.strip()]
    if not sessions:
        raise InvalidRequest(FIELD, str(path), "a file with at least one session")
    return sessions


# --- what comes back ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Passes:
    """What passes of the target take, in seconds; 0: it was not run."""

    one_s: float = 0.0
    """Of one row."""
    many_s: float = 0.0
    """Of a proposal's rows and one more."""


def total(results: Iterable[Shadowed]) -> Shadowed:
    """Add up results that were not left out; "exact" if all of them are."""
    kept = [each for each in results if not each.skipped]
    longest = max((len(each.tested) for each in kept), default=0)

    def by_position(name: str) -> tuple[int, ...]:
        rows: list[tuple[int, ...]] = [getattr(each, name) for each in kept]
        return tuple(sum(row[place] for row in rows if place < len(row)) for place in range(longest))

    sums: dict[str, Any] = {
        name: sum(getattr(each, name) for each in kept)
        for name in ("num_tokens", "num_rounds", "num_undrafted", "num_drafted", "draft_s")
    }
    exact = all(each.exact for each in kept)
    return Shadowed("", exact, by_position("tested"), by_position("accepted"), **sums)
