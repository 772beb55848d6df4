"""Tokens per round with trees and with runs: the same drafter, the same texts, passes of as many rows.

    python -m benchmarks.trees [--prompts 18] [--tokens 96] [--rejection 6]

Greedy and seeded texts do not depend on the drafter, so they are made once, and rounds are replayed on them: of each
token it is noted which choice of the draft it would have been. Rejection mode is played, with the engine's passes and
rules. Shapes come from every other prompt, figures from those between. There are nine kinds of prompts, which take
turns: eighteen have one of each kind on both sides.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.drafts import LAYER_SUBSET
from benchmarks.machine import facts
from benchmarks.prompt_set import load_prompts
from benchmarks.results import facts_list, table, write
from draft_service.drafters.causal_lm import CausalLm
from draft_service.drafters.protocol import DraftSession, Guessed, Work
from outrider.generation import TextPrompt
from outrider.ids import Epoch, Generation, Mode, SessionId, TokenClass
from outrider.messages import SamplingParams
from outrider.model.names import DEFAULT_MODEL, ModelSpec, locate
from outrider.model.opening import OpenedModel, open_model
from outrider.model.runner import Feed, KvSlot, ModelRunner, prefill_plan
from outrider.noise import Purpose, derive_key, gumbel_field, seed_key
from outrider.prompts import Prompt
from outrider.sampling import probabilities
from outrider.shape import Shape, best_tree, chain
from outrider.verification import KeyedDraws, Tree, TreeJudgement, judge_tree, rule_for

NODES = (3, 5, 7, 11, 15, 23, 31)
RANKS, DEPTHS = 8, 12
PLAYED_NODES = 7
"""In rejection mode."""
WARM = SamplingParams(temperature=0.7)
KEY = seed_key(11)
FIELD = derive_key(KEY, Purpose.FIELD)
SESSION = SessionId("tree")


@dataclass(slots=True)
class Text:
    """A prompt's ids and what the target says behind them."""

    ids: list[int]
    prompt_len: int


def scores(rows: Tensor, positions: Sequence[int], vocab_len: int, *, warm: bool) -> Tensor:
    """Return what tokens are chosen by, the largest first: logits, or ln p + G of the noise field."""
    if not warm:
        return rows[:, :vocab_len]
    noise = torch.stack([torch.from_numpy(gumbel_field(FIELD, 0, position, vocab_len)) for position in positions])
    return probabilities(rows, WARM, vocab_len).double().log() + noise


def prefilled(runner: ModelRunner, ids: Sequence[int]) -> KvSlot:
    """Return a slot with the KV of some ids."""
    slot = runner.new_slot()
    for first, last in prefill_plan(0, len(ids)):
        runner.forward([Feed(slot, tuple(ids[first:last]), TokenClass.PROMPT, 0)])
    return slot


def say(target: OpenedModel, prompts: Sequence[list[int]], num_tokens: int, *, warm: bool) -> list[Text]:
    """Let the target continue all prompts side by side."""
    texts = [Text(list(ids), len(ids)) for ids in prompts]
    slots = [prefilled(target.runner, text.ids[:-1]) for text in texts]
    for _ in range(num_tokens):
        feeds = [Feed(slot, (text.ids[-1],), TokenClass.DECODE, 1) for slot, text in zip(slots, texts, strict=True)]
        for text, rows in zip(texts, target.runner.forward(feeds), strict=True):
            own = scores(rows.logits, [len(text.ids)], target.vocabulary.size, warm=warm)
            text.ids.append(int(own[0].argmax()))
    for slot in slots:
        target.runner.free_slot(slot, forget=True)
    return texts


