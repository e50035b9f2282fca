from __future__ import annotations

import json

import pytest

from helixctl.profiling.facts import role_groups
from helixctl.profiling.pipeline import StatusReader, crew_of, flows, is_open, use_between
from helixctl.profiling.stalls import find_stalls
from tests.profiling.subjects import STAGES, status


def test_a_status_is_read_once_and_only_that_of_the_process(tmp_path):
    reader = StatusReader(tmp_path, 7)
    assert reader.read() is None
    path = tmp_path / "status.json"
    path.write_text(json.dumps(status(10.0)))
    assert reader.read() is not None
    assert reader.read() is None
    path.write_text(json.dumps(status(11.0)))
    assert StatusReader(tmp_path, 8).read() is None
    path.write_text("{torn")
    assert reader.read() is None


def test_the_crew_and_whether_the_gate_is_open():
    crew = crew_of(status(1.0))
    assert crew.stages == STAGES
    assert crew.by_thread_id == {100 + i: name for i, name in enumerate(STAGES)}
    assert is_open(status(1.0))
    assert not is_open(status(1.0, stages=[{"name": "a", "thread_id": 1, "state": "set-up"}]))


def test_what_went_through_a_channel_between_two_readings():
    first, last = status(10.0, received=4, tokens=100), status(12.0, received=24, tokens=900)
    channel = last["links"][2]["channel"]
    channel |= {"occupancy": [10.5, 0.5, 1.0], "send_wait_s": 0.4, "receive_wait_s": 1.0}
    use = use_between(first, last)
    assert (use.seconds, use.tokens_per_s, use.steps_per_s) == (2.0, 400.0, 2.5)
    features = use.channels[2]
    assert (features.items_per_s, features.mean_held) == pytest.approx((10.0, 1.25))
    assert (features.empty_share, features.full_share) == pytest.approx((0.25, 0.5))
    assert (features.send_wait_share, features.receive_wait_share) == pytest.approx((0.2, 0.5))


def test_a_stage_is_starved_held_back_or_busy():
    first, last = status(10.0), status(20.0, received=40)
    last["links"][0]["channel"]["send_wait_s"] = 2.0
    last["links"][0]["channel"]["receive_wait_s"] = 3.0
    last["slots"]["wait_s"] = 4.0
    found = {flow.role: flow for flow in flows(use_between(first, last), role_groups(crew_of(last)))}
    assert (found["reader"].in_wait_share, found["reader"].out_wait_share) == pytest.approx((0.0, 0.6))
    assert found["target"].in_wait_share == pytest.approx(0.3)
    assert found["target"].busy_share == pytest.approx(0.7)
    assert found["drafter"].busy_share == 1.0
    assert all(flow.items_per_s == 4.0 for flow in found.values())


def run_of(counts: list[int], drafter_waits_in_gaps: bool = False):
    """A status every 0.2 s with so many more items each; whoever is starved is so in the gaps only."""
    statuses, received, waited_s = [], 0, 0.0
    for i, count in enumerate([0, *counts]):
        received += count
        waited_s += 0.2 if i and not count else 0.0
        one = status(100 + 0.2 * i, received=received)
        for place in (0, 1, 2) if drafter_waits_in_gaps else (0, 1):
            one["links"][place]["channel"]["receive_wait_s"] = waited_s
        one["slots"]["wait_s"] = waited_s
        statuses.append(one)
    return statuses


def test_a_periodic_stall_is_found_with_its_length_its_period_and_its_stage():
    pattern = [4, 4, 4, 4, 4, 4, 0, 0, 0, 0]
    stalls = find_stalls(run_of(3 * pattern), role_groups(crew_of(status(1.0))))
    assert stalls is not None
    assert (stalls.count, stalls.role) == (3, "drafter")
    assert stalls.share == pytest.approx(0.4, abs=0.1)
    assert stalls.every_s == pytest.approx(2.0, abs=0.2)
    assert stalls.mean_s == pytest.approx(0.8, abs=0.2)


def test_a_reader_that_stalls_is_told_apart():
    statuses = run_of(3 * [4, 4, 4, 4, 0, 0, 0, 0], drafter_waits_in_gaps=True)
    for one in statuses:
        one["slots"]["wait_s"] = 0.0
    stalls = find_stalls(statuses, role_groups(crew_of(statuses[0])))
    assert stalls is not None and stalls.role == "reader"


def test_an_even_run_has_no_stalls():
    stalls = find_stalls(run_of(40 * [4]), role_groups(crew_of(status(1.0))))
    assert stalls is not None
    assert (stalls.count, stalls.share) == (0, 0.0)


def test_few_items_are_not_called_stalls():
    assert find_stalls(run_of([1, 0, 0, 0, 1, 0, 0, 0]), role_groups(crew_of(status(1.0)))) is None
