"""Wall clocks of single processes that can be made to jump, by libfaketime in front of the C library.

A process reads the offset of its clock from a file, at most a second late. Its monotonic clock goes on untouched, as at
a step of the system's clock. Replacing Python's `time.time` instead would set it apart from the clock that gRPC reads
in the same process, which no machine does.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

NOTICED_S = 1.2
"""How long a process may take to read its file again."""
DEBIANS = "/usr/lib/*/faketime/libfaketime.so.1"


def find_library() -> Path | None:
    """Return the library: the one in the `libfaketime` wheel, else Debian's; None if there is neither."""
    spec = find_spec("libfaketime")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    bundled = [path for folder in folders for path in Path(folder).rglob("libfaketime.so.1")]
    found = bundled or list(Path("/").glob(DEBIANS.lstrip("/")))
    return found[0] if found else None


class Clock:
    """The wall clock of one process."""

    def __init__(self, path: Path, library: Path | None) -> None:
        """Set it right.

        Args:
            path: the file that the process reads.
            library: what makes it do so; None leaves the process with the machine's clock.
        """
        self._path, self._library = path, library
        self.jump(0)

    def jump(self, seconds: float) -> None:
        """Let the clock show the time so many seconds from now; 0 sets it right again."""
        fresh = self._path.with_suffix(".new")
        fresh.write_text(f"{seconds:+.0f}")
        fresh.replace(self._path)

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables of the process."""
        if self._library is None:
            return {}
        return {
            "LD_PRELOAD": str(self._library),
            "FAKETIME_TIMESTAMP_FILE": str(self._path),
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            # Waits on a faked monotonic clock need it; this one is not faked, and each would cost a hundred times more.
            "FAKETIME_FORCE_MONOTONIC_FIX": "0",
        }