def ranks_of(draft: OpenedModel, text: Text, *, warm: bool) -> list[int]:
    """Return of each token behind the prompt how many others the draft would rather have said."""
    slot, ranks = draft.runner.new_slot(), list[int]()
    for first, last in prefill_plan(0, len(text.ids) - 1):
        wanted = max(0, min(last - first, last - text.prompt_len + 1))
        feed = Feed(slot, tuple(text.ids[first:last]), TokenClass.PROMPT, wanted)
        rows = draft.runner.forward([feed])[0].logits
        positions = range(last - wanted + 1, last + 1)
        if wanted:
            own = scores(rows, positions, draft.vocabulary.size, warm=warm)
            said = own.gather(1, torch.tensor([[text.ids[position]] for position in positions]))
            ranks += (own > said).sum(1).tolist()
    draft.runner.free_slot(slot, forget=True)
    return ranks


def rates_of(all_ranks: Sequence[Sequence[int]]) -> list[list[float]]:
    """Return the rate of each depth and rank, over rounds that could begin anywhere."""
    seen, taken = [0] * DEPTHS, [[0] * RANKS for _ in range(DEPTHS)]
    for ranks in all_ranks:
        for start in range(len(ranks)):
            for depth, rank in enumerate(ranks[start : start + DEPTHS]):
                seen[depth] += 1
                if rank >= RANKS:
                    break
                taken[depth][rank] += 1
    return [[hits / max(1, tried) for hits in own] for own, tried in zip(taken, seen, strict=True)]


def replayed(all_ranks: Sequence[Sequence[int]], shape: Shape) -> float:
    """Return tokens per round."""
    families = Tree((0,) * len(shape.parents), shape.parents).families
    num_rounds = 0
    for ranks in all_ranks:
        position = 0
        while position < len(ranks):
            node = -1
            while position < len(ranks) and ranks[position] < len(families.get(node, ())):
                node, position = families[node][ranks[position]], position + 1
            position, num_rounds = position + 1, num_rounds + 1
    return sum(map(len, all_ranks)) / num_rounds


def played(
    target: OpenedModel, draft: OpenedModel, prompts: Sequence[list[int]], shape: Shape | None, tokens: int
) -> float:
    """Return tokens per round in rejection mode, by the engine's passes and rules.

    Args:
        target: what verifies.
        draft: what drafts.
        prompts: what is continued.
        shape: of all trees; None lets the drafter choose, with as many nodes, and learn as it does in service.
        tokens: of each continuation.
    """
    num_rounds, num_tokens, rounds = 0, 0, count()
    drafter = CausalLm(draft.runner, vocab_len=draft.vocabulary.size, tree_nodes=PLAYED_NODES)
    rule, vocab_len = rule_for(Mode.REJECTION), target.vocabulary.size
    for prompt in prompts:
        ids, slot = list(prompt), prefilled(target.runner, prompt[:-1])
        described = DraftSession(SESSION, Mode.REJECTION, WARM, derive_key(KEY, Purpose.DRAFT), len(ids))
        drafter.open(described, ids)
        while len(ids) < len(prompt) + tokens:
            epoch = Epoch(Generation(), next(rounds))
            tree = _grown(drafter, ids, epoch, shape)
            fed = Tree((ids[-1], *tree.token_ids), (-1, *(parent + 1 for parent in tree.parents)))
            feed = Feed(slot, fed.token_ids, TokenClass.DECODE, len(fed), parents=fed.parents)
            logits = target.runner.forward([feed])[0].logits
            law = {
                node: probabilities(logits[node + 1 : node + 2], WARM, vocab_len)[0] for node in range(-1, len(tree))
            }
            found = judge_tree(tree, rule, law.__getitem__, len(ids), KeyedDraws(KEY, epoch))
            drafter.learn(SESSION, followed(tree, found))
            slot.keep((0, *(node + 1 for node in found.path)))
            ids += [*tree.tokens(found.path), found.drawn]
            num_rounds, num_tokens = num_rounds + 1, num_tokens + len(found.path) + 1
        drafter.close(SESSION, keep=False)
        target.runner.free_slot(slot, forget=True)
    return num_tokens / num_rounds


