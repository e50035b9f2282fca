from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from helixctl.profiling import threads
from helixctl.profiling.threads import ThreadSample, read_threads, use_between
from tests.engine.threads import Background, until

STAT = (
    "{tid} ({name}) {state} 1 1 1 0 -1 0 {minor} 0 {major} 0 {user} {system} 0 0 20 0 3 0 {started} "
    + "0 " * 16
    + "1 0 0"
)


def write_thread(root: Path, tid: int, sched: str | None = "1000000000 500000000 7", **changes: object) -> None:
    folder = root / "42" / "task" / str(tid)
    folder.mkdir(parents=True, exist_ok=True)
    usual = {"name": "target-0", "state": "S", "minor": 5, "major": 1, "user": 30, "system": 10, "started": 900}
    (folder / "stat").write_text(STAT.format(tid=tid, **{**usual, **changes}))
    (folder / "status").write_text("Name:\tx\nvoluntary_ctxt_switches:\t11\nnonvoluntary_ctxt_switches:\t3\n")
    if sched is not None:
        (folder / "schedstat").write_text(sched)


def test_a_thread_is_read_from_its_three_files(tmp_path):
    write_thread(tmp_path, 43, name="odd) (name")
    (reading,) = read_threads(42, tmp_path)
    assert (reading.thread_id, reading.name, reading.state, reading.started_ticks) == (43, "odd) (name", "S", 900)
    assert (reading.on_cpu_ns, reading.run_queue_ns) == (10**9, 5 * 10**8)
    assert (reading.user_ticks, reading.system_ticks, reading.minor_faults, reading.major_faults) == (30, 10, 5, 1)
    assert (reading.voluntary, reading.involuntary, reading.processor) == (11, 3, 1)


def test_without_schedstat_ticks_tell_the_core_time_and_the_run_queue_is_unknown(tmp_path):
    write_thread(tmp_path, 43, sched=None)
    (reading,) = read_threads(42, tmp_path)
    assert reading.on_cpu_ns == 40 * 10**9 // os.sysconf("SC_CLK_TCK")
    assert reading.run_queue_ns is None


def test_a_process_that_is_gone_has_no_threads(tmp_path):
    assert read_threads(42, tmp_path) == ()


def test_a_thread_that_ends_while_it_is_read_is_left_out(tmp_path):
    write_thread(tmp_path, 43)
    (tmp_path / "42" / "task" / "44").mkdir()
    assert [reading.thread_id for reading in read_threads(42, tmp_path)] == [43]


def sample(at_s: float, root: Path) -> ThreadSample:
    return ThreadSample(at_s, read_threads(42, root))


def test_core_run_queue_and_blocked_add_up_to_the_wall_clock(tmp_path):
    write_thread(tmp_path, 43, "1000000000 500000000 7")
    first = sample(10.0, tmp_path)
    write_thread(tmp_path, 43, "2000000000 1000000000 9", user=90, system=30)
    (use,) = use_between(first, sample(12.0, tmp_path))
    assert (use.on_cpu_share, use.run_queue_share, use.blocked_share) == (0.5, 0.25, 0.25)
    assert (use.user_share, use.system_share) == (0.375, 0.125)


def test_a_number_that_is_used_again_is_another_thread(tmp_path):
    write_thread(tmp_path, 43)
    first = sample(10.0, tmp_path)
    write_thread(tmp_path, 43, started=901)
    last = sample(12.0, tmp_path)
    assert use_between(first, last) == ()
    assert [reading.started_ticks for reading in threads.ended_between(first, last)] == [900]


def test_real_threads_a_spinning_one_and_a_waiting_one():
    freed, numbers = threading.Event(), dict[str, int]()

    def spin() -> None:
        numbers["spin"] = threading.get_native_id()
        while not freed.is_set():
            pass

    def wait() -> None:
        numbers["wait"] = threading.get_native_id()
        freed.wait()

    background = [Background(spin), Background(wait)]
    until(lambda: len(numbers) == 2)
    first = ThreadSample(time.monotonic(), read_threads(os.getpid()))
    threading.Event().wait(0.2)
    last = ThreadSample(time.monotonic(), read_threads(os.getpid()))
    freed.set()
    for one in background:
        one.result()
    uses = {use.thread_id: use for use in use_between(first, last)}
    spinning, waiting = uses[numbers["spin"]], uses[numbers["wait"]]
    assert waiting.on_cpu_share < 0.1 < 0.9 < waiting.blocked_share
    assert spinning.on_cpu_share + (spinning.run_queue_share or 0) > 0.4
    assert spinning.blocked_share < 0.6
