from __future__ import annotations

import stat
from pathlib import Path

import pytest

from helixctl.profiling.pyspy import Pass, Stacks, explain, find_pyspy, gil_mode, idle_mode, native_mode, parse_raw
from tests.engine.threads import until
from tests.profiling.subjects import python

RAW = """\
thread (11): target-0;_bootstrap (threading.py:988);run (stages.py:8) 293
thread (11): target-0;_bootstrap (threading.py:988);Condition.wait (threading.py:327) 7
thread (12): a; b;spin (x.py:1) 2
what py-spy says in between
thread (0x7f): hex;spin (x.py:1) 2
"""
SPIN = """\
import threading
def spin():
    while True: pass
threading.Thread(target=spin, name='hot', daemon=True).start()
print(1)
threading.Event().wait()
"""


def fake(folder: Path, body: str) -> str:
    """A command that stands in for py-spy."""
    path = folder / "fake-py-spy"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def stop_ended(one: Pass) -> Stacks:
    """Stop a child that has ended by itself."""
    assert one._child is not None
    one._child.wait()
    return one.stop()


def test_raw_stacks_are_joined_by_the_number_of_the_thread():
    by_thread, names = parse_raw(RAW)
    assert set(by_thread) == {11, 12}
    assert by_thread[11][("_bootstrap (threading.py:988)", "run (stages.py:8)")] == 293
    assert by_thread[11].total() == 300
    assert names[11] == "target-0"


def test_a_refusal_is_told_with_the_remedy(tmp_path):
    body = "echo 'Error: Permission Denied: Try running again with elevated permissions' >&2; exit 1"
    stacks = stop_ended(Pass(1, idle_mode(), tmp_path, fake(tmp_path, body)))
    assert stacks.by_thread == {}
    assert stacks.problem is not None
    assert stacks.problem.startswith("py-spy was refused: Permission Denied")
    assert "--cap-add SYS_PTRACE" in stacks.problem


def test_the_misleading_refusal_in_containers_is_a_refusal_too():
    log = "Error: Failed to get process executable name. Check that the process is running.\n"
    log += "Reason: Permission denied (os error 13)"
    assert explain(log, 1).startswith("py-spy was refused")


def test_a_window_too_short_for_pyspy_to_begin_is_told():
    assert "before it had begun" in explain("", -2)


def test_another_failure_is_told_without_that_remedy():
    text = explain("Error: Failed to find python version from target process", 1)
    assert text == "py-spy was no help: Failed to find python version from target process"


def test_no_pyspy_is_no_failure(tmp_path, monkeypatch):
    monkeypatch.setattr("helixctl.profiling.pyspy.find_pyspy", lambda: None)
    assert "not installed" in (Pass(1, idle_mode(), tmp_path).stop().problem or "")


def test_a_child_that_does_not_end_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("helixctl.profiling.pyspy._STOP_TIMEOUT_S", 0.05)
    ready = tmp_path / "ready"
    body = f"trap '' INT; touch {ready}; read line < {tmp_path}/never"
    (tmp_path / "never").touch()
    command = fake(tmp_path, body.replace("read line < ", "tail -f "))
    one = Pass(1, idle_mode(), tmp_path, command)
    until(ready.exists)
    assert one.stop().problem is not None


def test_late_looks_and_errors_are_counted(tmp_path):
    body = 'while [ "$1" != --output ]; do shift; done; echo "thread (5): x;spin (x.py:1) 9" > "$2"\n'
    body += "echo '1.00s behind in sampling, results may be inaccurate'; echo 'Samples: 9 Errors: 2'"
    one = Pass(1, idle_mode(), tmp_path, fake(tmp_path, body))
    until((tmp_path / "stacks.raw").exists)
    stacks = stop_ended(one)
    assert (stacks.ticks, stacks.late_samples, stacks.errors) == (9, 1, 2)


def test_native_stacks_are_never_asked_for_without_stopping():
    """py-spy refuses the two together."""
    assert "--nonblocking" in idle_mode().arguments and "--nonblocking" in gil_mode().arguments
    assert "--nonblocking" not in native_mode().arguments
    assert "--idle" in idle_mode().arguments  # what py-spy takes for idle is wrong too often


@pytest.mark.skipif(find_pyspy() is None, reason="py-spy is not installed")
def test_a_real_process_is_seen_with_its_threads_and_its_gil(tmp_path):
    with python(SPIN) as child:
        passes = [Pass(child.pid, mode, tmp_path) for mode in (idle_mode(100), gil_mode(100))]
        until(lambda: all(one.cpu_s > 0.005 for one in passes) or child.poll() is not None)
        stacks, gil = (one.stop() for one in passes)
    assert stacks.problem is None and gil.problem is None
    hot = next(number for number, name in stacks.names.items() if name == "hot")
    assert any("spin" in frames[-1] for frames in stacks.by_thread[hot])
    assert set(gil.by_thread) == {hot}
