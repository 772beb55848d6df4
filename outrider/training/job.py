"""One training from beginning to end: texts, hidden states, steps, checkpoint, report; every stage can be resumed.

Everything is in one folder:

    data/        texts the target wrote
    cache/       hidden states and laws; may be removed when the training is over
    state.pt     where the training stands
    draft/       the draft, for a draft worker
    report.html
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from outrider.drafting.checkpoint import Draft, Origin, embedding_mean
from outrider.drafting.checkpoint import load as load_draft
from outrider.drafting.feature import FeatureDraft
from outrider.errors import FailedPrecondition, InvalidRequest
from outrider.model.loader import load
from outrider.model.memory import free_bytes
from outrider.model.names import ModelSpec
from outrider.model.vocabulary import vocabulary
from outrider.prompts import read_prompts
from outrider.report.page import save as save_page
from outrider.training.batches import assemble
from outrider.training.cache import Cache, CacheKey, fill
from outrider.training.kinds.feature import FeatureTrainee, fit_join
from outrider.training.kinds.medusa import MedusaTrainee, fit_heads
from outrider.training.kinds.protocol import Target, Trainee, likeliest_ids
from outrider.training.kinds.small_lm import SmallLmTrainee
from outrider.training.report import report
from outrider.training.state import Schedule, State
from outrider.training.texts import Split, Texts, read_texts, split
from outrider.training.trainer import Material, Trainer
from outrider.training.writing import Wish, written

Kind = Literal["feature", "medusa", "small-lm"]
FITTED_TEXTS = 48
"""Texts that a draft's first layer is fitted on."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is wanted."""

    target: ModelSpec
    kind: Kind
    folder: Path
    prompts: Path | None = None
    """File of prompts; None: the target asks itself."""
    data: Path | None = None
    """File of texts; None: the target writes some."""
    wish: Wish = field(default_factory=Wish)
    """What the target writes."""
    max_len: int = 512
    """Most tokens of a text."""
    disk_limit: int = 20 << 30
    """Most bytes of the cache."""
    draft_vocab: int = 7680
    """Ids of the head, the likeliest; not for small models, which know all."""
    depth: int = 3
    """Steps of a chain that are trained; of Medusa heads, how many there are."""
    intermediate: int = 0
    """Width of a feature draft's MLP; 0: the target's."""
    layers: int = 2
    """Of a small model."""
    hidden: int = 256
    """Width of a small model, a multiple of 64."""
    start: Path | None = None
    """Folder of a feature draft or Medusa heads whose weights, sizes and ids are gone on from; None: begin anew."""
    resume: bool = False
    """Whether the folder has a training that is to go on."""


class Watch:
    """Is told how a training goes; does nothing, to be overridden."""

    def stage(self, name: str, total: int) -> None:
        """A stage begins; `total` is 0 where it is not known."""

    def done(self, amount: int) -> None:
        """So much of the stage's total is done."""

    def step(self, state: State) -> bool:
        """Take note of a step; true ends the training early."""
        del state
        return False


def train(plan: Plan, schedule: Schedule, watch: Watch) -> tuple[State, bool]:
    """Train a draft; blocks for as long as the schedule says, and for texts and hidden states before.

    Args:
        plan: What is wanted.
        schedule: How it is trained.
        watch: Is told how it goes.

    Returns:
        Where it ended, and whether that is the end; otherwise it can be taken up again.

    Raises:
        InvalidRequest: An option or a file is not as it must be.
        FailedPrecondition: There is no room, or the folder has another training.
    """
    check_folder(plan)
    watch.stage("loading the target", 0)
    model, tokenizer = load(plan.target)
    target = Target(plan.target.label, model, tokenizer, vocabulary(tokenizer))
    texts = _texts(plan, target, watch)
    parts = split(texts, schedule.seed)
    begun = _begun(plan, target)
    trainee = _trainee(plan, target, texts, parts, schedule) if begun is None else _going_on(plan, target, begun)
    check_memory(trainee, schedule)
    cache = _cache(plan, target, texts, trainee, watch)
    if not plan.resume and begun is None:
        _start(trainee, target, cache, texts, parts)
    trainer = Trainer(trainee, Material(texts, parts, cache), schedule, plan.folder)
    watch.stage("training", trainer.state.total_steps)
    finished = trainer.run(lambda state, _: watch.step(state))
    _save(plan, schedule, target, texts, trainer)
    return trainer.state, finished


def check_folder(plan: Plan) -> None:
    """Refuse to mix two trainings in one folder.

    Raises:
        FailedPrecondition: There is one and it is not to go on, or the other way round.
    """
    there = (plan.folder / "state.pt").exists()
    if there and not plan.resume:
        raise FailedPrecondition(f"{plan.folder} holds a training: go on with --resume, or choose another --out")
    if plan.resume and not there:
        raise FailedPrecondition(f"{plan.folder} holds no training that could be resumed")
    try:
        plan.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequest("out", str(plan.folder), f"a folder that can be written ({error.strerror})") from error


