"""Mends the one damage that Redis and Valkey do to their own append-only file.

When a write of it comes up short, as on a full disk, the server cuts off what was written and writes the whole again
later. In a file that a rewrite began, it is not open for appending, so the second write goes to where the first one
ended, and zeros fill the place of what was cut off (seen with Redis 7.0 and Valkey 9.1). Nothing is missing, but no
server loads such a file, and the servers' own tool cuts it off at the zeros. Here the zeros alone are taken out.
"""

import mmap
import os
import shutil
from pathlib import Path

KEPT = ".with-holes"
"""Ending of the name under which the file is kept as it was."""


def close_holes(data_dir: Path) -> bool:
    """Take the zeros between commands out of the files that are appended to; blocks, for long with large ones.

    Nothing else may have the folder open. A file with any other damage stays as it is.

    Args:
        data_dir: The server's data folder.

    Returns:
        Whether there were any.

    Raises:
        OSError: A file cannot be read or written, for one because the disk is full.
    """
    closed = [_close(path) for path in sorted(data_dir.glob("*/*.incr.aof")) if path.stat().st_size]
    return any(closed)


def _close(path: Path) -> bool:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        holes = _holes(data)
        if not holes:
            return False
        mended = path.with_name(path.name + ".part")
        with mended.open("wb") as out:
            begin = 0
            for start, end in [*holes, (len(data), len(data))]:
                out.write(data[begin:start])
                begin = end
            out.flush()
            os.fsync(out.fileno())
    shutil.copystat(path, mended)
    path.replace(path.with_name(path.name + KEPT))
    mended.replace(path)
    return True


def _holes(data: mmap.mmap) -> list[tuple[int, int]]:
    """Return where zeros stand between two commands; nothing if the file has another damage before its end."""
    holes, place = [], 0
    try:
        while place < len(data):
            start = place
            while place < len(data) and data[place] == 0:
                place += 1
            if place > start:
                holes.append((start, place))
            place = _behind_command(data, place) if place < len(data) else place
    except EOFError:
        pass  # cut off in mid-command at its end, which servers load
    except ValueError:
        return []
    return holes


def _behind_command(data: mmap.mmap, place: int) -> int:
    """Return where the next command begins.

    Raises:
        ValueError: There is no command here.
        EOFError: It is cut off.
    """
    if data[place : place + 1] == b"#":
        return _line(data, place, b"#")[1]
    number, place = _line(data, place, b"*")
    for _ in range(int(number)):
        length, place = _line(data, place, b"$")
        place += int(length) + 2
        if place > len(data):
            raise EOFError
        if data[place - 2 : place] != b"\r\n":
            raise ValueError("no end of an argument")
    return place


def _line(data: mmap.mmap, place: int, mark: bytes) -> tuple[bytes, int]:
    """Return the line at a place without its mark, and where the next one begins."""
    if data[place : place + 1] not in (mark, b""):
        raise ValueError("not a line of this kind")
    end = data.find(b"\r\n", place)
    if end < 0:
        raise EOFError
    return data[place + 1 : end], end + 2
