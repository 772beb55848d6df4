"""Calls that are good, or nearly: what mutations start from. They reach as deep into a service as a peer's can.

Between services, sessions have one of a few names, so that streams of different calls meet in the same session.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from google.protobuf.message import Message

from outrider.v1 import draft_pb2, generation_pb2, types_pb2, verify_pb2

NUM_NAMES = 4
"""Names of sessions, and of draft workers, between services, at a time."""
SENTENCES = ("the cat sat on ", "a", "Grüße, 世界 \U0001f600", "x" * 300, "\x00\x7f\ufffd")
SAMPLED = (types_pb2.MODE_COUPLED, types_pb2.MODE_REJECTION, types_pb2.MODE_BLOCK)
MODES = (types_pb2.MODE_GREEDY, *SAMPLED)


@dataclass(frozen=True, slots=True)
class Facts:
    """What a caller knows of the cluster."""

    verify_address: str
    vocabulary: types_pb2.Vocabulary
    workers: tuple[str, ...] = ()
    """Ids of its draft workers, for whom one may pretend to speak."""
    sessions: tuple[str, ...] = ()
    """Sessions of clients, which nobody counts on."""
    batch: int = 0
    """Part of the names between services: a session that has seen a high generation refuses all that follow."""


@dataclass(frozen=True, slots=True)
class Method:
    """One RPC."""

    role: str
    path: str
    make: Callable[[Random, Facts], list[Message]]
    """Makes the messages of a good call."""
    streams: bool = False
    """Whether the caller may send several messages."""

    @property
    def name(self) -> str:
        """Its name, without the package."""
        return self.path.removeprefix("/outrider.v1.")


def _ids(dice: Random, most: int = 40) -> list[int]:
    return [dice.randrange(267) for _ in range(dice.randint(1, most))]


def _sampling(dice: Random, mode: int = types_pb2.MODE_UNSPECIFIED) -> types_pb2.SamplingParams:
    greedy = mode == types_pb2.MODE_GREEDY or (not mode and dice.random() < 0.3)
    sampling = types_pb2.SamplingParams(temperature=0.0 if greedy else dice.choice((0.3, 1.0, 100.0)))
    if dice.random() < 0.3:
        sampling.top_k, sampling.top_p, sampling.min_p = dice.choice((0, 1, 50)), dice.choice((1.0, 1e-9)), 0.1
    if dice.random() < 0.3:
        sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty = 1.3, -2.0, 2.0
    if dice.random() < 0.2:
        sampling.logit_bias.add(token_id=dice.randrange(267), bias=dice.choice((-100.0, 0.0, 100.0)))
    return sampling


def _generate(dice: Random, facts: Facts) -> list[Message]:
    request = generation_pb2.GenerateRequest(
        max_tokens=dice.randint(1, 6), sampling=_sampling(dice), ignore_eos=dice.random() < 0.5,
        return_token_origin=dice.random() < 0.5,
    )  # fmt: skip
    match dice.randrange(3):
        case 0:
            request.text = dice.choice(SENTENCES)
        case 1:
            request.token_ids.token_ids.extend(_ids(dice))
        case _:
            request.chat.messages.add(role="user", content=dice.choice(SENTENCES))
    if dice.random() < 0.4:
        request.seed = dice.getrandbits(64)
    if dice.random() < 0.2:
        request.session_id = dice.choice(facts.sessions or ("nobody",))
    if dice.random() < 0.2:
        request.stop.extend(("a", "th"))
        request.stop_token_ids.append(dice.randrange(267))
    if dice.random() < 0.2:
        request.speculation.gamma, request.speculation.window = 4, 8
    if dice.random() < 0.2:
        request.logprobs = dice.choice((0, 3, 128))
    if dice.random() < 0.1:
        request.request_id = f"request-{dice.randrange(NUM_NAMES)}"
    return [request]


def _resume(dice: Random, facts: Facts) -> list[Message]:
    return [generation_pb2.ResumeRequest(session_id=_session(dice, facts), next_position=dice.randrange(400))]


def _get(dice: Random, facts: Facts) -> list[Message]:
    return [generation_pb2.GetSessionRequest(session_id=_session(dice, facts), include_token_ids=dice.random() < 0.5)]


def _delete(dice: Random, facts: Facts) -> list[Message]:
    session_id = _session(dice, facts) if dice.random() < 0.05 else f"nobody-{dice.randrange(NUM_NAMES)}"
    return [generation_pb2.DeleteSessionRequest(session_id=session_id)]


def _session(dice: Random, facts: Facts) -> str:
    return dice.choice(facts.sessions or ("nobody",))


def _list(_: Random, __: Facts) -> list[Message]:
    return [generation_pb2.ListModelsRequest()]


def _describe_verifier(dice: Random, _: Facts) -> list[Message]:
    return [verify_pb2.VerifyServiceDescribeRequest(with_tokens=dice.random() < 0.2)]


def _describe_drafter(dice: Random, _: Facts) -> list[Message]:
    return [draft_pb2.DraftServiceDescribeRequest(with_tokens=dice.random() < 0.2)]


def _name(dice: Random, facts: Facts) -> str:
    return f"fuzz-{facts.batch}-{dice.randrange(NUM_NAMES)}"


def _generation(dice: Random) -> types_pb2.Generation:
    return types_pb2.Generation(
        fence=dice.getrandbits(62) if dice.random() < 0.02 else dice.randrange(3), attach=dice.randrange(3)
    )


def _epoch(dice: Random) -> types_pb2.Epoch:
    return types_pb2.Epoch(generation=_generation(dice), round=dice.randrange(4))


def _speculation(dice: Random) -> types_pb2.Speculation:
    return types_pb2.Speculation(gamma=4, restart_gamma=2, window=dice.choice((0, 4, 8, 1024)))


def _decode(dice: Random, facts: Facts) -> list[Message]:
    ids, mode = _ids(dice), dice.choice(MODES)
    opened = verify_pb2.DecodeOpen(
        session_id=_name(dice, facts), generation=_generation(dice), mode=mode, token_ids=ids,
        classes=b"\x01" * len(ids),
        sampling=_sampling(dice, mode), key=b"" if mode == types_pb2.MODE_GREEDY else dice.randbytes(16),
        prompt_len=dice.randint(1, len(ids)), commit_limit=len(ids) + dice.randint(1, 20),
        speculation=_speculation(dice), worker_id=dice.choice(("", _name(dice, facts))),
    )  # fmt: skip
    opened.patience.FromMilliseconds(dice.choice((0, 5, 1000)))
    messages: list[Message] = [verify_pb2.DecodeRequest(open=opened)]
    for _i in range(dice.randrange(4)):
        progress = verify_pb2.DecodeProgress(
            generation=opened.generation, logged_len=len(ids) + dice.randrange(20),
            commit_limit=len(ids) + dice.randrange(40), speculation=_speculation(dice),
        )  # fmt: skip
        attach = verify_pb2.DecodeAttach(generation=_generation(dice), worker_id=_name(dice, facts))
        messages.append(
            verify_pb2.DecodeRequest(progress=progress)
            if dice.random() < 0.7
            else verify_pb2.DecodeRequest(attach=attach)
        )
    if dice.random() < 0.5:
        messages.append(verify_pb2.DecodeRequest(close=verify_pb2.DecodeClose(keep_kv=dice.random() < 0.5)))
    return messages


def _propose(dice: Random, facts: Facts) -> list[Message]:
    worker_id = dice.choice(facts.workers) if facts.workers and dice.random() < 0.02 else _name(dice, facts)
    hello = verify_pb2.ProposeHello(
        worker_id=worker_id, vocabulary=facts.vocabulary, feature_layers=dice.choice(([], [-1])),
        takes_hints=dice.random() < 0.5,
    )  # fmt: skip
    messages: list[Message] = [verify_pb2.ProposeRequest(hello=hello)]
    for _i in range(dice.randrange(6)):
        session_id, epoch, base_len = _name(dice, facts), _epoch(dice), dice.randrange(60)
        ids = _ids(dice, 4)
        header = verify_pb2.ProposalHeader(session_id=session_id, epoch=epoch, base_len=base_len, count=len(ids))
        proposal = verify_pb2.Proposal(
            session_id=session_id, epoch=epoch, base_len=base_len, seen_len=base_len, limit=base_len + 8, token_ids=ids,
        )  # fmt: skip
        if dice.random() < 0.5:
            proposal.rows.CopyFrom(_rows(ids))
        passed = verify_pb2.Pass(session_id=session_id, epoch=epoch, base_len=base_len, until_len=base_len + 3)
        kinds = (
            [verify_pb2.ProposeRequest(header=header), verify_pb2.ProposeRequest(proposal=proposal)],
            [verify_pb2.ProposeRequest(proposal=proposal)],
            [verify_pb2.ProposeRequest(pass_turn=passed)],
        )
        messages += dice.choice(kinds)
    return messages


def _rows(ids: Sequence[int]) -> types_pb2.DraftRows:
    """Return rows in which each token has all the probability."""
    listed = b"".join(token.to_bytes(4, "little") for token in ids)
    return types_pb2.DraftRows(lengths=[1] * len(ids), token_ids=listed, counts=b"\xff\xff" * len(ids))


def _draft(dice: Random, facts: Facts) -> list[Message]:
    ids, mode = _ids(dice), dice.choice(MODES)
    opened = draft_pb2.DraftOpen(
        session_id=_name(dice, facts), epoch=_epoch(dice), token_ids=ids, mode=mode, sampling=_sampling(dice, mode),
        draft_key=b"" if mode == types_pb2.MODE_GREEDY else dice.randbytes(16), speculation=_speculation(dice),
        verifier_id="fuzz", verifier_address=dice.choice((*[facts.verify_address] * 9, "127.0.0.1:1")),
        prompt_len=dice.randint(1, len(ids)), max_len=len(ids) + dice.randint(1, 60),
    )  # fmt: skip
    messages: list[Message] = [draft_pb2.DraftRequest(open=opened)]
    length = len(ids)
    for _i in range(dice.randrange(4)):
        new = _ids(dice, 3)
        epoch = types_pb2.Epoch(generation=opened.epoch.generation, round=opened.epoch.round + dice.randrange(3))
        commit = draft_pb2.DraftCommit(epoch=epoch, start=length, token_ids=new, speculation=_speculation(dice))
        messages.append(draft_pb2.DraftRequest(commit=commit))
        length += len(new)
    if dice.random() < 0.5:
        messages.append(draft_pb2.DraftRequest(close=draft_pb2.DraftClose(keep_kv=dice.random() < 0.5)))
    return messages


METHODS = (
    Method("orchestrate", "/outrider.v1.GenerationService/Generate", _generate),
    Method("orchestrate", "/outrider.v1.GenerationService/Resume", _resume),
    Method("orchestrate", "/outrider.v1.GenerationService/GetSession", _get),
    Method("orchestrate", "/outrider.v1.GenerationService/DeleteSession", _delete),
    Method("orchestrate", "/outrider.v1.GenerationService/ListModels", _list),
    Method("verify", "/outrider.v1.VerifyService/Describe", _describe_verifier),
    Method("verify", "/outrider.v1.VerifyService/Decode", _decode, streams=True),
    Method("verify", "/outrider.v1.VerifyService/Propose", _propose, streams=True),
    Method("draft", "/outrider.v1.DraftService/Describe", _describe_drafter),
    Method("draft", "/outrider.v1.DraftService/Draft", _draft, streams=True),
)
"""Every RPC of the three services."""