def followed(tree: Tree, found: TreeJudgement) -> list[tuple[int, int]]:
    """Return what a draft worker learns of a verdict."""
    reached = [tree.families[node] for node in (-1, *found.path) if node in tree.families]
    taken = [*found.path, None][: len(reached)]
    return [(len(own), -1 if node is None else own.index(node)) for own, node in zip(reached, taken, strict=True)]


def _grown(drafter: CausalLm, ids: list[int], epoch: Epoch, shape: Shape | None) -> Tree:
    """Draw a tree."""
    while (plan := drafter.plan(SESSION, ids, PLAYED_NODES)) is None:
        drafter.draw([Work(SESSION, epoch, ids, 0)])
    parents = plan.parents if shape is None else shape.parents
    while True:
        [outcome] = drafter.draw([Work(SESSION, epoch, ids, len(parents), parents)])
        if not isinstance(outcome, Guessed):
            raise outcome.error
        if outcome.token_ids:
            return Tree(outcome.token_ids, parents, outcome.rows)


def tokenized(prompts: Sequence[Prompt]) -> list[list[int]]:
    """Return the ids of prompts, as an orchestrator makes them."""
    tokenizer = AutoTokenizer.from_pretrained(locate(DEFAULT_MODEL, lambda _stage, _part: None))
    found: list[list[int]] = []
    for each in prompts:
        prompt = each.asked
        if isinstance(prompt, TextPrompt):
            found.append(list(tokenizer.encode(prompt.text)))
            continue
        said = [{"role": message.role, "content": message.content} for message in prompt.messages]
        made = cast(Any, tokenizer).apply_chat_template(said, add_generation_prompt=True)
        found.append(list(made["input_ids"]))
    return [ids for ids in found if len(ids) < 400]


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=18)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rejection", type=int, default=6, help="prompts that are played in rejection mode; 0: none")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    machine = facts()
    target = open_model(ModelSpec(DEFAULT_MODEL, "bfloat16"), num_blocks=512)
    draft = open_model(ModelSpec(DEFAULT_MODEL, "bfloat16", LAYER_SUBSET), num_blocks=64)
    prompts = tokenized(load_prompts()[: asked.prompts])
    rows, data = list[list[object]](), dict[str, object]()
    for mode, warm in (("greedy", False), ("seeded, temperature .7", True)):
        ranks = [ranks_of(draft, text, warm=warm) for text in say(target, prompts, asked.tokens, warm=warm)]
        rates = rates_of(ranks[0::2])
        data[mode] = {"rates": rates}
        for nodes in NODES:
            shape = best_tree(rates, nodes)
            run, tree = replayed(ranks[1::2], chain(nodes)), replayed(ranks[1::2], shape)
            levels = "-".join(str(len(level)) for level in shape.levels)
            rows.append([mode, nodes + 1, f"{run:.2f}", f"{tree:.2f}", f"{tree / run:.2f}", levels])
            print(rows[-1], flush=True)
        if warm and asked.rejection:
            chosen = prompts[: asked.rejection]
            run, tree = (played(target, draft, chosen, each, asked.tokens // 2) for each in (chain(PLAYED_NODES), None))
            ratio = f"{tree / run:.2f}"
            rows.append(["rejection, temperature .7", PLAYED_NODES + 1, f"{run:.2f}", f"{tree:.2f}", ratio, "learnt"])
            print(rows[-1], flush=True)
    header = ["mode", "rows", "run", "tree", "ratio", "nodes by depth"]
    about = (
        f"Tokens per round; {len(prompts)} prompts, {asked.tokens} tokens of each. The draft: 20 layers of the target."
    )
    page = f"# Trees against runs\n\n{about}\n\n{table(header, rows)}\n\n{facts_list(machine)}\n"
    write("trees", {"machine": machine, "table": [header, *rows], **data}, page)


if __name__ == "__main__":
    main()
