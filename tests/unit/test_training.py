"""Training of drafts: what is trained, on what, and that a run taken up again is the same run."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from outrider.drafting.feature import FeatureDraft, FeatureShape
from outrider.errors import FailedPrecondition
from outrider.training.acceptance import Acceptance, _play, measure
from outrider.training.agreement import agreement
from outrider.training.batches import epoch_batches
from outrider.training.kinds.feature import FeatureTrainee, fit_join
from outrider.training.kinds.medusa import MedusaTrainee, fit_heads
from outrider.training.objective import Objective, drawn_prefixes
from outrider.training.state import State
from outrider.training.trainer import Trainer
from outrider.training.unroll import unrolled
from tests.unit.feature_chain import FeatureChain
from tests.unit.training_bench import Setting, make_setting, quick, some_texts

KINDS = ("feature", "medusa", "small-lm")


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return make_setting(tmp_path_factory.mktemp("cache"))


def on_and_on(state: State, figures: Sequence[object]) -> bool:
    del state, figures
    return False


def test_an_unrolled_step_is_the_step_of_a_chain_that_began_so_many_rows_before() -> None:
    torch.manual_seed(0)
    net = FeatureDraft(FeatureShape(32, 4, 2, 8, 48, 20)).requires_grad_(False)
    embedded, features = torch.randn(2, 10, 32), torch.randn(2, 10, 32)
    steps = list(unrolled(net, embedded, features, 4))
    for text in range(2):
        for begin in (0, 2, 6):
            chain = FeatureChain(net)
            guess = chain.extend(embedded[text, : begin + 1], features[text, : begin + 1])[-1:]
            torch.testing.assert_close(guess[0], steps[0][text, begin])
            for step in range(1, 4):
                guess = chain.extend(embedded[text, begin + step : begin + step + 1], guess)
                torch.testing.assert_close(guess[0], steps[step][text, begin + step])


def test_the_loss_in_pieces_has_the_gradients_of_the_loss_at_once() -> None:
    torch.manual_seed(0)
    guesses, head = torch.randn(600, 16, requires_grad=True), torch.randn(40, 16, requires_grad=True)
    places = torch.stack([torch.randperm(41)[:8] - 1 for _ in range(600)])
    probs = torch.rand(600, 8).softmax(-1)
    loss, shared = agreement(guesses, head, places, probs)
    ours = torch.autograd.grad(3 * loss, (guesses, head))
    sharp = probs.square() / probs.square().sum(-1, keepdim=True)
    at, inside = places.clamp(min=0), places >= 0
    laws, sharpened = ((scale * guesses @ head.T).log_softmax(-1).gather(-1, at) for scale in (1, 2))
    known = probs * inside
    plain = -(laws * known + 0.5 * sharpened * sharp * inside).sum(-1).mean()
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(ours, torch.autograd.grad(3 * plain, (guesses, head)))
    torch.testing.assert_close(shared, torch.minimum(laws.exp(), known).sum(-1).detach())


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_falls(kind: str, setting: Setting, tmp_path: Path) -> None:
    trainer = Trainer(setting.trainee(kind), setting.material, quick(24), tmp_path)
    assert trainer.run(on_and_on)
    first, *_, last = [point.sampled[-1] for point in trainer.state.curve]
    assert first is not None
    assert last is not None
    assert last > first
    assert trainer.state.curve[-1].loss < trainer.state.curve[1].loss


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_taken_up_ends_with_the_weights_of_one_that_was_not_interrupted(
    kind: str, setting: Setting, tmp_path: Path
) -> None:
    (whole_folder := tmp_path / "whole").mkdir()
    (halved_folder := tmp_path / "halved").mkdir()
    whole = Trainer(setting.trainee(kind), setting.material, quick(), whole_folder)
    assert whole.run(on_and_on)
    halved = Trainer(setting.trainee(kind), setting.material, quick(), halved_folder)
    assert not halved.run(lambda state, _: state.step == 5)
    resumed = Trainer(setting.trainee(kind), setting.material, quick(), halved_folder)
    assert resumed.state.step == 5
    assert resumed.run(on_and_on)
    assert [point.step for point in resumed.state.curve] == [point.step for point in whole.state.curve]
    for name, weight in whole.trainee.net.state_dict().items():
        assert torch.equal(weight, resumed.trainee.net.state_dict()[name]), name


def test_a_run_of_another_schedule_is_not_taken_up(setting: Setting, tmp_path: Path) -> None:
    Trainer(setting.trainee("feature"), setting.material, quick(3), tmp_path).run(on_and_on)
    with pytest.raises(FailedPrecondition, match=r"another schedule \(steps differ\)"):
        Trainer(setting.trainee("feature"), setting.material, quick(4), tmp_path)


def test_minutes_become_a_number_of_steps_once_the_pace_is_known(setting: Setting, tmp_path: Path) -> None:
    schedule = quick(0).__class__(steps=0, minutes=1e-4, batch_tokens=128, measurements=1, bfloat16=False)
    trainer = Trainer(setting.trainee("medusa"), setting.material, schedule, tmp_path)
    assert trainer.run(on_and_on)
    assert trainer.state.step == trainer.state.total_steps >= 10


@pytest.mark.parametrize("kind", ["feature", "medusa"])
def test_where_features_are_missing_the_stand_in_is_read_and_learned(kind: str, setting: Setting) -> None:
    trainee, batch = setting.trainee(kind), setting.batch()
    everywhere = torch.ones_like(batch.mask)
    guess = next(iter(trainee.guesses(batch, 1, everywhere)))
    batch.features = torch.randn(batch.features.shape).to(batch.features.dtype)
    assert torch.equal(guess, next(iter(trainee.guesses(batch, 1, everywhere))))
    assert not torch.equal(guess, next(iter(trainee.guesses(batch, 1))))
    stand_in = dict(trainee.net.named_parameters())["stand_in"]
    (slope,) = torch.autograd.grad(guess.square().sum(), stand_in)
    assert slope.abs().sum() > 0


def test_training_leaves_out_prefixes_of_some_texts_and_all_of_few(setting: Setting) -> None:
    batch, chance = setting.batch(), torch.Generator().manual_seed(0)
    drawn = torch.cat([drawn_prefixes(batch, chance) for _ in range(300)])
    assert not (drawn[:, 1:] & ~drawn[:, :-1]).any()
    assert 0.2 < drawn[:, 0].float().mean() < 0.4
    assert 0.02 < drawn.all(-1).float().mean() < 0.08


def test_the_loss_is_that_of_rows_whose_law_is_known_alone(setting: Setting) -> None:
    objective, batch = Objective(setting.trainee("small-lm")), setting.batch()
    loss, _ = objective(batch, torch.Generator().manual_seed(0))
    batch.law_probs = torch.where(batch.mask[..., None], batch.law_probs, torch.tensor(7.0))
    again, _ = objective(batch, torch.Generator().manual_seed(0))
    assert torch.equal(loss, again)


def test_a_draft_that_starts_as_its_target_and_is_fitted_agrees_better_than_chance(setting: Setting) -> None:
    feature, medusa = setting.trainee("feature"), setting.trainee("medusa")
    assert isinstance(feature, FeatureTrainee)
    assert isinstance(medusa, MedusaTrainee)
    before = [measure(each, [setting.batch()]).alpha_at(1.0) for each in (feature, medusa)]
    assert fit_join(feature, setting.target.model, [setting.batch()]) > 0.3
    assert fit_heads(medusa, [setting.batch()]) > 0.3
    after = [measure(each, [setting.batch()]).alpha_at(1.0) for each in (feature, medusa)]
    for low, high in zip(before, after, strict=True):
        assert low is not None
        assert high is not None
        assert high > low


def test_rounds_are_played_as_a_verifier_counts_them() -> None:
    total = Acceptance()
    # Rows 0, 1 accepted and row 2 rejected; the next round begins behind the recovered token, at row 3, is rejected at
    # once, and the last begins at row 4.
    _play([[True, True, True, False, True], [False, True, True, False, True], [False, False, False, True, True]], total)
    assert total.rounds == 3
    assert total.tested[:3] == [3, 1, 1]
    assert total.accepted[:3] == [2, 1, 0]
    assert total.alpha == 3 / 5
    assert total.tokens_per_round == 2.0


def test_a_whole_chain_that_is_accepted_earns_the_bonus_token() -> None:
    total = Acceptance()
    _play([[True] * 6, [True] * 6], total)
    assert (total.rounds, sum(total.accepted), sum(total.tested)) == (2, 4, 4)


def test_an_epoch_has_every_text_once_and_no_batch_above_its_size() -> None:
    texts = some_texts(50)
    numbers = torch.arange(5, 50).numpy()
    batches = epoch_batches(texts, numbers, 100, seed=4)
    assert sorted(int(number) for batch in batches for number in batch) == list(range(5, 50))
    assert all(len(batch) * int(texts.lengths[batch].max()) <= 100 for batch in batches)
    again, other = epoch_batches(texts, numbers, 100, seed=4), epoch_batches(texts, numbers, 100, seed=5)
    assert [batch.tolist() for batch in again] == [batch.tolist() for batch in batches]
    assert [batch.tolist() for batch in other] != [batch.tolist() for batch in batches]
