"""What the renderer shows, as titles, labels and texts. Prints nothing."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from helixctl.cli.source_tables import mix_rows, source_rows
from helixctl.cli.values import format_bytes, format_millions, format_value

if TYPE_CHECKING:
    from helixctl.data.prepare import PrepareResult
    from helixctl.decoding.calibration import Calibrations
    from helixctl.memory import MemoryLine
    from helixctl.plan import Plan
    from helixctl.training.results import SourceResult, TrainResult, ValidationResult
    from helixctl.training.runs import RunSummary

UNKNOWN = "unknown until `helixctl prepare` has run"


def plan_sections(plan: Plan) -> Iterator[tuple[str, dict[str, str]]]:
    """A plan, section by section; the memory table is apart."""
    recipe, target, drafter = plan.recipe, plan.target, plan.recipe.drafter
    yield (
        "target",
        {
            "model": recipe.target.model,
            "shape": f"{target.model_type}, {target.num_layers} layers of {target.hidden_size}, "
            f"vocabulary {target.vocab_size:,}",
            "dtype": plan.target_dtype + (f", products in {plan.float8}" if plan.float8 else ""),
            "devices": devices_of(tuple(" and ".join(span) for span in plan.target_spans)),
        },
    )
    yield (
        "drafter",
        {
            "algorithm": f"{drafter.algorithm}, {count_of(drafter.num_layers, 'layer')}, "
            f"{format_millions(plan.parameters)} parameters"
            + (f", {format_millions(plan.frozen_parameters)} more frozen" if plan.frozen_parameters else ""),
            "taps": ", ".join(str(i) for i in plan.target_layer_ids)
            + (", and the last hidden state" if plan.last_hidden else ""),
            "blocks": f"{drafter.block_size} tokens, {drafter.num_anchors} anchors per row, "
            f"mask token {drafter.mask_token_id}",
            "dtype": f"{plan.compute_dtype}, float32 masters",
            "devices": devices_of(plan.drafter_devices),
        },
    )
    yield "data", _data_rows(plan)
    yield "training", _training_rows(plan)


def memory_table(lines: tuple[MemoryLine, ...]) -> Table:
    """Items down, devices across; devices with the same items share a column."""
    devices = list(dict.fromkeys(line.device for line in lines))
    columns: dict[tuple[tuple[str, int], ...], list[str]] = {}
    for device in devices:
        items = tuple((line.name, line.num_bytes) for line in lines if line.device == device)
        columns.setdefault(items, []).append(device)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    for _ in columns:
        table.add_column(justify="right")
    table.add_row("", *(_device_range(names) for names in columns.values()))
    for name in dict.fromkeys(line.name for line in lines):
        table.add_row(name, *(format_bytes(dict(items)[name]) if name in dict(items) else "" for items in columns))
    table.add_row("together", *(format_bytes(sum(size for _, size in items)) for items in columns), style="bold")
    return table


def run_table(runs: Sequence[RunSummary]) -> Table:
    """Runs down; state, steps, the best value of what chooses their checkpoints, speed."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("run", "state", "step", "best", "tokens/s"):
        table.add_column(title, justify="right" if title in ("step", "tokens/s") else "left", overflow="fold")
    for run in runs:
        best = "" if run.best is None else f"{run.metric} {run.best:.4g} at {run.best_step:,}"
        steps = f"{run.step:,}/{run.total_steps:,}" if run.total_steps else f"{run.step:,}"
        speed = "" if run.tokens_per_s is None else f"{run.tokens_per_s:,.0f}"
        table.add_row(run.dir, run.state, steps, best, speed)
    return table


def prepare_rows(result: PrepareResult) -> dict[str, str]:
    """The account of `prepare`: everything read is kept or dropped for a reason, with examples."""
    counts = result.manifest.splits
    rows = {
        "store": str(result.store.path),
        "read": f"{result.read:,} documents in {result.elapsed_s:.1f} s",
        "kept": f"{result.kept:,}: {counts['train'].documents:,} for training (repeats included), "
        f"{counts['validation'].documents:,} held out",
        "tokens": f"{result.tokens:,}, {100 * result.supervised_share:.1f} % of them supervised",
    }
    rows |= source_rows(result.manifest)
    notes = {
        "duplicates": (result.duplicates, "seen before, kept"),
        "cut": (result.num_truncated, "longer than data.seq_len"),
        "left out": (result.num_left_out, "nothing to predict within data.seq_len"),
    }
    rows |= {name: f"{count:,}, {why}" for name, (count, why) in notes.items() if count}
    for reason, count in sorted(result.dropped.items()):
        rows[f"dropped: {reason}"] = "\n".join([f"{count:,}", *result.examples.get(reason, ())])
    return rows


