"""What each of two ranks does in `test_parallel`: rank 0 decodes and prints; then rank 1 is gone, and it notices."""

import json
import os
import sys
from typing import Any

import torch

from outrider.ids import TokenClass
from outrider.model.names import ModelSpec
from outrider.model.opening import follow, open_model
from outrider.model.parallel import LeadingPasses, Ranks, join
from outrider.model.runner import Feed, ModelRunner, RunnerBroken

PROMPT = tuple(range(5, 95))
BRANCHES = (-1, -1, 0, 1)


def decode(runner: ModelRunner, count: int = 24) -> dict[str, Any]:
    """Read a prompt, decode greedily, share its KV with a second slot, and follow a branch of a tree."""
    classes = [TokenClass.PROMPT] * len(PROMPT)
    slot, other = runner.new_slot(), runner.new_slot()
    runner.forward([Feed(slot, PROMPT[:64], TokenClass.PROMPT, 0)])
    rows = runner.forward([Feed(slot, PROMPT[64:], TokenClass.PROMPT, 1)])[0].logits
    first, tokens = rows[0].tolist(), []
    for _ in range(count):
        tokens.append(int(rows[-1].argmax()))
        rows = runner.forward([Feed(slot, (tokens[-1],), TokenClass.DECODE, 1)])[0].logits
    slot.commit(64)
    other.match(PROMPT, classes)
    other.truncate(40)  # the next feed writes into a block that is shared: it is copied
    copied = runner.forward([Feed(other, PROMPT[40:64], TokenClass.PROMPT, 1)])[0].logits[0].tolist()
    branched = []
    if runner.info.trees:
        runner.forward([Feed(slot, (7, 8, 9, 10), TokenClass.DECODE, 4, parents=BRANCHES)])
        slot.keep((1, 3))
        branched = runner.forward([Feed(slot, (11,), TokenClass.DECODE, 1)])[0].logits[0].tolist()
    return {
        "tokens": tokens, "first": first, "copied": copied, "branched": branched,
        "fingerprint": runner.info.fingerprint, "exactness": runner.info.exactness,
    }  # fmt: skip


def main(folder: str) -> None:
    """Lead or follow."""
    torch.set_num_threads(1)
    ranks = join(2, "cpu", 20.0)
    spec = ModelSpec(folder, "float32", tensor_parallel=2)
    if not ranks.leads:
        _vanish_at_the_end(ranks)
        follow(spec, ranks)
        return
    opened = open_model(spec, num_blocks=8, ranks=ranks)
    assert isinstance(opened.runner.passes, LeadingPasses)  # type: ignore[attr-defined]
    print(json.dumps(decode(opened.runner)), flush=True)
    ranks.dismiss()
    slot = opened.runner.new_slot()
    try:
        for _ in range(3):
            opened.runner.forward([Feed(slot, (1,), TokenClass.DECODE, 1)])
    except RunnerBroken as error:
        print(json.dumps({"broken": str(error)}), flush=True)
        os._exit(1)


def _vanish_at_the_end(ranks: Ranks) -> None:
    """Where rank 1 would be dismissed it dies instead."""
    hear = ranks.hear

    def hear_or_die() -> Any:
        order = hear()
        if type(order).__name__ == "Dismissed":
            os._exit(3)
        return order

    ranks.hear = hear_or_die  # type: ignore[method-assign]


if __name__ == "__main__":
    main(sys.argv[1])
