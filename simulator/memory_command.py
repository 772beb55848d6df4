"""`outrider simulate memory`: what two models and their KV take."""

from dataclasses import dataclass

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from outrider.cli.ranges import check_range
from simulator.memory import GIB, Shape, needs, sessions_that_fit, shape_of
from simulator.setting import MOST_SESSIONS

MOST_CONTEXT = 1 << 24
console = Console(highlight=False, width=160)


@Parameter(name="*")
@dataclass(frozen=True)
class Sizes:
    """What is to be held."""

    target: str = "8.03,32,8,128"
    """Billions of parameters, layers, key-value heads, head width."""
    draft: str = "1.24,16,8,64"
    """The same of the draft."""
    dtype: str = "bfloat16"
    """Of weights and KV: bfloat16, float16 or float32."""
    sessions: int = 64
    """That a verifier holds at once."""
    draft_sessions: int = 0
    """That a draft worker holds at once; 0: as many as the verifier."""
    context: int = 4096
    """Most tokens of a session."""
    ranks: int = 1
    """Processes that share the target."""
    device_gib: float = 80.0
    """Memory of one device."""

    def check(self) -> None:
        """Check ranges.

        Raises:
            InvalidRequest: a figure is out of its range.
        """
        check_range("sessions", self.sessions, 1, MOST_SESSIONS)
        check_range("draft_sessions", self.draft_sessions, 0, MOST_SESSIONS)
        check_range("context", self.context, 1, MOST_CONTEXT)
        check_range("device_gib", self.device_gib, 0.01, 1e6)


SIZES = Sizes()


def memory(*, sizes: Sizes = SIZES) -> None:
    """Say what two models and their KV take, and how many sessions fit.

    Args:
        sizes: What is to be held.
    """
    sizes.check()
    verifier = "verifier" if sizes.ranks == 1 else f"verifier, each of {sizes.ranks} ranks"
    shown = Table(box=None, pad_edge=False)
    shown.add_column("")
    for name in ("weights GiB", "KV KiB per token", "KV GiB", "together GiB", f"sessions in {sizes.device_gib:g} GiB"):
        shown.add_column(name, justify="right")
    target, draft = shape_of("target", sizes.target, sizes.dtype), shape_of("draft", sizes.draft, sizes.dtype)
    shown.add_row(verifier, *_cells(target, sizes, sizes.sessions, sizes.ranks))
    shown.add_row("draft worker", *_cells(draft, sizes, sizes.draft_sessions or sizes.sessions, 1))
    console.print(shown)


def _cells(shape: Shape, sizes: Sizes, sessions: int, ranks: int) -> tuple[str, ...]:
    need = needs(shape, sessions, sizes.context, ranks)
    fits = sessions_that_fit(shape, sizes.context, sizes.device_gib * GIB, ranks)
    amounts = (need.weight_bytes / GIB, shape.token_bytes / 1024, need.kv_bytes / GIB, need.total_bytes / GIB)
    return (*(f"{amount:.1f}" for amount in amounts), str(fits))
