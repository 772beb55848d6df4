"""Who may exchange KV blocks: engines with the same weights that compute the same bits.

The engine's fingerprint names what is known to decide bits, without the weights. A digest of the weights is added, and
one of the KV that the engine computes of some fixed tokens: two machines that differ in a way nobody thought of do not
exchange anything.
"""

import hashlib
import time
from dataclasses import dataclass

from outrider.errors import FailedPrecondition
from outrider.ids import TokenClass
from outrider.model.runner import BLOCK_LEN, Feed, ModelRunner
from outrider.tier.format import Identity


@dataclass(frozen=True, slots=True)
class Identified:
    """An engine's identity, and what was measured on the way."""

    identity: Identity
    prefill_s: float
    """Seconds of one prompt pass of 64 tokens."""


def identify(runner: ModelRunner, weights: bytes) -> Identified:
    """Find out who a runner is; blocks for a few passes, and leaves nothing in its pool.

    Args:
        runner: Calibrated, and nobody else's at the moment.
        weights: A digest of the weights, or of what else decides a toy's language.

    Raises:
        FailedPrecondition: Its context is shorter than one block.
    """
    info = runner.info
    if info.context_len < BLOCK_LEN:
        raise FailedPrecondition(f"a context of {info.context_len} tokens never fills a KV block of {BLOCK_LEN}")
    ids = tuple((37 * place + 11) % info.vocab_size for place in range(BLOCK_LEN))
    digest = hashlib.blake2b(repr((info.name, info.dtype, info.fingerprint)).encode() + weights, digest_size=16)
    seconds = []
    for token_class in (TokenClass.PROMPT, TokenClass.PROMPT, TokenClass.DECODE):
        started_s = time.perf_counter()
        digest.update(_computed(runner, ids, token_class))
        seconds.append(time.perf_counter() - started_s)
    return Identified(Identity(runner.block_access.layout, digest.digest()), min(seconds[:2]))


def _computed(runner: ModelRunner, ids: tuple[int, ...], token_class: TokenClass) -> bytearray:
    """Return the KV of some tokens."""
    access, slot = runner.block_access, runner.new_slot()
    block = bytearray(access.layout.num_bytes)
    step = BLOCK_LEN if token_class is TokenClass.PROMPT else runner.info.max_rows
    try:
        for first in range(0, BLOCK_LEN, step):
            runner.forward([Feed(slot, ids[first : first + step], token_class, 0)])
        slot.commit(BLOCK_LEN)
        access.read(access.keys(ids, [token_class] * BLOCK_LEN)[0], memoryview(block))
    finally:
        runner.free_slot(slot, forget=True)
    return block
