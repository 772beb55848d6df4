"""A limit on how long Python code may run on a thread that cannot be taken away from it.

Chat templates are programs of others: a loop in one would hold its thread, and a share of every other's time, for as
long as it likes. The interpreter can raise an exception in the midst of another thread's code, between two
instructions; one long instruction, such as the making of a huge string, is not interrupted.
"""

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class TimeIsUp(BaseException):
    """Raised in code that has run too long; no `except Exception` on the way holds it."""


def within(limit_s: float, work: Callable[[], T]) -> T:
    """Run work on this thread, and break it off when it takes too long.

    Args:
        limit_s: seconds it may take, waiting for the interpreter included.
        work: what to run; it holds no lock and has nothing to tidy up.

    Raises:
        TimeIsUp: it took longer.
    """
    thread, deciding, fired, ended = threading.get_ident(), threading.Lock(), threading.Event(), threading.Event()

    def fire() -> None:
        with deciding:
            if not ended.is_set():
                fired.set()
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TimeIsUp))

    alarm = threading.Timer(limit_s, fire)
    alarm.daemon = True
    alarm.start()
    try:
        try:
            return work()
        finally:
            if not isinstance(sys.exception(), TimeIsUp):
                with deciding:
                    ended.set()
                while fired.is_set():  # it is under way, and has to arrive here, not in whatever this thread runs next
                    time.sleep(0.001)
    finally:
        alarm.cancel()