def check_memory(trainee: Trainee, schedule: Schedule) -> int:
    """Return about how many bytes the steps take beside the target.

    Raises:
        FailedPrecondition: There are not as many.
    """
    weights, (ids, width) = sum(weight.numel() for weight in trainee.net.parameters()), trainee.head.shape
    # Weights, gradients and two moments in float32, and a copy for products; three copies of every row's law.
    needed = weights * 18 + schedule.batch_tokens * trainee.depth * (ids * 12 + width * 64)
    device = trainee.head.device
    if needed > free_bytes(device):
        raise FailedPrecondition(
            f"a step takes about {needed / 2**30:.1f} GiB of memory, {free_bytes(device) / 2**30:.1f} GiB are free: "
            "lower --batch-tokens, --depth or --draft-vocab"
        )
    return needed


def _texts(plan: Plan, target: Target, watch: Watch) -> Texts:
    """Read the texts, or have them written."""
    vocab_size = len(target.embedding)
    if plan.data is not None:
        return read_texts(plan.data, vocab_size, plan.max_len)
    prompts = read_prompts(plan.prompts) if plan.prompts is not None else []
    watch.stage("the target writes texts", plan.wish.tokens)
    return written(target, plan.wish, prompts, plan.folder / "data", watch.done)


def _trainee(plan: Plan, target: Target, texts: Texts, parts: Split, schedule: Schedule) -> Trainee:
    """Make the draft; its random weights follow from the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(schedule.seed)
        if plan.kind == "small-lm":
            return SmallLmTrainee(target, plan.layers, plan.hidden)
        answers = [texts.text(int(number))[texts.prompt_lengths[number] :] for number in parts.training]
        vocab_size = len(target.embedding)
        ids = likeliest_ids(np.concatenate(answers), min(plan.draft_vocab, vocab_size), vocab_size)
        if plan.kind == "medusa":
            return MedusaTrainee(target, ids, plan.depth)
        return FeatureTrainee(target, ids, plan.intermediate, plan.depth)


def _begun(plan: Plan, target: Target) -> Draft | None:
    """Return the draft that is gone on from, in float32.

    Raises:
        InvalidRequest: It is of another kind.
    """
    if plan.start is None:
        return None
    found = load_draft(plan.start, torch.float32)
    if found.kind != plan.kind:
        raise InvalidRequest("start", str(plan.start), f"a draft of kind {plan.kind}; it is of kind {found.kind}")
    found.check_target(target.vocabulary, target.embedding)
    return found.draft


def _going_on(plan: Plan, target: Target, begun: Draft) -> Trainee:
    """Return a draft with another's weights."""
    ids = begun.draft_ids.long()
    trainee: FeatureTrainee | MedusaTrainee
    if isinstance(begun, FeatureDraft):
        trainee = FeatureTrainee(target, ids, begun.shape.intermediate_size, plan.depth)
    else:
        trainee = MedusaTrainee(target, ids, begun.shape.num_medusa_heads)
    trainee.net.load_state_dict(begun.state_dict())
    return trainee


def _cache(plan: Plan, target: Target, texts: Texts, trainee: Trainee, watch: Watch) -> Cache:
    """Open the cache and compute what is missing."""
    vocab_size, hidden = target.embedding.shape
    key = CacheKey(
        target.name, target.vocabulary.fingerprint, texts.digest(), len(texts.tokens), len(texts),
        hidden if trainee.reads_features else 0, vocab_size,
    )  # fmt: skip
    cache = Cache(plan.folder / "cache", key, plan.disk_limit)
    watch.stage("the target reads the texts", len(texts.tokens))
    fill(cache, target.model, texts, 4096, watch.done)
    return cache


def _start(trainee: Trainee, target: Target, cache: Cache, texts: Texts, parts: Split) -> None:
    """Give a draft the start that its kind has."""
    if not trainee.reads_features:
        return
    fitted, device = parts.training[:FITTED_TEXTS], target.embedding.device
    batches = [assemble(cache, texts, fitted[at : at + 8]).to(device) for at in range(0, len(fitted), 8)]
    if isinstance(trainee, FeatureTrainee):
        fit_join(trainee, target.model, batches)
    elif isinstance(trainee, MedusaTrainee):
        fit_heads(trainee, batches)


def _save(plan: Plan, schedule: Schedule, target: Target, texts: Texts, trainer: Trainer) -> None:
    """Write draft and report."""
    state = trainer.state
    recipe: dict[str, Any] = {
        "kind": plan.kind, "texts": len(texts), "tokens": len(texts.tokens), "texts_sha256": texts.digest(),
        "schedule": asdict(schedule), "steps": state.step, "seconds": round(state.seconds),
        "held_out": asdict(state.curve[-1]),
    }  # fmt: skip
    origin = Origin(target.name, target.vocabulary, embedding_mean(target.embedding), recipe)
    trainer.trainee.save(plan.folder / "draft", origin)
    save_page(
        plan.folder / "report.html", report(f"A {plan.kind} draft for {target.name}", state, _facts(plan, recipe))
    )


def _facts(plan: Plan, recipe: dict[str, Any]) -> dict[str, str]:
    """Return what the report says of its origin."""
    source = str(plan.data or plan.prompts or "the target's own questions and answers")
    schedule: dict[str, Any] = recipe["schedule"]
    return {
        "target": plan.target.label, "kind": plan.kind, "texts": f"{recipe['texts']:,} ({recipe['tokens']:,} tokens)",
        "from": source, **{name.replace("_", " "): str(value) for name, value in schedule.items()},
    }  # fmt: skip
