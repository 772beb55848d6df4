"""Codec of `generation.proto`: how a generation went."""

from outrider.codec.checks import PEER, duration
from outrider.generation import Figures
from outrider.v1 import generation_pb2 as pb

MAX_POSITIONS = 4096
"""Most entries of a per-position count."""


def figures_to_proto(figures: Figures) -> pb.Figures:
    """Encode how a generation went."""
    return pb.Figures(
        num_rounds=figures.num_rounds,
        num_rollbacks=figures.num_rollbacks,
        num_drafted=figures.num_drafted,
        num_tested=figures.num_tested,
        num_accepted=figures.num_accepted,
        tested_per_position=figures.tested_per_position[:MAX_POSITIONS],
        accepted_per_position=figures.accepted_per_position[:MAX_POSITIONS],
        num_stale=figures.num_stale,
        num_plain=figures.num_plain,
        num_recovered=figures.num_recovered,
        num_bonus=figures.num_bonus,
        tokens_per_second=figures.tokens_per_second,
        tokens_per_round=figures.tokens_per_round,
        draft_time=duration(figures.draft_s),
        network_time=duration(figures.network_s),
        queue_time=duration(figures.queue_s),
        verify_time=duration(figures.verify_s),
        commit_time=duration(figures.commit_s),
        time_to_first_token=duration(figures.time_to_first_token_s),
        total_time=duration(figures.total_s),
        speculation_off=figures.speculation_off,
        guarantee_void=figures.guarantee_void,
        engine_fingerprint=figures.engine_fingerprint,
        drafter=figures.drafter,
        accepted_prediction_tokens=figures.accepted_prediction_tokens,
        rejected_prediction_tokens=figures.rejected_prediction_tokens,
    )


def figures_from_proto(message: pb.Figures) -> Figures:
    """Decode how a generation went; figures are for reading, so only their form is checked."""
    PEER.count("figures.tested_per_position", message.tested_per_position, 0, MAX_POSITIONS)
    tested = len(message.tested_per_position)
    PEER.count("figures.accepted_per_position", message.accepted_per_position, tested, tested)
    return Figures(
        num_rounds=message.num_rounds,
        num_rollbacks=message.num_rollbacks,
        num_drafted=message.num_drafted,
        num_tested=message.num_tested,
        num_accepted=message.num_accepted,
        tested_per_position=tuple(message.tested_per_position),
        accepted_per_position=tuple(message.accepted_per_position),
        num_stale=message.num_stale,
        num_plain=message.num_plain,
        num_recovered=message.num_recovered,
        num_bonus=message.num_bonus,
        tokens_per_second=message.tokens_per_second,
        tokens_per_round=message.tokens_per_round,
        draft_s=PEER.seconds("figures.draft_time", message.draft_time),
        network_s=PEER.seconds("figures.network_time", message.network_time),
        queue_s=PEER.seconds("figures.queue_time", message.queue_time),
        verify_s=PEER.seconds("figures.verify_time", message.verify_time),
        commit_s=PEER.seconds("figures.commit_time", message.commit_time),
        time_to_first_token_s=PEER.seconds("figures.time_to_first_token", message.time_to_first_token),
        total_s=PEER.seconds("figures.total_time", message.total_time),
        speculation_off=message.speculation_off,
        guarantee_void=message.guarantee_void,
        engine_fingerprint=message.engine_fingerprint,
        drafter=message.drafter,
        accepted_prediction_tokens=message.accepted_prediction_tokens,
        rejected_prediction_tokens=message.rejected_prediction_tokens,
    )
