"""Rules on facts made by hand; whether facts are right is for other tests, `test_culprits.py` above all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from helixctl.profiling.bottleneck import judge
from helixctl.profiling.facts import Facts, GpuFacts
from helixctl.profiling.host import HostUse
from helixctl.profiling.slowdown import Slowdown
from helixctl.profiling.stalls import Stalls
from tests.profiling.subjects import (
    DRAFTER_BOUND,
    EVEN,
    EVERYBODY_WAITS,
    READER_BOUND,
    TARGET_BOUND,
    channel_use,
    facts,
    stage_facts,
)

HOST = HostUse(num_cores=8, busy_share=0.5, steal_share=0.0, throttled_share=0.0, load=4.0)


def gpu(util_pct: float, **changes: Any) -> GpuFacts:
    usual: dict[str, Any] = {"throttled_share": 0.0, "throttles": (), "missing": {}}
    means = {"util_pct": util_pct, **changes.pop("means", {})}
    return GpuFacts("GPU-1", "H200", means, **{**usual, **changes})


def target(**changes: Any) -> dict[str, Any]:
    return {"target-0": stage_facts("target-0", **changes)}


def codes(found: Facts) -> list[str]:
    return [finding.code for finding in judge(found).findings]


@pytest.mark.parametrize(
    ("waits", "code"),
    [(TARGET_BOUND, "V1"), (DRAFTER_BOUND, "V2"), (READER_BOUND, "V3"), (EVEN, "V7")],
)
def test_the_busiest_stage_limits(waits, code):
    verdict = judge(facts(waits))
    assert verdict.headline.code == code
    assert verdict.headline.advice
    assert verdict.confidence == "good"


@pytest.mark.parametrize(
    ("changes", "gpus", "code"),
    [
        ({"leaf_shares": {"cuda.sync": 0.7}, "on_cpu_share": 0.98}, (gpu(96),), "V1a"),
        ({"leaf_shares": {"cuda.launch": 0.38, "cuda.sync": 0.1}}, (gpu(55),), "V1b"),
        ({"leaf_shares": {"cuda.sync": 0.4}}, (gpu(55),), "V1c"),
        ({"leaf_shares": {"cuda.alloc": 0.25}}, (gpu(55),), "V1d"),
        ({"on_cpu_share": 0.9, "cores": 0.9, "system_share": 0.4, "minor_faults_per_s": 9e4}, (), "V1d"),
        ({"on_cpu_share": 0.1, "run_queue_share": 0.5}, (), "V1f"),
        ({"on_cpu_share": 0.95, "blocked_share": 0.05}, (), "V1g"),
        ({"on_cpu_share": 0.01, "leaf_shares": {"wait.lock": 0.9}}, (), "V1h"),
    ],
)
def test_why_a_target_is_slow(changes, gpus, code):
    verdict = judge(facts(TARGET_BOUND, target(**changes), gpus=gpus))
    assert verdict.headline.code == "V1"
    assert verdict.cause is not None and verdict.cause.code == code
    assert verdict.cause.title in verdict.title


def test_the_gil_comes_before_the_core_and_names_its_holder():
    stages = {"reader-0": stage_facts("reader-0", gil_share=0.9, top_frames=(("encode (text.py:3)", 0.8),))}
    stages |= target(run_queue_share=0.4)
    cause = judge(facts(TARGET_BOUND, stages, gil_share=0.97)).cause
    assert cause is not None and cause.code == "V1e"
    assert "reader-0" in cause.advice and cause.detail == ("encode (text.py:3)",)


def test_without_stacks_the_gil_is_suspected_and_what_cannot_be_told_is_said():
    stages = target(voluntary_per_s=200.0, blocked_share=0.6, on_cpu_share=0.2)
    found = facts(TARGET_BOUND, stages, gil_share=None, ticks=0, stacks_problem="py-spy was refused: ...")
    verdict = judge(found)
    assert verdict.headline.code == "V1"
    suspected = next(finding for finding in verdict.findings if finding.code == "V1e")
    assert (suspected.title, suspected.level) == ("probably GIL-bound", "moderate")
    assert any("py-spy was refused" in what for what in verdict.unknown)
    assert verdict.confidence == "fair"


def test_a_gpu_without_native_stacks_is_not_guessed_about():
    verdict = judge(facts(TARGET_BOUND, gpus=(gpu(55),)))
    assert verdict.title == "drafters starved: target-bound"
    assert any("--native" in what for what in verdict.unknown)


def test_a_thread_that_computes_while_its_gpu_has_room_is_named_and_a_reader_is_not_asked_about_gpus():
    verdict = judge(facts(TARGET_BOUND, target(on_cpu_share=0.9, cores=0.9), gpus=(gpu(40),)))
    assert verdict.cause is not None and verdict.cause.code == "V1b"
    assert "launch- or GIL-bound" in verdict.title and "--cuda" in verdict.cause.advice
    backward = {"drafter-0": stage_facts("drafter-0", on_cpu_share=0.2, cores=0.9)}  # in a native thread
    assert "launch- or GIL-bound" in judge(facts(DRAFTER_BOUND, backward, gpus=(gpu(40),))).title
    reader = {"reader-0": stage_facts("reader-0", on_cpu_share=0.95, cores=0.95)}
    cause = judge(facts(READER_BOUND, reader, gpus=(gpu(40),))).cause
    assert cause is not None and cause.code == "V3g"


def test_a_stage_on_a_cpu_is_not_judged_by_a_gpu_of_the_host_and_others_by_their_own():
    cpu = target(on_cpu_share=0.9, cores=0.9, device="cpu")
    cause = judge(facts(TARGET_BOUND, cpu, gpus=(gpu(97),))).cause
    assert cause is not None and cause.code == "V1g"
    mine, other = gpu(95), GpuFacts("GPU-2", "H200", {"util_pct": 10.0}, 0.0, (), {})
    own, uuids = target(device="cuda:0"), {"cuda:0": "GPU-1"}
    cause = judge(facts(TARGET_BOUND, own, gpus=(mine, other), gpu_uuids=uuids)).cause
    assert cause is not None and (cause.code, cause.numbers["gpu_util_pct"]) == ("V1a", 95)


def test_what_two_stages_share_is_told_once():
    waits = {"reader": (0.0, 0.02), "target": (0.05, 0.0), "post": (0.9, 0.0), "drafter": (0.7, 0.0)}
    found = codes(facts(waits, gil_share=0.95))
    assert found.count("V3e") + found.count("V1e") == 1


def test_a_quota_counts_as_starvation():
    host = HostUse(num_cores=8, busy_share=0.5, steal_share=0.0, throttled_share=0.4, load=4.0)
    cause = judge(facts(TARGET_BOUND, host=host)).cause
    assert cause is not None and cause.numbers["quota_throttled_share"] == 0.4


def test_two_stages_that_limit_together():
    waits = {"reader": (0.0, 0.02), "target": (0.05, 0.0), "post": (0.9, 0.0), "drafter": (0.7, 0.0)}
    verdict = judge(facts(waits))
    assert (verdict.headline.code, verdict.headline.title) == ("V3+V1", "reader and target limit together")


def test_waits_everywhere_mean_too_few_micro_batches_in_flight():
    assert judge(facts(EVERYBODY_WAITS)).headline.code == "V7s"


def test_nothing_that_fits_is_said():
    waits = {"reader": (0.0, 0.1), "target": (0.5, 0.0), "post": (0.9, 0.0), "drafter": (0.5, 0.0)}
    waits["reader"] = (0.4, 0.0)
    verdict = judge(facts(waits))
    assert verdict.headline.title == "INCONCLUSIVE"
    assert "no rule fits" in verdict.headline.advice


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"seconds": 4.0}, "4.0 s of at least 10 s"),
        ({"ticks": 50}, "50 looks"),
        ({"warmed_up": False}, "set-up was not over"),
        ({"slowdown": Slowdown(100.0, 0.3, 0.02), "profiler_cores": 1.0, "host": HOST}, "30 % slower"),
    ],
)
def test_too_little_data_is_inconclusive_and_the_suspect_is_still_named(changes, reason):
    verdict = judge(facts(TARGET_BOUND, **changes))
    assert verdict.headline.code == "V0"
    assert any(reason in why for why in verdict.headline.detail)
    assert "V1" in [finding.code for finding in verdict.findings]


def test_failed_looks_are_left_out_and_the_pipeline_counts_for_itself():
    """As on a GPU whose threads launch kernels all the time: their stacks change under every third look."""
    busy = {name: stage_facts(name, on_cpu_share=0.9, cores=0.9, gil_share=0.99) for name in ("target-0", "drafter-0")}
    for waits, title in ((TARGET_BOUND, "drafters starved: target-bound"), (EVEN, "balanced")):
        verdict = judge(facts(waits, busy, gpus=(gpu(14),), gil_share=0.99, ticks=170, error_share=0.32))
        assert verdict.title == f"{title}, launch- or GIL-bound: the GPU waits for this thread"
        assert "32.0 % errors" in verdict.basis and verdict.confidence == "fair"
        assert any("32 % of the looks failed" in what for what in verdict.unknown)


def test_a_process_that_only_stacks_tell_of_is_not_judged_by_failed_looks():
    worker = stage_facts("worker", on_cpu_share=0.9, gil_share=0.95)
    found = replace(facts({}, stages={}, pipeline=None, gil_share=0.95, error_share=0.2), stages=(worker,))
    headline = judge(found).headline
    assert headline.code == "V0" and headline.detail == ("20 % of the looks failed",)


@pytest.mark.parametrize("error_share, cores", [(0.15, 1.0), (0.02, 0.01)])
def test_a_loss_within_its_error_or_beyond_the_profilers_means_is_not_held_against_it(error_share, cores):
    slowdown = Slowdown(100.0, 0.3, error_share)
    assert "V0" not in codes(facts(TARGET_BOUND, slowdown=slowdown, profiler_cores=cores, host=HOST))


def test_long_stalls_lead_and_short_ones_follow():
    long, short = (Stalls(5, share, 0.5, 1.5, "drafter", 1.0) for share in (0.35, 0.08))
    assert codes(facts(DRAFTER_BOUND, stalls=long))[:2] == ["V6", "V2"]
    assert codes(facts(DRAFTER_BOUND, stalls=short))[0] == "V2"
    assert "V6" in codes(facts(DRAFTER_BOUND, stalls=short))


def test_a_failed_run_leads_whatever_else_there_is():
    verdict = judge(facts(DRAFTER_BOUND, failure="stage 'drafter-0' failed: NotFinite", seconds=1.0))
    assert verdict.has_failed
    assert verdict.headline.title == "dead stage: drafter-0"


def test_a_thread_that_is_gone_is_a_dead_stage():
    assert judge(facts(DRAFTER_BOUND, vanished=("target-0",))).headline.title == "dead stage: target-0"


def test_a_stage_that_takes_nothing_though_something_is_there_hangs():
    found = facts({**TARGET_BOUND, "drafter": (0.0, 0.0)})
    assert found.pipeline is not None
    stuck = channel_use("features", "target-0-post", "drafter-0", received=0, held=2)
    pipeline = type(found.pipeline)(**{**found.pipeline.__dict__, "channels": (*found.pipeline.channels[:2], stuck)})
    verdict = judge(facts({**TARGET_BOUND, "drafter": (0.0, 0.0)}, pipeline=pipeline))
    assert verdict.headline.title == "hung stage: drafter"


def test_links_and_throttling_are_told_beside_the_limit():
    slow = gpu(50, means={"pcie_limit_bytes_per_s": 60e9, "pcie_rx_bytes_per_s": 50e9})
    hot = gpu(50, throttled_share=0.3, throttles=("thermal (hardware)",))
    found = judge(facts(TARGET_BOUND, gpus=(slow, hot))).findings
    assert [(f.code, f.title) for f in found if f.code in ("V4", "V5")] == [
        ("V4", "transfer-bound: PCIe of H200"),
        ("V5", "GPU throttled (thermal (hardware))"),
    ]


def test_a_process_without_stages_is_judged_by_its_threads():
    busy = stage_facts("worker", on_cpu_share=0.9, gil_share=0.95, top_frames=(("parse (x.py:1)", 0.9),))
    found = facts({}, stages={}, pipeline=None, gil_share=0.95)
    verdict = judge(type(found)(**{**found.__dict__, "stages": (busy,)}))
    assert verdict.headline.code == "V1e" and verdict.headline.detail == ("parse (x.py:1)",)
    assert codes(type(found)(**{**found.__dict__, "stages": (busy,), "gil_share": 0.3})) == ["T"]
