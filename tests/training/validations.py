"""A validation result by hand, for whatever shows one."""

from __future__ import annotations

from helixctl.decoding.acceptance import PositionAcceptance
from helixctl.decoding.calibration import Bin, Calibration, Calibrations
from helixctl.training.results import (
    GreedyCheck,
    PromptResult,
    Proof,
    Segment,
    Settings,
    SourceResult,
    Speed,
    TurnResult,
    ValidationResult,
)


def make_source(name: str, score: float, accepted: tuple[int, ...]) -> SourceResult:
    """A source whose drafts were judged eight times at every position."""
    positions = tuple(PositionAcceptance(k, 8, 8, count) for k, count in enumerate(accepted, start=1))
    share = sum(accepted) / (8 * len(accepted))
    return SourceResult(name, 2, 3, 40, score, score - 0.1, 3, positions, float(len(accepted)), share)


CONFIDENCE = Calibrations(
    reached=Calibration(30, 0.8, 0.6, 0.2, (Bin(0.8, 0.9, 30, 0.8, 0.6),)),
    survival=Calibration(40, 0.5, 0.45, 0.05, (Bin(0.2, 0.3, 10, 0.25, 0.3), Bin(0.8, 0.9, 30, 0.85, 0.9))),
)
TURNS = (
    TurnResult("What is 1+1?", 3, 2.5, True, (Segment("It", "prefill"), Segment(" is", "draft"))),
    TurnResult("And <b>2+2</b>?", 1, None, False, (Segment("<i>4</i>", "prefill"),)),
)
VALIDATED = ValidationResult(
    checkpoint="run/checkpoints/step-100",
    step=100,
    held_out={"val/loss": 2.5},
    accept_len=2.125,
    accept_len_shuffled=1.25,
    prompts=(PromptResult("math", "q|1", 4, 2, 2.5, TURNS), PromptResult("talk", "mt/81", 1, 0, None, TURNS[1:])),
    greedy=(GreedyCheck("bfloat16", 8, 7, 1, 0, 0.125),),
    plain_tokens_per_s=100.0,
    speculative_tokens_per_s=150.0,
    proofs=(Proof("no leak", True, "bit for bit"), Proof("taps", False, "0.5 off")),
    settings=Settings(8, 128, 0.0, None, 1.0, 0, 4, 20, None),
    sources=(make_source("math", 2.3, (6, 4, 1)), make_source("talk", 1.4, (3, 1))),
    speeds=(Speed(1, 100.0, 150.0), Speed(8, 600.0, 660.0)),
    total=make_source("all", 2.2, (5, 3, 1)),
)
