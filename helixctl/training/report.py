"""``helixctl report``: one self-contained page about a run: curves, positions, waits, memory, recipe, environment.

Nothing is fetched and nothing leaves the page; whatever a run wrote is escaped. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from helixctl.checkpoint.atomic import write_output
from helixctl.errors import UsageError
from helixctl.metrics import names, page
from helixctl.metrics.charts import bar_chart, line_chart
from helixctl.metrics.history import History, read_history
from helixctl.training.environment import FILE as ENVIRONMENT_FILE
from helixctl.training.runs import RunSummary, is_run, read_json, summarise

FILE = "report.html"
_CURVES: dict[str, tuple[str, ...]] = {
    "Loss": (names.TRAIN_LOSS, names.VAL_LOSS),
    "Acceptance length": (names.TRAIN_ACCEPT_LEN, names.VAL_ACCEPT_LEN, names.LIVE_ACCEPT_LEN),
    "Perplexity": (names.VAL_PERPLEXITY,),
    "Accuracy": (names.TRAIN_ACCURACY, names.VAL_ACCURACY),
    "Throughput, tokens per second": (names.PERF_TOKENS_PER_S,),
    "Share of what the GPUs could compute": (names.PERF_MFU,),
    "Learning rate": (names.TRAIN_LEARNING_RATE,),
    "Gradient norm": (names.TRAIN_GRAD_NORM,),
    "Peak memory of the drafter's device, bytes": (names.MEMORY_PEAK_BYTES,),
}
_BY_STEP = "by step"
_NOTES = {"Acceptance length": "tokens per forward of the target, the target's own next token counted; by step"}


def write_report(run_dir: Path, output: Path | None = None) -> Path:
    """Write the page about a run; returns where it is.

    Raises:
        UsageError: not a run's directory, or the page cannot be written.
    """
    if not is_run(run_dir):
        raise UsageError(f"{run_dir} is no run", fix="name a run's directory; `helixctl runs FOLDER` lists them")
    path = output or run_dir / FILE
    write_output(path, make_page(run_dir), "--output")
    return path


def make_page(run_dir: Path) -> str:
    """The page's text."""
    run, history = summarise(run_dir), read_history(run_dir)
    return page.make_page(f"{run_dir.name}: {run.state}", _sections(run_dir, run, history))


def _sections(run_dir: Path, run: RunSummary, history: History) -> Iterator[str]:
    result = read_json(run_dir / "result.json")
    yield page.section("Run", page.facts(_overview(run, result)))
    for heading, shown in _CURVES.items():
        chart = line_chart({name: history.finite(name) for name in shown}, heading)
        yield from page.charted(heading, chart, _NOTES.get(heading, _BY_STEP))
    positions = {str(i + 1): share for i, share in enumerate(history.by_position(names.val_accuracy))}
    yield from page.charted(
        "Right drafts by position in the block", bar_chart(positions, "share of right drafts"), "share, held-out rows"
    )
    waits = _waits(result.get("pipeline") or {})
    yield from page.charted("Waits, seconds", page.bars(waits))
    waited = line_chart({names.PERF_WAIT_S: history.finite(names.PERF_WAIT_S)}, "waiting for features")
    yield from page.charted("The drafter waits for features, seconds per window", waited)
    memory = {name: size / 2**30 for name, size in (result.get("peak_memory_bytes") or {}).items()}
    yield from page.charted("Peak memory, GiB", page.bars(memory))
    if result.get("accounting"):
        yield page.section("Accounting", page.facts(result["accounting"]))
    if result.get("sources"):
        yield page.section("Documents by source", page.facts(_by_source(result["sources"])))
    environment = read_json(run_dir / ENVIRONMENT_FILE)
    if (size := environment.pop("memory_bytes", None)) is not None:
        environment["memory"] = f"{size / 2**30:.1f} GiB"
    if environment:
        yield page.section("Environment", page.facts(environment))
    recipe = (run_dir / "recipe.yaml").read_text(encoding="utf-8", errors="replace")
    yield page.section("Recipe", f"<pre>{escape(recipe)}</pre>", wide=True)


def _by_source(sources: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    return {
        name: f"{of['read']:,} read, {of['kept']:,} kept; {of['documents']:,} documents an epoch, "
        f"{of['tokens']:,} tokens ({of['share']:.1%} of all), {of['supervised']:,} supervised"
        for name, of in sources.items()
    }


def _overview(run: RunSummary, result: Mapping[str, Any]) -> dict[str, Any]:
    rows: dict[str, Any] = {
        "state": run.state,
        "steps": f"{run.step:,} of {run.total_steps:,}" if run.total_steps else f"{run.step:,}",
        "best": None if run.best is None else f"{run.metric} {run.best:.4g} at step {run.best_step:,}",
        "training loss": run.loss,
        "tokens per second": result.get("tokens_per_s") or run.tokens_per_s,
        "training time, s": result.get("train_seconds"),
        "error": run.error,
    }
    return {name: value for name, value in rows.items() if value is not None}


def _waits(pipeline: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    return {
        f"{channel} {what.removesuffix('_wait_s')}": seconds
        for channel, waits in pipeline.items()
        for what, seconds in waits.items()
    }
