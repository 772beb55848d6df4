"""Command lines of child processes that end with the process that started them, however that ends."""

import os
import sys

# Between fork and exec Python code is unsafe under threads, so a small interpreter of its own asks the kernel for
# SIGTERM at the starter's death and then becomes the program. The parent may be dead by then: hence the comparison.
_LAUNCHER = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


def ending_with_us(command: list[str]) -> list[str]:
    """Return a command that runs `command` and, on Linux, is ended when the thread that starts it ends.

    Args:
        command: program, looked up on PATH, and arguments.
    """
    return [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command]
