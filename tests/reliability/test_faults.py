"""Every fault in every role: detected, told, cleaned up, and resumed as if nothing had happened."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fork_server import ForkServer, fork_server
from tests.reliability.cases import DAMAGES, Case, all_cases, lm_cases
from tests.reliability.harness import CAUSAL_LM, Harness, judge
from tests.reliability.worker_cases import run_worker_case, worker_cases

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with fork_server() as running:
        yield running


@pytest.fixture(scope="module")
def harness(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Harness:
    return Harness(server, tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize("case", list(all_cases()), ids=lambda case: case.name)
def test_fault(case: Case, harness: Harness) -> None:
    outcome, found = judge(case, lambda: harness.run(case))
    assert not found, f"{found}\n{outcome.output}"


@pytest.fixture(scope="module")
def lm_harness(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Harness:
    return Harness(server, tmp_path_factory.mktemp("causal-lm"), world=CAUSAL_LM)


QUICK_LM_CASES = [case for case in lm_cases() if case.fault != "hang in C" or case.role == "causal LM trainer"]
"""Of hangs, which cost their timeouts, one is enough here; scripts/reliability has all."""


@pytest.mark.parametrize("case", QUICK_LM_CASES, ids=lambda case: case.name)
def test_fault_in_a_causal_lm(case: Case, lm_harness: Harness) -> None:
    outcome, found = judge(case, lambda: lm_harness.run(case))
    assert not found, f"{found}\n{outcome.output}"


SIX_AND_TWO = (f"pipeline.targets=[{', '.join(['cpu'] * 6)}]", "pipeline.drafters=[cpu, cpu]")


@pytest.fixture(scope="module")
def full_harness(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Harness:
    return Harness(server, tmp_path_factory.mktemp("six-and-two"), SIX_AND_TWO)


@pytest.mark.parametrize(("role", "nth"), [("target", 26), ("drafter", 12)])
def test_one_of_six_targets_or_of_two_drafters_fails(role: str, nth: int, full_harness: Harness) -> None:
    """So late that the 14 slots which targets may be ahead lie behind the first checkpoint."""
    case = Case(role, "exception", 1, "RuntimeError: made to fail", traceback=True)
    outcome, found = judge(case, lambda: full_harness.run(case, nth))
    assert not found, f"{found}\n{outcome.output}"


@pytest.mark.parametrize("case", list(worker_cases()), ids=lambda case: case.name)
def test_fault_in_a_worker_process(case: Case, server: ForkServer, tmp_path: Path) -> None:
    outcome, found = judge(case, lambda: run_worker_case(case, server, tmp_path))
    assert not found, f"{found}\n{outcome.output}"


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_by_name(damage: str, harness: Harness) -> None:
    assert harness.run_damaged(damage)
