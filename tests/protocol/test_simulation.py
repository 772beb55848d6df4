"""Long random runs of the real machines with every trouble: the same text, whatever happens.

Nothing here is statistical: each seed is one fixed run, and the checks of `parts` and `world` hold in every state.
"""

import random

import pytest

from outrider.ids import Mode
from outrider.messages import Speculation
from tests.protocol import mistakes
from tests.protocol.parts import Violation
from tests.protocol.world import Move, Setting, World
from verify_service.chain import Chain

NUM_TOKENS = 60
MAX_MOVES = 20_000
TROUBLES = ("timer", "break", "drop", "double", "drafter", "verifier", "hang", "unhint")


def setting_of(seed: int, mode: Mode, chain: type[Chain] = Chain) -> Setting:
    rng = random.Random(seed)
    gamma = rng.choice([1, 2, 4, 8])
    speculation = Speculation(gamma, rng.randint(1, gamma), gamma * rng.choice([1, 2, 4]))
    trouble = tuple((kind, rng.randint(0, 4)) for kind in TROUBLES)
    return Setting(
        NUM_TOKENS, speculation, mode, rows=(0, 33), passes=seed % 3 == 0, hints=seed % 2 == 0, slow_log=True,
        trouble=trouble, chain=chain,
    )  # fmt: skip


def run(seed: int, setting: Setting) -> int:
    """Walk at random to the end; return the number of moves."""
    rng = random.Random(seed)
    right, trouble = rng.choice([0.0, 0.3, 0.7, 0.95, 1.0]), rng.choice([0.0, 0.02, 0.1])
    world = World(setting)
    state = world.start()
    for num_moves in range(MAX_MOVES):
        if world.is_over(state):
            return num_moves
        state = chosen(list(world.moves(state)), rng, right, trouble).state
    raise AssertionError(f"no end after {MAX_MOVES} moves")


def chosen(moves: list[Move], rng: random.Random, right: float, trouble: float) -> Move:
    """Choose a move; of the ways to draw a proposal the right one with probability `right`."""
    troubles = [move for move in moves if move.is_trouble]
    if troubles and rng.random() < trouble:
        return rng.choice(troubles)
    draws = [move for move in moves if "draws" in move.label]
    others = [move for move in moves if not (move.is_trouble or "draws" in move.label)]
    if draws and (not others or rng.random() < 0.4):
        return draws[-1] if rng.random() < right else rng.choice(draws)
    return rng.choice(others)


@pytest.mark.parametrize("mode", list(Mode), ids=lambda mode: mode.name)
def test_long_runs_with_losses_and_duplicates_say_what_plain_decoding_says(mode: Mode) -> None:
    moves = [run(seed, setting_of(seed, mode)) for seed in range(50)]
    assert min(moves) > NUM_TOKENS


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", list(Mode), ids=lambda mode: mode.name)
def test_very_many_long_runs_say_what_plain_decoding_says(mode: Mode) -> None:
    for seed in range(1000, 3000):
        run(seed, setting_of(seed, mode))


def test_a_planted_mistake_is_found_by_long_runs_too() -> None:
    with pytest.raises(Violation, match="never proposed in epoch"):
        for seed in range(20):
            run(seed, setting_of(seed, Mode.GREEDY, mistakes.AcceptsByLength))
