"""A seed repeats a run's sequence, every kind comes early, and nothing lasts for ever."""

from collections import Counter

from tests.chaos.schedule import LONG_S, TARGETS, Edge, Kind, essentials, groups, plan


def test_a_seed_repeats_the_sequence_and_another_one_does_not() -> None:
    assert plan(7, 100) == plan(7, 100)
    assert plan(7, 100) != plan(8, 100)
    assert plan(7, 40) == plan(7, 100)[:40]


def test_a_short_run_has_every_kind_and_a_long_one_every_kind_at_every_target() -> None:
    assert {fault.kind for fault in plan(3, len(Kind))} == set(Kind)
    long = Counter((fault.kind, fault.target) for fault in plan(3, 20 * len(Kind)))
    assert long.keys() == {(kind, target) for kind in Kind for target in TARGETS[kind]}


def test_every_fault_heals_in_time_and_few_outlive_a_keepalive() -> None:
    faults = plan(5, 600, long_ones=True)
    assert all(fault.hold_s <= LONG_S[1] for fault in faults)
    assert 0 < sum(fault.hold_s >= LONG_S[0] for fault in faults) < 60
    assert max(fault.hold_s for fault in plan(5, 600)) <= 4.0


def test_faults_that_are_there_together_have_no_process_in_common() -> None:
    found = groups(plan(11, 400))
    pairs = [group for group in found if len(group) > 1]
    assert 40 < len(pairs) < 120
    for group in pairs:
        assert len(group) == 2
        ends = [{each.source, each.target} if isinstance(each, Edge) else {each} for each in (f.target for f in group)]
        assert not ends[0] & ends[1]


def test_kinds_that_a_machine_cannot_do_are_left_out() -> None:
    assert Kind.CLOCK not in {fault.kind for fault in plan(2, 100, kinds=[each for each in Kind if each != Kind.CLOCK])}


def test_the_short_form_has_every_kind_and_kills_freezes_and_restarts_every_service() -> None:
    faults = essentials(4)
    assert {fault.kind for fault in faults} == set(Kind)
    for role in ("orchestrate", "verify", "draft"):
        met = {fault.kind for fault in faults if isinstance(fault.target, str) and fault.target.startswith(role)}
        assert {Kind.KILL, Kind.FREEZE, Kind.RESTART} <= met
    assert {len(group) for group in groups(faults)} == {2}
    for one, other in groups(faults):
        assert one.target != other.target


def test_the_short_form_leaves_out_what_a_machine_cannot_do_and_nothing_else() -> None:
    without = essentials(4, kinds=[each for each in Kind if each is not Kind.CLOCK])
    assert without == tuple(fault for fault in essentials(4) if fault.kind is not Kind.CLOCK)
