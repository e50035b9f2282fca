"""What ``validate`` found, as one self-contained page or one Markdown text: tables, charts, every prompt.

The page shows each answer in the colours of who proposed its pieces. Markdown has bars made of characters, which every
viewer shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from helixctl.checkpoint.atomic import write_output
from helixctl.decoding.acceptance import PositionAcceptance
from helixctl.decoding.calibration import Calibrations, by_bin
from helixctl.metrics import names, page
from helixctl.metrics.charts import bar_chart, line_chart
from helixctl.metrics.history import History, read_history
from helixctl.training.results import PromptResult, SourceResult, TurnResult, ValidationResult

_STYLE = """
details { margin: 0 0 4px; } summary { cursor: pointer; } .answer { white-space: pre-wrap; overflow-wrap: anywhere; }
.said { color: var(--dim); white-space: pre-wrap; overflow-wrap: anywhere; margin: 6px 0 2px; }
.draft { color: var(--good); } .bonus { color: var(--ready); } .prefill { color: var(--cpu); }
"""
_CURVES = (names.VAL_ACCEPT_LEN, names.LIVE_ACCEPT_LEN)
_SCORE_NOTE = "score: mean over prompts of each prompt's mean; accept_len: over all cycles, so long answers weigh more"
_POSITION_NOTE = "share of the drafts at each position of the block that were accepted; 1 follows the anchor"
_REACHED_NOTE = "the same among the blocks whose earlier drafts were all accepted"
_CONFIDENCE_NOTE = (
    "what the drafter expected of the verified drafts, and how many were accepted: the block up to a draft, which is "
    "what a threshold cuts, and the draft itself where those before it were accepted"
)
_TRAINING_NOTE = "along the training run that this checkpoint comes from, by step"
_BAR_WIDTH = 20
_SPARKS = "▁▂▃▄▅▆▇█"


def write_validation(result: ValidationResult, path: Path, run_dir: Path) -> None:
    """Write the page (``path`` ends in .html) or the text (.md).

    Raises:
        UsageError: it cannot be written.
    """
    history = read_history(run_dir)
    content = make_text(result, history) if path.suffix == ".md" else make_validation_page(result, history)
    write_output(path, content, "--report")


def make_validation_page(result: ValidationResult, history: History) -> str:
    """The page's text; ``history`` is the run's, for the curves over training."""
    passed = _passed(result)
    verdict = f'<p class="verdict {"good" if passed else "fail"}">{escape(_verdict(result))}</p>\n'
    return page.make_page(_title(result), _sections(result, history), intro=verdict, style=_STYLE)


def make_text(result: ValidationResult, history: History) -> str:
    """The Markdown text."""
    parts = [f"# {_title(result)}", _verdict(result)]
    if result.sources:
        rows = [_source_row(source) for source in _all_sources(result)]
        parts += ["## Sources", _SCORE_NOTE, _markdown_table(_SOURCE_HEADS, rows)]
        parts += ["## Acceptance by position", _POSITION_NOTE, _position_table(result)]
    if result.confidence is not None:
        rows = _confidence_rows(result.confidence)
        parts += ["## Confidence", f"{_CONFIDENCE_NOTE}; {_errors(result.confidence)}"]
        parts += [_markdown_table(_CONFIDENCE_HEADS, rows)]
    spark = [(name, history.finite(name)) for name in _CURVES]
    if any(curve for _, curve in spark):
        lines = [[name, _spark(curve), f"{curve[-1][1]:.3f}"] for name, curve in spark if curve]
        parts += ["## Over training", _TRAINING_NOTE, _markdown_table(["metric", "first to last step", "last"], lines)]
    for heading, rows_of in _fact_sections(result):
        parts += [f"## {heading}", _markdown_table(["", ""], [[k, page.text(v)] for k, v in rows_of.items()])]
    if result.prompts:
        parts += ["## Prompts", _markdown_table(_PROMPT_HEADS, [_prompt_row(prompt) for prompt in result.prompts])]
    return "\n\n".join(parts) + "\n"


def _title(result: ValidationResult) -> str:
    return f"Validation of {Path(result.checkpoint).name}, step {result.step:,}"


def _passed(result: ValidationResult) -> bool:
    return result.lossless and all(proof.passed for proof in result.proofs)


def _verdict(result: ValidationResult) -> str:
    """One paragraph that says what matters."""
    said = []
    if result.total is not None and result.total.accept_len is not None and result.total.score is not None:
        total = result.total
        said.append(
            f"{total.score:.3f} tokens per target forward (mean over {total.num_prompts} prompts), "
            f"{total.accept_len:.3f} over all cycles."
        )
    for check in result.greedy:
        said.append(
            f"{check.identical} of {check.prompts} answers in {check.dtype} are plain greedy decoding's, "
            f"{check.near_ties} differ at a near-tie, {check.different} elsewhere."
        )
    if result.samples is not None:
        state = "drawn from the target's distribution" if result.samples.holds else "NOT from the target's distribution"
        said.append(f"{result.samples.num_tokens:,} sampled tokens are {state} (p = {result.samples.p_value:.2g}).")
    failed = [proof.name for proof in result.proofs if not proof.passed]
    if result.proofs:
        said.append(f"Failed: {'; '.join(failed)}." if failed else f"All {len(result.proofs)} proofs passed.")
    return " ".join(said) or "Nothing was decoded."


_SOURCE_HEADS = [
    *("source", "prompts", "turns", "tokens", "score", "accept_len"),
    *("verified per cycle", "accepted of them", "same as greedy"),
]
_CONFIDENCE_HEADS = [
    "expected",
    *("up to the draft: drafts", "expected, mean", "accepted"),
    *("where reached: drafts", "expected, mean", "accepted"),
]
_PROMPT_HEADS = ["source", "prompt", "turns", "tokens", "cycles", "accept_len", "same as greedy"]


def _sections(result: ValidationResult, history: History) -> Iterator[str]:
    if result.sources:
        rows = [_source_row(source) for source in _all_sources(result)]
        yield page.section("Sources", page.table(_SOURCE_HEADS, rows), note=_SCORE_NOTE, wide=True)
    scores = {source.source: source.score for source in result.sources if source.score is not None}
    yield from page.charted("Score by source", bar_chart(scores, "score by source"))
    yield from _position_chart("Acceptance by position", result, lambda p: p.share, _POSITION_NOTE)
    yield from _position_chart("Acceptance where reached", result, lambda p: p.conditional, _REACHED_NOTE)
    if result.confidence is not None:
        yield from _confidence_sections(result.confidence)
    curves = line_chart({name: history.finite(name) for name in _CURVES}, "acceptance length over training")
    yield from page.charted("Acceptance length over training", curves, _TRAINING_NOTE)
    for heading, rows_of in _fact_sections(result):
        yield page.section(heading, page.facts(rows_of))
    if result.prompts:
        listed = "".join(_prompt_details(prompt) for prompt in result.prompts)
        note = "green: drafted and accepted, orange: the target's own, blue: the first token"
        yield page.section(f"All {len(result.prompts)} prompts", listed, note=note, wide=True)


def _position_chart(
    heading: str, result: ValidationResult, height: Callable[[PositionAcceptance], float], note: str
) -> Iterator[str]:
    shown = _all_sources(result)
    lines = {source.source: [(p.position, height(p)) for p in source.positions] for source in shown}
    yield from page.charted(heading, line_chart(lines, heading), note)


def _confidence_sections(found: Calibrations) -> Iterator[str]:
    lines = {
        "up to the draft": [(one.predicted, one.accepted) for one in found.survival.bins],
        "where reached": [(one.predicted, one.accepted) for one in found.reached.bins],
        "as expected": [(0.0, 0.0), (1.0, 1.0)],
    }
    chart = line_chart(lines, "accepted by what the drafter expected")
    yield from page.charted("Accepted by what the drafter expected", chart, _CONFIDENCE_NOTE)
    listed = page.table(_CONFIDENCE_HEADS, _confidence_rows(found))
    yield page.section("Confidence", listed, note=_errors(found), wide=True)


def _confidence_rows(found: Calibrations) -> list[list[Any]]:
    """Bins down, and all drafts."""
    rows: list[list[Any]] = []
    for low, high, *both in by_bin(found):
        cells = [[one.num_drafts, _mean(one.predicted), _mean(one.accepted)] if one else [None] * 3 for one in both]
        rows.append([f"{low:.1f} to {high:.1f}", *cells[0], *cells[1]])
    whole = [[one.num_drafts, _mean(one.predicted), _mean(one.accepted)] for one in (found.survival, found.reached)]
    return [*rows, ["all", *whole[0], *whole[1]]]


def _errors(found: Calibrations) -> str:
    survival, reached = found.survival.error, found.reached.error
    return f"expected calibration error: {survival:.3f} up to the draft, {reached:.3f} where reached"


def _all_sources(result: ValidationResult) -> list[SourceResult]:
    """The sources, and all together where there are several."""
    return [*result.sources, *([result.total] if result.total is not None and len(result.sources) > 1 else [])]


def _source_row(source: SourceResult) -> list[Any]:
    same = None if source.identical is None else f"{source.identical} of {source.num_turns}"
    means = [_mean(source.score), _mean(source.accept_len), _mean(source.verified_per_cycle)]
    share = None if source.accepted_per_verified is None else f"{100 * source.accepted_per_verified:.1f} %"
    return [source.source, source.num_prompts, source.num_turns, source.num_tokens, *means, share, same]


def _prompt_row(prompt: PromptResult) -> list[Any]:
    compared = [turn.identical for turn in prompt.turns if turn.identical is not None]
    same = f"{sum(compared)} of {len(prompt.turns)}" if compared else None
    counts = [len(prompt.turns), prompt.num_tokens, prompt.num_cycles]
    return [prompt.source, prompt.id, *counts, _mean(prompt.accept_len), same]


def _mean(value: float | None) -> str | None:
    return None if value is None else f"{value:.3f}"


def _fact_sections(result: ValidationResult) -> Iterator[tuple[str, dict[str, Any]]]:
    """Headings, and names with values."""
    checks: dict[str, Any] = {proof.name: f"{_state(proof.passed)}: {proof.detail}" for proof in result.proofs}
    if result.samples is not None:
        found = result.samples
        checks["samples have the target's distribution"] = (
            f"{_state(found.holds)}: chi-square {found.chi_square:.1f}, p = {found.p_value:.2g}, "
            f"{found.num_tokens:,} tokens, {found.impossible} of them behind the cut"
        )
    if checks:
        yield "Checks", checks
    if result.settings is not None:
        yield "Settings", {name: value for name, value in vars(result.settings).items() if value is not None}
    speeds: dict[str, float | str | None] = {
        f"tokens per second, {_together(speed.batch_size)}": f"{page.text(speed.speculative_tokens_per_s)} with the "
        f"drafter, {page.text(speed.plain_tokens_per_s)} without"
        for speed in result.speeds
    }
    speeds |= {
        "acceptance length with shuffled features": result.accept_len_shuffled,
        "turns left out: no room behind their history": result.turns_left_out or None,
    }
    known = {name: value for name, value in speeds.items() if value is not None}
    if known:
        yield "Speed and control", known
    if result.held_out:
        yield "Held-out rows", result.held_out


def _together(batch_size: int) -> str:
    return "one prompt at a time" if batch_size == 1 else f"{batch_size} prompts together"


def _state(passed: bool) -> str:
    return "passed" if passed else "FAILED"


def _prompt_details(prompt: PromptResult) -> str:
    source, name, turns, tokens, cycles, mean, same = _prompt_row(prompt)
    facts = [
        f"accept_len {page.text(mean)}",
        f"{tokens} tokens in {cycles} cycles",
        f"{turns} turn{'' if turns == 1 else 's'}",
    ]
    facts += [f"same as greedy: {same}"] if same is not None else []
    head = f"<b>{escape(source)} {escape(name)}</b> <span class=dim>{escape(', '.join(facts))}</span>"
    return f"<details><summary>{head}</summary>{''.join(map(_turn_details, prompt.turns))}</details>"


def _turn_details(turn: TurnResult) -> str:
    pieces = "".join(f'<span class="{escape(s.kind)}">{escape(s.text)}</span>' for s in turn.segments)
    return f'<div class="said">{escape(turn.prompt)}</div><div class="answer">{pieces}</div>'


def _position_table(result: ValidationResult) -> str:
    """Positions down, sources across, each share with a bar."""
    shown = _all_sources(result)
    depth = max((len(source.positions) for source in shown), default=0)
    rows = []
    for place in range(depth):
        cells = [_share_cell(source.positions[place : place + 1]) for source in shown]
        rows.append([str(place + 1), *cells])
    return _markdown_table(["position", *(source.source for source in shown)], rows)


def _share_cell(found: Sequence[PositionAcceptance]) -> str:
    if not found:
        return ""
    filled = round(found[0].share * _BAR_WIDTH)
    return f"`{'█' * filled}{'░' * (_BAR_WIDTH - filled)}` {100 * found[0].share:.1f} %"


def _spark(curve: Sequence[tuple[int, float]]) -> str:
    """A curve in at most 40 characters, from its lowest to its highest value."""
    stride = max(1, -(-len(curve) // 40))
    values = [value for _, value in [*curve[:-1:stride], curve[-1]]]
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(_SPARKS[round((value - low) / span * (len(_SPARKS) - 1))] for value in values)


def _markdown_table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [heads, ["---"] * len(heads), *[[page.text(value) for value in row] for row in rows]]
    return "\n".join("| " + " | ".join(_cell(str(value)) for value in line) + " |" for line in lines)


def _cell(text: str) -> str:
    """Text that neither ends a cell nor a line, and is no markup."""
    flat = " ".join(text.split())
    return flat.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
