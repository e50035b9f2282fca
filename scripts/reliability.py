"""Runs the cases of tests/reliability and writes their outcomes into docs/reliability.md, between two marks."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from tests.fork_server import ForkServer, fork_server
from tests.reliability.cases import DAMAGES, IMPOSSIBLE, STALL_S, Case, all_cases, lm_cases
from tests.reliability.faults import JOIN_S
from tests.reliability.harness import CAUSAL_LM, Harness, Outcome, judge
from tests.reliability.loader_program import TIMEOUT_S
from tests.reliability.worker_cases import LOADER, run_worker_case, worker_cases

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reliability.md"
BEGIN, END = "<!-- outcomes: written by scripts/reliability -->", "<!-- end of outcomes -->"
CANNOT = "What cannot happen:"
HEADER = ("role", "fault", "what happens", "exit code", "told after", "afterwards")


def main() -> int:
    """The number of cases whose outcome is wrong, at most 1."""
    wrong: list[str] = []
    with fork_server() as server, tempfile.TemporaryDirectory() as folder:
        harness = Harness(server, Path(folder) / "drafter")
        rows = list(run_cases(harness, all_cases(), wrong))
        rows += run_cases(Harness(server, Path(folder) / "causal-lm", world=CAUSAL_LM), lm_cases(), wrong)
        rows += run_damaged(harness, wrong)
        (workers := Path(folder) / "workers").mkdir()
        rows += run_worker_cases(server, workers, wrong)
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(HEADER, rows)}\n\n{reasons()}\n\n{END}{after}", encoding="utf-8")
    print("\n".join([f"{len(rows)} outcomes written to {PAGE}", *wrong]))
    return 1 if wrong else 0


def run_cases(harness: Harness, cases: Iterable[Case], wrong: list[str]) -> Iterator[tuple[str, ...]]:
    """A row per case; adds what is wrong to ``wrong``."""
    for case in cases:
        outcome, found = judge(case, partial(harness.run, case))
        wrong += [f"{case.name}: {what}" for what in found]
        print(f"{case.name}: {outcome.detection_s:.2f} s")
        yield row(case, outcome)


def run_damaged(harness: Harness, wrong: list[str]) -> Iterator[tuple[str, ...]]:
    """A row per way to damage the newest checkpoint."""
    for damage in DAMAGES:
        result = harness.run_damaged(damage)
        wrong += [] if result else [f"checkpoint: {damage}"]
        yield ("checkpoint", damage, "passed over, with the reason; an older one is used", "0", "", equal(result))


def run_worker_cases(server: ForkServer, folder: Path, wrong: list[str]) -> Iterator[tuple[str, ...]]:
    """A row per case of a worker process."""
    for case in worker_cases():
        outcome, found = judge(case, partial(run_worker_case, case, server, folder))
        wrong += [f"{case.name}: {what}" for what in found]
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


def reasons() -> str:
    """What is no row, by reason."""
    roles: dict[str, dict[str, None]] = {}
    faults: dict[str, dict[str, None]] = {}
    for (role, fault), why in IMPOSSIBLE.items():
        roles.setdefault(why, {})[role] = None
        faults.setdefault(why, {})[fault] = None
    rows = [(", ".join(roles[why]), ", ".join(faults[why]), why) for why in roles]
    return f"{CANNOT}\n\n{table(('role', 'fault', 'why not'), rows)}"


def table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Markdown."""
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