def train_rows(result: TrainResult) -> dict[str, str]:
    """The end of a run: how far, how fast, how good, and where everything is."""
    rows = {
        "run": result.run_dir,
        "steps": f"{result.steps:,} of {result.total_steps:,}",
        "speed": f"{result.tokens_per_s:,.0f} tokens/s over {result.train_seconds:,.1f} s",
    }
    if result.loss is not None:
        rows["loss"] = f"{result.loss:.4g}"
    rows |= {name: format_value(name, value) for name, value in result.validation.items()}
    if result.best_value is not None:
        rows["best"] = f"{result.best_value:.4g} at step {result.best_step:,}"
    if result.checkpoint is not None:
        rows["checkpoint"] = result.checkpoint
    for device, size in result.peak_memory_bytes.items():
        predicted, own = result.predicted_memory_bytes.get(device), result.process_memory_bytes.get(device)
        itself = f" ({format_bytes(own)} the process itself)" if own else ""
        told = f", {format_bytes(predicted)} predicted{itself}: {100 * predicted / size:.0f} %" if predicted else ""
        rows[f"peak memory, {device}"] = f"{format_bytes(size)}{told}"
    if result.compile_cache:
        seconds = ", ".join(f"{name} {compiled['seconds']:.1f} s" for name, compiled in result.compiled.items())
        rows["compiled"] = f"{seconds}; cache: {result.compile_cache}"
    if result.accounting:
        rows["accounting"] = "\n".join(f"{name}: {count:,}" for name, count in result.accounting.items())
    for name, waits in result.pipeline.items():
        rows[f"waits, {name}"] = ", ".join(
            f"{what.removesuffix('_wait_s')} {seconds:,.1f} s" for what, seconds in waits.items()
        )
    return rows


def validation_sections(result: ValidationResult) -> Iterator[tuple[str, dict[str, str]]]:
    """What `validate` found, section by section; the tables by source are apart."""
    rows = {"checkpoint": result.checkpoint, "step": str(result.step)}
    yield "validated", {**rows, **{name: format_value(name, value) for name, value in result.held_out.items()}}
    parts = {
        "live decoding": _speed_rows(result),
        "greedy output": _greedy_rows(result),
        "sampled output": _sample_rows(result),
        "proofs": _proof_rows(result),
    }
    yield from ((title, found) for title, found in parts.items() if found)


def source_table(result: ValidationResult) -> Table:
    """Sources down, and all together where there are several."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("source", "prompts", "turns", "tokens", "score", "accept_len", "same as greedy"):
        table.add_column(title, justify="left" if title == "source" else "right", overflow="fold")
    for one in _all_sources(result):
        counts = [f"{count:,}" for count in (one.num_prompts, one.num_turns, one.num_tokens)]
        means = ["" if mean is None else f"{mean:.3f}" for mean in (one.score, one.accept_len)]
        table.add_row(one.source, *counts, *means, "" if one.identical is None else f"{one.identical:,}")
    return table


def position_table(result: ValidationResult) -> Table:
    """Positions of the block down, sources across: the share of the drafts there that were accepted."""
    shown = _all_sources(result)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("position", *(one.source for one in shown)):
        table.add_column(title, justify="right")
    for place in range(max((len(one.positions) for one in shown), default=0)):
        found = [one.positions[place : place + 1] for one in shown]
        table.add_row(str(place + 1), *(f"{100 * own[0].share:.1f} %" if own else "" for own in found))
    return table


def confidence_table(found: Calibrations) -> Table:
    """What the drafter expected of its drafts, and the share that was accepted: bins down."""
    from helixctl.decoding.calibration import by_bin

    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("expected", "drafts", "mean", "accepted", "where reached: drafts", "mean", "accepted"):
        table.add_column(title, justify="right")
    for low, high, *both in by_bin(found):
        cells = (
            (f"{one.num_drafts:,}", f"{one.predicted:.3f}", f"{one.accepted:.3f}") if one else ("", "", "")
            for one in both
        )
        table.add_row(f"{low:.1f} to {high:.1f}", *itertools.chain.from_iterable(cells))
    return table


def _all_sources(result: ValidationResult) -> list[SourceResult]:
    return [*result.sources, *([result.total] if result.total is not None and len(result.sources) > 1 else [])]


def _speed_rows(result: ValidationResult) -> dict[str, str]:
    """Acceptance length and tokens per second of live decoding."""
    rows: dict[str, str] = {}
    if result.total is not None and result.total.score is not None:
        rows["score"] = f"{result.total.score:.3f} tokens per target forward, mean over prompts of each prompt's mean"
    if result.accept_len is not None:
        rows["accept_len"] = f"{result.accept_len:.3f} over all cycles, bonus token included"
    if result.total is not None and result.total.accepted_per_verified is not None:
        rows["drafts"] = (
            f"{result.total.verified_per_cycle:.2f} verified per cycle, "
            f"{100 * result.total.accepted_per_verified:.1f} % of them accepted"
        )
    if result.confidence is not None:
        found = result.confidence
        rows["confidence"] = (
            f"calibration error {found.survival.error:.3f} up to the draft, {found.reached.error:.3f} where reached, "
            f"{found.survival.num_drafts:,} drafts"
        )
    if result.accept_len_shuffled is not None:
        rows["with shuffled features"] = f"{result.accept_len_shuffled:.3f}"
    if result.plain_tokens_per_s and result.speculative_tokens_per_s:
        factor = result.speculative_tokens_per_s / result.plain_tokens_per_s
        rows["speed"] = (
            f"{result.speculative_tokens_per_s:,.1f} tokens/s with the drafter, "
            f"{result.plain_tokens_per_s:,.1f} without: {factor:.2f}x, one prompt at a time"
        )
    for speed in result.speeds[1:]:
        factor = speed.speculative_tokens_per_s / speed.plain_tokens_per_s
        rows[f"speed, {speed.batch_size} at a time"] = (
            f"{speed.speculative_tokens_per_s:,.1f} tokens/s with the drafter, "
            f"{speed.plain_tokens_per_s:,.1f} without: {factor:.2f}x"
        )
    if result.settings is not None:
        rows["settings"] = ", ".join(f"{k} {v}" for k, v in vars(result.settings).items() if v is not None)
    if result.turns_left_out:
        rows["turns left out"] = f"{result.turns_left_out:,}: no room behind their history"
    return rows


def _greedy_rows(result: ValidationResult) -> dict[str, str]:
    """Losslessness, one line per precision."""
    return {
        check.dtype: f"{check.identical} of {check.prompts} identical, {check.near_ties} near-ties"
        + (f" (noise {check.noise:.2g})" if check.noise is not None else "")
        + f", {check.different} different"
        for check in result.greedy
    }


def _sample_rows(result: ValidationResult) -> dict[str, str]:
    """Whether samples have the target's distribution."""
    found = result.samples
    if found is None:
        return {}
    state = "yes" if found.holds else "NO"
    return {
        "the target's distribution": f"{state}: chi-square {found.chi_square:.1f}, p = {found.p_value:.2g}, "
        f"{found.num_tokens:,} tokens, {found.impossible:,} behind the cut"
    }


