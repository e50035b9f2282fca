from __future__ import annotations

import pytest

from helixctl.profiling.owners import Crew, in_order, role_of

CREW = Crew(
    stages=("drafter-0", "drafter-1", "target-0", "target-0-post", "reader-0"),
    by_thread_id={11: "target-0", 12: "target-0-post"},
    devices={"drafter-0": "cuda:2", "drafter-1": "cuda:3"},
)


@pytest.mark.parametrize(
    ("thread_id", "os_name", "owner"),
    [
        (11, "python", "target-0"),
        (90, "target-0-post", "target-0-post"),
        (91, "pt_autograd_3", "drafter-1"),
        (92, "pt_autograd_0", "drafter-0"),
        (93, "pt_data_pin", "reader-0"),
        (94, "cuda-EvtHandlr", "cuda-EvtHandlr"),
        (7, "python", "main"),
    ],
)
def test_every_thread_has_an_owner(thread_id, os_name, owner):
    assert CREW.owner(thread_id, os_name, pid=7) == owner


def test_a_stage_with_a_long_name_is_known_by_its_first_15_bytes():
    crew = Crew(stages=("a-stage-with-a-long-name",))
    assert crew.owner(3, "a-stage-with-a-", pid=1) == "a-stage-with-a-long-name"


def test_roles_and_their_order():
    assert [role_of(name) for name in ("reader-3", "target-0", "target-10-post", "drafter-1", "main")] == [
        "reader",
        "target",
        "post",
        "drafter",
        "other",
    ]
    assert [role_of(name) for name in ("filler", "trainer-2")] == ["filler", "trainer"]
    assert in_order(["main", "drafter-0", "reader-0", "target-0"]) == ["reader-0", "target-0", "drafter-0", "main"]
