"""One session on the engine's thread: its chain, its KV slot, and what waits to be sent with the next verdict."""

from collections import deque
from dataclasses import dataclass

from torch import Tensor

from outrider.history import GrammarState, History
from outrider.ids import Epoch, Mode, TokenClass
from outrider.messages import DecodeOpen, ProposeMessage, TokenLogprobs
from outrider.model.runner import BLOCK_LEN, KvSlot
from outrider.verification import Rule, rule_for
from verify_service.chain import Chain
from verify_service.events import StartTimer
from verify_service.inbox import DecodeSend, Ticket
from verify_service.scoring import Scoring


@dataclass(slots=True)
class PassFigures:
    """Figures of the passes since the last verdict."""

    verify_s: float = 0.0
    queue_s: float = 0.0
    num_rows: int = 0
    num_sessions: int = 0


@dataclass(frozen=True, slots=True)
class Fresh:
    """Hidden states of the last pass, for a drafter that wants those of the positions that stay."""

    epoch: Epoch
    """In which the pass was made."""
    position: int
    """Absolute, of the first row."""
    hidden: Tensor
    """[positions, hidden_size]"""


class Session:
    """State of one open `Decode` stream.

    It *waits* while it has no slot, *fills* while its slot holds less than its chain needs, and is *ready* otherwise.
    Only a ready session is scheduled; its chain takes proposals all the time.
    """

    def __init__(
        self,
        ticket: Ticket,
        opened: DecodeOpen,
        send: DecodeSend,
        vocab_len: int,
        *,
        trees: bool = True,
        grammar: GrammarState | None = None,
    ) -> None:
        """Make a waiting session.

        Args:
            ticket: of its stream; also its age, smaller is older.
            opened: what its stream asked for, validated.
            send: where its verdicts go.
            vocab_len: length of the tokenizer's id range.
            trees: whether a pass can have branches.
            grammar: where the output stands in the grammar that was asked for; the session's own from now on.

        Raises:
            ValueError: a grammar is asked for, and none is given.
        """
        self.ticket, self.opened, self.send, self.vocab_len = ticket, opened, send, vocab_len
        self.chain = Chain(opened, vocab_len, trees=trees)
        self.rule: Rule = rule_for(opened.mode, opened.key, opened.sample_index)
        self.grammar_at_open = None if grammar is None else grammar.copy()
        """Where the output stood in its grammar, for whoever decodes it again."""
        self.history = _history(opened, grammar)
        self.scoring = Scoring(opened, vocab_len) if opened.num_prompt_logprobs >= 0 else None
        """Log-probabilities of the prompt, until they are told: its KV is computed anew for as long."""
        self.best_below = vocab_len if _wants_best_alone(opened) else 0
        """If positive, the likeliest id below this says everything that the session wants to know of a row."""
        self.slot: KvSlot | None = None
        self.filling = self.closed = False
        self.held_row: Tensor | None = None
        """[vocab] logits of the held row, or its likeliest id; not None exactly while the chain holds one."""
        self.fresh: Fresh | None = None
        """What its drafter has not been sent yet."""
        self.logprobs: list[TokenLogprobs] = []
        """Of the tokens that no verdict has named yet."""
        self.figures = PassFigures()
        self.ahead = PassFigures()
        """Of the pass that fed the last token while its drafter was awaited."""
        self.timer: StartTimer | None = None
        """A timer that starts when the session is ready: patience does not run while it could not run anyway."""
        self._classes = effective_classes(opened)
        self._arrivals: deque[tuple[int, float]] = deque()
        self._opened_kv_len = self.chain.kv_len
        self._num_computed = self._computed_len = 0

    @property
    def num_cached(self) -> int:
        """Tokens it opened with whose KV nobody computed for it; final once it is ready."""
        return self._opened_kv_len - self._num_computed

    def note_computed(self, first: int, last: int) -> None:
        """Count the positions [first, last) as computed for it; KV that it lost and needs again counts once."""
        last = min(last, self._opened_kv_len)
        self._num_computed += max(0, last - max(first, self._computed_len))
        self._computed_len = max(self._computed_len, last)

    @property
    def ready(self) -> bool:
        """Whether its KV is complete, so that it may be scheduled."""
        return self.slot is not None and not self.filling

    def classes(self, length: int) -> list[TokenClass]:
        """Return the class by which each of the first `length` tokens is, or is to be, computed."""
        decoded = max(0, length - len(self._classes))
        return self._classes[:length] + [TokenClass.DECODE] * decoded

    def fill_range(self, *, classes_differ: bool, max_decode: int) -> tuple[int, int, TokenClass]:
        """Return the next positions [first, last) to compute, and their class.

        A stretch has one class; with class PROMPT it stays inside one block, with class DECODE it has at most
        `max_decode` tokens. Where the classes do not differ everything goes in prompt passes, which are larger.
        """
        slot = self.slot
        if slot is None:
            raise ValueError("a waiting session has nothing to fill")
        first, end = slot.length, self.chain.kv_len
        if not classes_differ:
            return first, min(end, _block_end(first)), TokenClass.PROMPT
        token_class = self._class_at(first)
        end = min(end, _block_end(first) if token_class is TokenClass.PROMPT else first + max_decode)
        last = next((at for at in range(first + 1, end) if self._class_at(at) is not token_class), end)
        return first, last, token_class

    def note_arrival(self, message: ProposeMessage, before: int, now_s: float) -> None:
        """Remember when the chain took a proposal: its end was `before` and is further now."""
        if self.chain.chain_end > before and message.epoch == self.chain.epoch:
            self._arrivals.append((self.chain.chain_end, now_s))

    def waited_s(self, position: int, now_s: float) -> float:
        """Return how long the proposal with this position has been here, and forget the ones before it."""
        while self._arrivals and self._arrivals[0][0] <= position:
            self._arrivals.popleft()
        return now_s - self._arrivals[0][1] if self._arrivals else 0.0

    def forget_arrivals(self) -> None:
        """The epoch ended."""
        self._arrivals.clear()

    def _class_at(self, position: int) -> TokenClass:
        return self._classes[position] if position < len(self._classes) else TokenClass.DECODE


def _wants_best_alone(opened: DecodeOpen) -> bool:
    bare = opened.sampling.keeps_likeliest and opened.num_logprobs < 0
    return opened.mode is Mode.GREEDY and bare


def _history(opened: DecodeOpen, grammar: GrammarState | None) -> History | None:
    """Return what a session's rows depend on besides the model; None where there is nothing."""
    if opened.sampling.grammar is not None and grammar is None:
        raise ValueError("a session with a grammar, and no state of it")
    if not opened.sampling.uses_history:
        return None
    prompt, output = opened.token_ids[: opened.prompt_len], opened.token_ids[opened.prompt_len :]
    history = History(prompt if opened.sampling.uses_penalties else (), output)
    history.grammar = grammar
    return history


def effective_classes(opened: DecodeOpen) -> list[TokenClass]:
    """Return the class by which each token of the log was first computed.

    The prompt's last token is an exception to what a log may say: it is fed together with the first run, so its KV
    always comes from a decode pass.
    """
    classes = list(opened.classes)
    if 0 < opened.prompt_len <= len(classes):
        classes[opened.prompt_len - 1] = TokenClass.DECODE
    return classes


def _block_end(position: int) -> int:
    return (position // BLOCK_LEN + 1) * BLOCK_LEN
