from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from helixctl.engine.channel import Channel
from helixctl.engine.slots import SlotPool
from helixctl.engine.stats import Link, take_stats
from helixctl.engine.status import StatusFile
from helixctl.engine.supervisor import Progress, Supervisor
from helixctl.errors import Interrupted
from tests.engine.stages import LIMITS, FakeStage
from tests.engine.threads import FakeClock, until, until_waiting


def looked_at_while_waiting(look: Callable[[Supervisor, Channel[int], SlotPool[int]], Any]) -> Any:
    """What ``look`` sees of a pipeline whose drafter waits for a second item."""
    channel: Channel[int] = Channel("features", 3)
    slots: SlotPool[int] = SlotPool("slots", [[0, 1]])
    seen: list[Any] = []

    def draft() -> None:
        for _ in channel:
            slots.release(0)

    def read() -> None:
        slots.acquire(0)
        channel.send(7)
        until(lambda: slots.stats().released == 1)
        until_waiting(channel)
        seen.append(look(supervisor, channel, slots))
        channel.close()

    stages = [[FakeStage("drafter-0", draft)], [FakeStage("reader-0", read)]]
    supervisor = Supervisor(stages, [channel, slots], LIMITS)
    supervisor.run()
    return seen[0]


def test_stats_tell_who_runs_what_went_through_and_who_waits():
    def look(supervisor: Supervisor, channel: Channel[int], slots: SlotPool[int]) -> Any:
        return take_stats(supervisor, [Link(channel, ("reader-0",), ("drafter-0",))], slots)

    stats = looked_at_while_waiting(look)
    assert [(stage.name, stage.state) for stage in stats.stages] == [("drafter-0", "running"), ("reader-0", "running")]
    assert all(isinstance(stage.thread_id, int) for stage in stats.stages)
    (link,) = stats.links
    assert (link.senders, link.receivers) == (("reader-0",), ("drafter-0",))
    assert (link.channel.sent, link.channel.received) == (1, 1)
    assert stats.slots.released == 1
    assert [(waiter.thread, waiter.action) for waiter in stats.waiters] == [("drafter-0", "to receive from 'features'")]


def test_stages_before_the_gate_are_waiting_in_set_up_or_ready():
    seen: list[Any] = []

    def look() -> None:
        until(lambda: supervisor.stages()[1].state != "waiting")
        seen.append(supervisor.stages())

    stages = [FakeStage("drafter-0"), FakeStage("target-0", on_setup=look), FakeStage("reader-0")]
    supervisor = Supervisor([[stage] for stage in stages], [], LIMITS)
    supervisor.run()
    assert [stage.state for stage in seen[0]] == ["ready", "set-up", "waiting"]
    assert [stage.state for stage in supervisor.stages()] == ["ended"] * 3


def test_the_listener_of_progress_is_called_when_due_and_not_in_between():
    clock, calls = FakeClock(), list[float]()
    progress = Progress(clock)
    progress.listen(lambda: calls.append(clock()), every_s=1.0)

    def work() -> None:
        for advance_s in (0.5, 0.6, 0.2, 3.0):
            clock.advance(advance_s)
            supervisor.wake()
            until(lambda: not supervisor._mailbox._messages)

    supervisor = Supervisor([[FakeStage("drafter-0", work)]], [], LIMITS, progress=progress)
    supervisor.run()
    assert calls[0] == 1000.0
    assert all(later - earlier >= 1.0 for earlier, later in pairwise(calls))
    assert len(calls) in (2, 3)


def status(path: Path, look: Callable[[StatusFile], None]) -> dict[str, Any]:
    def write(supervisor: Supervisor, channel: Channel[int], slots: SlotPool[int]) -> None:
        links = [Link(channel, ("reader-0",), ("drafter-0",))]
        look(StatusFile(path, lambda: take_stats(supervisor, links, slots), lambda: {"step": 3}))

    looked_at_while_waiting(write)
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def test_a_status_file_is_whole_and_names_its_process(tmp_path):
    content = status(tmp_path / "status.json", lambda file: file.write())
    assert (content["schema"], content["pid"], content["phase"]) == (1, os.getpid(), "running")
    assert content["counters"] == {"step": 3}
    assert content["links"][0]["channel"]["name"] == "features"
    assert os.listdir(tmp_path) == ["status.json"]


def test_a_status_file_says_how_the_run_ended(tmp_path):
    ended = status(tmp_path / "a.json", lambda file: file.finish())
    failed = status(tmp_path / "b.json", lambda file: file.finish(ValueError("no\nmore")))
    stopped = status(tmp_path / "c.json", lambda file: file.finish(Interrupted(2, "stopped by SIGINT")))
    assert [one["phase"] for one in (ended, failed, stopped)] == ["ended", "failed", "ended"]
    assert [one["error"] for one in (ended, failed, stopped)] == [None, "no", "stopped by SIGINT"]


def test_a_status_file_that_cannot_be_written_warns_once(tmp_path, caplog):
    def look(supervisor: Supervisor, channel: Channel[int], slots: SlotPool[int]) -> None:
        file = StatusFile(tmp_path / "gone" / "status.json", lambda: take_stats(supervisor, [], None), dict)
        file.write()
        file.write()

    with caplog.at_level(logging.WARNING):
        looked_at_while_waiting(look)
    assert caplog.text.count("cannot be written; the run goes on") == 1
