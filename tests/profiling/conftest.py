"""One profile of a real pipeline, for all tests of what is made of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from helixctl.profiling.bottleneck import judge
from helixctl.profiling.facts import Facts, find_facts
from helixctl.profiling.files import write_files
from helixctl.profiling.recording import Options, Recorder, Recording
from helixctl.profiling.report import About, Json, make_report
from tests.profiling.subjects import synthetic


@dataclass(frozen=True)
class Profiled:
    """A recording and what was written about it."""

    seen: Recording
    facts: Facts
    report: Json
    folder: Path


@pytest.fixture(scope="session")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Profiled:
    """A slow target, looked at for a second; tests only read it."""
    folder = tmp_path_factory.mktemp("profile")
    with synthetic("slow-target-python", 1, folder / "run") as child:
        options = Options(seconds=1.0, threads_hz=5, stacks_hz=50, warmup_items=4, baseline_s=0.5)
        seen = Recorder(child.pid, folder / "run", options, folder).record()
    facts = find_facts(seen)
    report = make_report(seen, facts, judge(facts), About("pid", "a </script><b>bold</b> command", ("a note",)))
    write_files(folder / "out", report, seen, facts)
    return Profiled(seen, facts, report, folder / "out")
