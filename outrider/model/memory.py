"""How large a pool of KV may be: a number of bytes, or a share of the memory that is free once the model is loaded."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from outrider.errors import FailedPrecondition

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class KvBudget:
    """Memory for a pool of KV; exactly one of the two is not 0."""

    num_bytes: int = 0
    share: float = 0.0
    """Fraction of the free memory, in (0, 1]."""

    def num_blocks(self, block_bytes: int, device: torch.device) -> int:
        """Return how many blocks there is room for.

        Args:
            block_bytes: Memory of one block.
            device: Where the pool will be.

        Raises:
            FailedPrecondition: Not even one.
        """
        num_bytes = self.num_bytes or int(self.share * free_bytes(device))
        if num_bytes < block_bytes:
            raise FailedPrecondition(f"a KV budget of {num_bytes} bytes has no room for one block of {block_bytes}")
        return num_bytes // block_bytes


def parse_budget(text: str) -> KvBudget:
    """Read a budget such as "2GiB", "500 MB" or "40%".

    Raises:
        ValueError: It is neither a positive size nor a share of at most 100%.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*|%)\s*", text)
    if match is None or float(match[1]) <= 0 or (match[2] != "%" and match[2].upper() not in _UNITS):
        raise ValueError(f'{text!r} is neither a size such as "2GiB" nor a share of free memory such as "40%"')
    number = float(match[1])
    if match[2] != "%":
        return KvBudget(num_bytes=int(number * _UNITS[match[2].upper()]))
    if number > 100:
        raise ValueError(f"{text!r} is more than all free memory")
    return KvBudget(share=number / 100)


def free_bytes(device: torch.device) -> int:
    """Return how much memory a process could still take on a device; for the CPU within its control group's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(_free_on_machine(), _free_in_group())


def _free_on_machine() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
        if found:
            return int(found[1]) << 10
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _free_in_group() -> int:
    """Return what the control group (version 2) leaves; more than any machine has where there is no limit."""
    try:
        limit, used = ((_CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return 1 << 62
    return 1 << 62 if limit == "max" else max(0, int(limit) - int(used))
