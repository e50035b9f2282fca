"""The table of docs/reliability.md holds every case, with the outcome that the cases promise."""

from __future__ import annotations

from scripts.reliability import BEGIN, CANNOT, HEADER, PAGE
from tests.reliability.cases import DAMAGES, IMPOSSIBLE, ISSUE_FAULTS, ISSUE_ROLES, Case, all_cases, lm_cases
from tests.reliability.worker_cases import worker_cases


def every_case() -> list[Case]:
    return [*all_cases(), *lm_cases(), *worker_cases()]


def rows() -> list[list[str]]:
    text = PAGE.read_text(encoding="utf-8")
    block = text[text.index(BEGIN) : text.index(CANNOT)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines() if line[:1] == "|"]


def test_the_page_is_that_of_the_cases() -> None:
    header, _, *found = rows()
    assert tuple(header) == HEADER
    expected = [[case.role, case.fault, case.outcome, str(case.exit_code)] for case in (*all_cases(), *lm_cases())]
    damages, processes = len(expected), list(worker_cases())
    assert [row[:4] for row in found[:damages]] == expected
    assert [row[1] for row in found[damages : damages + len(DAMAGES)]] == list(DAMAGES)
    assert [row[:3] for row in found[damages + len(DAMAGES) :]] == [[c.role, c.fault, c.outcome] for c in processes]
    assert {row[5] for row in found} == {"bit-equal", "as expected"}


def test_every_fault_in_every_role_is_a_row_or_cannot_be() -> None:
    """NaN, a full disk and so on, in readers, workers, targets and so on: nothing is left out without a reason."""
    rows_of = {(case.role, case.fault.removesuffix(" once").removesuffix(" everywhere")) for case in every_case()}
    wanted = {(role, fault) for role in ISSUE_ROLES for fault in ISSUE_FAULTS}
    assert not wanted - rows_of - set(IMPOSSIBLE)
    assert not rows_of & set(IMPOSSIBLE) and set(IMPOSSIBLE) <= wanted
    page = PAGE.read_text(encoding="utf-8")
    assert all(why in page for why in IMPOSSIBLE.values())


def test_every_role_fails_in_every_way_that_ends_a_process() -> None:
    pairs = {(case.role, case.fault) for case in all_cases()}
    roles = {role for role, _ in pairs}
    assert len(roles) == 7
    for fault in ("exception", "out of memory", "hang in C", "SIGTERM", "SIGKILL"):
        assert {role for role, own in pairs if own == fault} == roles
