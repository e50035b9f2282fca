"""Every fault in every role: detected, told, cleaned up, and resumed as if nothing had happened."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fork_server import ForkServer, fork_server
from tests.reliability.cases import DAMAGES, Case, all_cases
from tests.reliability.harness import Harness, faults_found
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
    outcome = harness.run(case)
    assert not faults_found(case, outcome), f"{faults_found(case, outcome)}\n{outcome.output}"


SIX_AND_TWO = (f"pipeline.targets=[{', '.join(['cpu'] * 6)}]", "pipeline.drafters=[cpu, cpu]")


@pytest.fixture(scope="module")
def full_harness(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Harness:
    return Harness(server, tmp_path_factory.mktemp("six-and-two"), SIX_AND_TWO)


@pytest.mark.parametrize(("role", "nth"), [("target", 26), ("drafter", 12)])
def test_one_of_six_targets_or_of_two_drafters_fails(role: str, nth: int, full_harness: Harness) -> None:
    """So late that the 14 slots which targets may be ahead lie behind the first checkpoint."""
    case = Case(role, "exception", 1, "RuntimeError: made to fail", traceback=True)
    outcome = full_harness.run(case, nth)
    assert not faults_found(case, outcome), f"{faults_found(case, outcome)}\n{outcome.output}"


@pytest.mark.parametrize("case", list(worker_cases()), ids=lambda case: case.name)
def test_fault_in_a_worker_process(case: Case, server: ForkServer, tmp_path: Path) -> None:
    outcome = run_worker_case(case, server, tmp_path)
    assert not faults_found(case, outcome), f"{faults_found(case, outcome)}\n{outcome.output}"


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_by_name(damage: str, harness: Harness) -> None:
    assert harness.run_damaged(damage)
