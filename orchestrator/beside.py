"""What shared passes take of a verifier beside the model: its messages, by sessions and by those drafted for. Pure.

A verifier answers every session after every pass, and takes in what drafters send. With few sessions that is little
beside the model's time; with many it decides whether drafting pays. Nobody reports it: sessions see the time from one
pass to the next, which is the model's, `per_session` for each session, and `per_draft` more for each that is drafted
for. Both are fitted by least squares in which older times count less and less.
"""

FORGET = 0.998
"""Weight of what is known at each further observation; a pass brings one for each of its sessions."""
LITTLE = 1e-3
"""By how much small numbers are preferred (ridge regression): of all that fit, the smallest."""


class Beside:
    """The fit."""

    def __init__(self) -> None:
        """Know nothing: passes take the model's time."""
        self._sessions = self._both = self._drafts = 0.0
        """Sums of sessions squared, sessions times drafts, drafts squared."""
        self._of_sessions = self._of_drafts = 0.0
        """Sums of seconds times each."""

    def observe(self, num_sessions: int, num_drafts: int, seconds: float) -> None:
        """Take the seconds beside the model from one pass to the next.

        Args:
            num_sessions: in both passes.
            num_drafts: of them, those that are drafted for.
            seconds: >= 0.
        """
        self._sessions = FORGET * self._sessions + num_sessions * num_sessions
        self._both = FORGET * self._both + num_sessions * num_drafts
        self._drafts = FORGET * self._drafts + num_drafts * num_drafts
        self._of_sessions = FORGET * self._of_sessions + num_sessions * seconds
        self._of_drafts = FORGET * self._of_drafts + num_drafts * seconds

    @property
    def costs(self) -> tuple[float, float]:
        """Seconds (per session, more per session that is drafted for), each >= 0.

        As long as all are drafted for, what both take cannot be told apart, and is taken to be the same.
        """
        little = LITTLE * (self._sessions + self._drafts)
        if not little:
            return 0.0, 0.0
        sessions, drafts = self._sessions + little, self._drafts + little
        per_session = drafts * self._of_sessions - self._both * self._of_drafts
        per_draft = sessions * self._of_drafts - self._both * self._of_sessions
        if per_draft <= 0.0:
            return self._of_sessions / sessions, 0.0
        if per_session <= 0.0:
            return 0.0, self._of_drafts / drafts
        determinant = sessions * drafts - self._both**2
        return per_session / determinant, per_draft / determinant
