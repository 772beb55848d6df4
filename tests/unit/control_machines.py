"""What things take on machines of simulated sessions, as measured (`benchmarks/results/passes.md`) or made up."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Machine:
    """What things take."""

    steps_s: tuple[tuple[int, float], ...]
    """Seconds of a pass of one session, by rows that it is padded to."""
    session_s: float
    """Seconds for every further session."""
    draft_s: float
    """Seconds per draft token."""
    hop_s: float
    """Seconds from one process to another."""
    message_s: float = 0.0
    """Seconds that a proposal takes of a verifier between its passes."""
    drafted: float = 1.0
    """Times as long as otherwise that a pass takes beside a draft worker that is never idle, and shares the memory."""

    def pass_s(self, rows: int, sessions: int) -> float:
        return next(seconds for size, seconds in self.steps_s if rows <= size) + self.session_s * (sessions - 1)


CPU_STEPS = ((1, 0.0173), (2, 0.0175), (4, 0.0191), (8, 0.0243), (16, 0.0335), (32, 0.0543))
LOOKUP_ON_CPU = Machine(CPU_STEPS, 0.00065, 0.0, 0.00105)
TRAINED_ON_CPU = Machine(CPU_STEPS, 0.00065, 0.0025, 0.00105)
BUSY = Machine(CPU_STEPS, 0.00065, 0.0025, 0.00105, 0.0015)
ONE_MEMORY = Machine(CPU_STEPS, 0.00065, 0.0025, 0.00105, drafted=1.25)
QUICK = Machine(CPU_STEPS, 0.00065, 0.0008, 0.00105, drafted=1.05)
GPU = Machine(((1, 0.030), (8, 0.0305), (16, 0.031), (32, 0.032)), 0.00002, 0.002, 0.0005)
SLOW_DRAFTER = Machine(((1, 0.030), (4, 0.0305), (8, 0.031), (16, 0.0315), (32, 0.032)), 0.0002, 0.006, 0.002)
"""Of a GPU: a fifth of a pass for every token."""
FAR = Machine(((32, 0.016),), 0.0, 0.0013, 0.004)