def _proof_rows(result: ValidationResult) -> dict[str, str]:
    """Proofs on the user's model."""
    return {proof.name: f"{'passed' if proof.passed else 'FAILED'}: {proof.detail}" for proof in result.proofs}


def _data_rows(plan: Plan) -> dict[str, str]:
    data = plan.recipe.data
    packed = "packed" if plan.packing else "one document each"
    rows = {"store": str(data.store), "rows": f"{data.seq_len:,} tokens, {packed}"}
    if plan.train_documents is None:
        return {**rows, "documents": UNKNOWN}
    rows["documents"] = f"{plan.train_documents:,} for training, {plan.validation_documents:,} held out"
    rows |= mix_rows(plan.mix)
    if data.curriculum.epochs:
        rows["order"] = f"short documents first in {count_of(data.curriculum.epochs, 'epoch')}"
    rows["supervised"] = f"{100 * (plan.supervised_share or 0):.1f} % of the tokens"
    rows["anchors cover"] = f"{100 * (plan.anchor_coverage or 0):.1f} % of the supervised tokens in an epoch"
    return rows


def _training_rows(plan: Plan) -> dict[str, str]:
    train, validation = plan.recipe.train, plan.recipe.validation
    accumulated = f" x {train.grad_accum_steps} accumulated" if train.grad_accum_steps > 1 else ""
    drafters = f" x {plan.num_drafters} drafters" if plan.num_drafters > 1 else ""
    rows = {
        "step": f"{count_of(plan.rows_per_step, 'row')}, about {plan.tokens_per_step:,} tokens: "
        f"{train.micro_batch_rows} per micro-batch{accumulated}{drafters}",
        "steps": UNKNOWN
        if plan.total_steps is None
        else f"{plan.total_steps:,}, {plan.warmup_steps:,} of them warm-up",
        "learning rate": f"{train.learning_rate:g}, {train.schedule}",
        "validation": f"every {validation.every_steps:,} steps, "
        f"{count_of(plan.validation_batches, 'micro-batch', 'es')}"
        if plan.validation_batches
        else "off",
        "pipeline": f"{count_of(len(plan.target_devices), 'target loop')}, "
        f"{count_of(len(plan.drafter_devices), 'drafter loop')} with {count_of(plan.num_slots, 'slot')} each, "
        f"{count_of(plan.threads, 'CPU thread')} per stage",
        "checkpoints": f"every {plan.recipe.checkpoint.every_steps:,} steps in {plan.recipe.run.dir}, "
        f"{format_bytes(plan.disk_bytes_per_checkpoint)} each",
    }
    if plan.world.size > 1:
        rows["processes"] = f"{plan.world.size}, of which this is number {plan.world.rank}; each as above"
    return rows


def count_of(number: int, noun: str, plural: str = "s") -> str:
    """A number and what is counted, in the right form."""
    return f"{number:,} {noun}{plural if number != 1 else ''}"


def devices_of(devices: tuple[str, ...]) -> str:
    """Devices, each once, with how many loops they have."""
    return ", ".join(f"{n} x {device}" if n > 1 else device for device, n in Counter(devices).items())


def _device_range(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
