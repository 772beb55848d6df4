"""Runs passes: anew each time, or, per shape, as a recording over buffers that stay where they are.

A GPU spends longer on being told of a pass's hundreds of small operations than on doing them. A recorded pass is told
once: its numbers lie in a buffer that never moves, the operations are captured as one CUDA graph that reads it, and
from then on a pass is one copy and one launch. Where there is no GPU the same buffers are used and the operations are
run instead of replayed, which is how everything but the capture itself is tested.

The capture has not run on a GPU yet: `benchmarks/gpu_check.py` is what to run first where there is one.
"""

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from outrider.model.attention import Workspace
from outrider.model.decoders import Decoder, PassOutput
from outrider.model.kv import KvCache
from outrider.model.planning import PassShape, read

MAX_RECORDINGS = 96
"""Shapes that are recorded; passes of others run anew. Each recording holds its output and a graph."""

Work = Callable[[], PassOutput | None]
"""A pass over buffers that are the same at every call."""


class Passes(Protocol):
    """Runs passes; what it returns is valid until its next call."""

    def run(self, shape: PassShape, numbers: list[int]) -> PassOutput | None:
        """Run a pass; None if it keeps no rows. Blocks, on a GPU only until the work is queued."""
        ...


class AnewPasses:
    """Runs each pass operation by operation."""

    def __init__(self, decoder: Decoder, kv: KvCache, device: torch.device) -> None:
        self._decoder = decoder
        self._kv = kv
        self._device = device
        self._workspace = Workspace()

    def run(self, shape: PassShape, numbers: list[int]) -> PassOutput | None:
        """Run a pass."""
        on_device = torch.tensor(numbers, dtype=torch.int64).to(self._device)
        return self._decoder.run(read(shape, on_device, self._kv, self._workspace))


class Recorder(Protocol):
    """Turns work into a recording of it."""

    def record(self, work: Work) -> Work:
        """Return work that does the same over the same buffers, and returns the same tensors at every call."""
        ...


class PlainRecorder:
    """Runs the work again at every call; for devices without graphs."""

    def record(self, work: Work) -> Work:
        """Keep the memory of the first output, as a graph does, and fill it at every call."""
        kept = work()

        def replay() -> PassOutput | None:
            fresh = work()
            if kept is not None and fresh is not None:
                kept.logits.copy_(fresh.logits)
                kept.hidden.copy_(fresh.hidden)
            return kept

        return replay


class GraphRecorder:
    """Captures work as a CUDA graph; all graphs share one pool of memory, because one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def record(self, work: Work) -> Work:
        """Run the work twice to let libraries choose their kernels and memory, then capture it."""
        side = cast(Any, torch.cuda).Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(2):
                work()
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = work()
        self._pool = self._pool or graph.pool()

        def replay() -> PassOutput | None:
            graph.replay()
            return output

        return replay


class RecordedPasses:
    """Runs passes from recordings; the first pass of a shape makes its recording."""

    def __init__(self, decoder: Decoder, kv: KvCache, device: torch.device, recorder: Recorder | None = None) -> None:
        """Make a runner without recordings.

        Args:
            decoder: The model.
            kv: The pool.
            device: Where both are.
            recorder: How passes are recorded; None takes graphs on a GPU.
        """
        self._decoder = decoder
        self._kv = kv
        self._device = device
        self._recorder = recorder or (GraphRecorder(device) if device.type == "cuda" else PlainRecorder())
        self.anew = AnewPasses(decoder, kv, device)
        self._recordings: dict[PassShape, tuple[Tensor, Work]] = {}

    @property
    def num_recordings(self) -> int:
        """Shapes recorded so far."""
        return len(self._recordings)

    def run(self, shape: PassShape, numbers: list[int]) -> PassOutput | None:
        """Run a pass: fill the shape's buffer, replay."""
        known = self._recordings.get(shape)
        if known is None:
            if len(self._recordings) >= MAX_RECORDINGS:
                return self.anew.run(shape, numbers)
            known = self._recordings[shape] = self._record(shape, numbers)
        buffer, replay = known
        # From ordinary memory: the call returns when the numbers have been read, so that they may go at once.
        buffer.copy_(torch.tensor(numbers, dtype=torch.int64))
        return replay()

    def _record(self, shape: PassShape, numbers: list[int]) -> tuple[Tensor, Work]:
        """Record a shape with the numbers of its first pass: what is written meanwhile is what that pass writes."""
        buffer = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        workspace = Workspace()

        def work() -> PassOutput | None:
            return self._decoder.run(read(shape, buffer, self._kv, workspace))

        return buffer, self._recorder.record(work)
