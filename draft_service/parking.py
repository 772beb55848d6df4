"""Features that came before their session: streams are not ordered between each other."""

from collections import deque
from dataclasses import dataclass, field

from draft_service.session import SessionKey
from outrider.messages import TargetFeatures

MAX_BYTES = 32 << 20
"""Kept at most, of all sessions; more is dropped."""
PARKED_S = 2.0
"""How long a message waits for its session."""


@dataclass(frozen=True, slots=True)
class Heard:
    """Features, and the verifier that they came from."""

    verifier_address: str
    features: TargetFeatures

    @property
    def key(self) -> SessionKey:
        """The opening of the session that they are for."""
        return SessionKey(self.features.session_id, self.features.epoch.generation)


@dataclass(slots=True)
class Parking:
    """What waits, the oldest first."""

    _waiting: deque[tuple[float, Heard]] = field(default_factory=deque)
    _num_bytes: int = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, heard: Heard, now_s: float) -> bool:
        """Keep a message for a while; False if there is no room."""
        self._expire(now_s)
        size = len(heard.features.features.data)
        if self._num_bytes + size > MAX_BYTES:
            return False
        self._num_bytes += size
        self._waiting.append((now_s, heard))
        return True

    def take(self, key: SessionKey, now_s: float) -> list[Heard]:
        """Return, and forget, what waited for an opening, in the order it came; what is for older ones goes too."""
        self._expire(now_s)
        found = [heard for _, heard in self._waiting if heard.key == key]
        kept = [(at, heard) for at, heard in self._waiting if heard.key.session_id != key.session_id or heard.key > key]
        if len(kept) < len(self._waiting):
            self._waiting = deque(kept)
            self._num_bytes = sum(len(heard.features.features.data) for _, heard in kept)
        return found

    def _expire(self, now_s: float) -> None:
        while self._waiting and now_s - self._waiting[0][0] >= PARKED_S:
            _, heard = self._waiting.popleft()
            self._num_bytes -= len(heard.features.features.data)
