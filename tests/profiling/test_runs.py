from __future__ import annotations

from pathlib import Path

import pytest

from helixctl.errors import UsageError
from helixctl.profiling.runs import Watch, check_process, find_runs, only_run, run_dir_of
from tests.profiling.subjects import python

WAIT = "print(1); threading.Event().wait()"
HOLD = "import os, threading; held = open({path!r}, 'w'); held.write(str(os.getpid())); held.flush(); " + WAIT


def make_proc(root: Path, pid: int, run_dir: Path | None, written: int | None = None) -> None:
    """A process in a made-up /proc that holds the run.pid of ``run_dir`` open."""
    folder = root / str(pid)
    (folder / "fd").mkdir(parents=True)
    (folder / "cmdline").write_bytes(b"python\0-m\0helixctl\0train\0recipe.yaml\0")
    if run_dir is not None:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "run.pid").write_text(f"{written or pid}\n")
        (folder / "fd" / "3").symlink_to(run_dir / "run.pid")


def test_a_run_is_found_by_the_file_that_it_holds_open(tmp_path):
    path = tmp_path / "run.pid"
    with python(HOLD.format(path=str(path))) as child:
        assert run_dir_of(child.pid) == tmp_path
        assert child.pid in [run.pid for run in find_runs()]
    assert run_dir_of(child.pid) is None


def test_the_only_run_is_taken(tmp_path):
    make_proc(tmp_path / "proc", 40, None)
    make_proc(tmp_path / "proc", 41, tmp_path / "run")
    run = only_run(tmp_path / "proc")
    assert (run.pid, run.run_dir, run.command) == (41, tmp_path / "run", "python -m helixctl train recipe.yaml")


def test_none_and_several_are_wrong_use(tmp_path):
    make_proc(tmp_path / "proc", 40, None)
    with pytest.raises(UsageError, match="no helixctl run"):
        only_run(tmp_path / "proc")
    make_proc(tmp_path / "proc", 41, tmp_path / "one")
    make_proc(tmp_path / "proc", 42, tmp_path / "two")
    with pytest.raises(UsageError, match=r"2 helixctl runs are running:\n  41 .*one.*\n  42 .*two") as caught:
        only_run(tmp_path / "proc")
    assert caught.value.exit_code == 2


def test_a_pid_file_of_another_process_does_not_count(tmp_path):
    make_proc(tmp_path / "proc", 41, tmp_path / "run", written=99)
    assert find_runs(tmp_path / "proc") == ()


def test_a_process_that_is_not_there_is_wrong_use(tmp_path):
    with pytest.raises(UsageError, match="no process 41"):
        check_process(41, tmp_path)


def test_watching_ends_with_the_process():
    with python(f"import threading; {WAIT}") as child:
        watch = Watch(child.pid)
        assert not watch.ended_within(0.01)
        child.kill()
        assert watch.ended_within(20)
        watch.close()
