"""Runs the cases of tests/reliability and writes their outcomes into docs/reliability.md, between two marks."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.fork_server import ForkServer, fork_server
from tests.reliability.cases import DAMAGES, STALL_S, Case, all_cases
from tests.reliability.faults import JOIN_S
from tests.reliability.harness import Harness, Outcome, faults_found
from tests.reliability.loader_program import TIMEOUT_S
from tests.reliability.worker_cases import LOADER, run_worker_case, worker_cases

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reliability.md"
BEGIN, END = "<!-- outcomes: written by scripts/reliability -->", "<!-- end of outcomes -->"
HEADER = ("role", "fault", "what happens", "exit code", "told after", "afterwards")


def main() -> int:
    """The number of cases whose outcome is wrong, at most 1."""
    wrong: list[str] = []
    with fork_server() as server, tempfile.TemporaryDirectory() as folder:
        harness = Harness(server, Path(folder))
        rows = list(run_cases(harness, wrong))
        (workers := Path(folder) / "workers").mkdir()
        rows += run_worker_cases(server, workers, wrong)
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(rows)}\n\n{END}{after}", encoding="utf-8")
    print("\n".join([f"{len(rows)} outcomes written to {PAGE}", *wrong]))
    return 1 if wrong else 0


def run_cases(harness: Harness, wrong: list[str]) -> Iterator[tuple[str, ...]]:
    """A row per case; adds what is wrong to ``wrong``."""
    for case in all_cases():
        outcome = harness.run(case)
        wrong += [f"{case.name}: {what}" for what in faults_found(case, outcome)]
        print(f"{case.name}: {outcome.detection_s:.2f} s")
        yield row(case, outcome)
    for damage in DAMAGES:
        result = harness.run_damaged(damage)
        wrong += [] if result else [f"checkpoint: {damage}"]
        yield ("checkpoint", damage, "passed over, with the reason; an older one is used", "0", "", equal(result))


def run_worker_cases(server: ForkServer, folder: Path, wrong: list[str]) -> Iterator[tuple[str, ...]]:
    """A row per case of a worker process."""
    for case in worker_cases():
        outcome = run_worker_case(case, server, folder)
        wrong += [f"{case.name}: {what}" for what in faults_found(case, outcome)]
        print(f"{case.name}: {outcome.detection_s:.2f} s")
        yield row(case, outcome)


def row(case: Case, outcome: Outcome) -> tuple[str, ...]:
    """One line of the table."""
    hangs = case.fault == "hang in C"
    timeouts_s = TIMEOUT_S if case.role == LOADER else STALL_S + JOIN_S
    waits = f" of which {timeouts_s:g} s are the test's timeouts" if hangs else ""
    told = "" if case.exit_code == 0 else f"{outcome.detection_s:.1f} s{waits}"
    code = "0" if case.exit_code == 0 else str(case.exit_code)
    later = "as expected" if case.fault.startswith("NaN") else equal(outcome.same_parameters)
    return (case.role, case.fault, case.outcome, code, told, later)


def equal(is_equal: bool) -> str:
    """Of the parameters after a resume."""
    return "bit-equal" if is_equal else "DIFFERS"


def table(rows: list[tuple[str, ...]]) -> str:
    """Markdown."""
    lines = [HEADER, tuple("---" for _ in HEADER), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
