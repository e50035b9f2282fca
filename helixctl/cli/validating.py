"""`helixctl validate`: what a checkpoint is worth, on held-out rows and by real decoding."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from helixctl.cli import render
from helixctl.cli.lm_tables import lm_validation_sections
from helixctl.cli.loading import AsJson, Checkpoint, Overrides, RecipePath, check_exists, load_any_plan
from helixctl.cli.options import grouped
from helixctl.cli.process import heavy_imports
from helixctl.errors import UsageError

if TYPE_CHECKING:
    from helixctl.lm_plan import CausalLMPlan
    from helixctl.training.validate import ValidationRequest

_PROMPTS, _DECODING, _OUTPUT = "Prompts", "Decoding", "Output"
_REPORTS = (".html", ".md")


@dataclass(frozen=True)
class PromptOptions:
    """What is decoded."""

    bench: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Prompts to decode, JSONL with `turns`, `prompt` or `messages`, instead of held-out ones; may be "
            "repeated.",
            rich_help_panel=_PROMPTS,
        ),
    ] = None
    skip: Annotated[
        int, typer.Option(min=0, metavar="N", help="Leave out the first N of every file.", rich_help_panel=_PROMPTS)
    ] = 0
    limit: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Decode N prompts of every file at most.", rich_help_panel=_PROMPTS),
    ] = None
    turns: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Play N turns of a conversation at most.", rich_help_panel=_PROMPTS),
    ] = None


@dataclass(frozen=True)
class DecodingOptions:
    """How it is decoded."""

    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Longest answer; the recipe's if left out.", rich_help_panel=_DECODING),
    ] = None
    block_size: Annotated[
        int | None,
        typer.Option(
            min=2,
            metavar="N",
            help="Tokens per block, the anchor included: at most the drafter's own.",
            rich_help_panel=_DECODING,
        ),
    ] = None
    confidence_threshold: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            metavar="P",
            help="Verify only drafts that the drafter expects to be accepted, with all before them, with this "
            "probability; 0 verifies all and measures what it expects.",
            rich_help_panel=_DECODING,
        ),
    ] = None
    tree_budget: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Verify a tree of the N likeliest drafts per cycle instead of one continuation.",
            rich_help_panel=_DECODING,
        ),
    ] = None
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 is greedy; else answers are sampled.", rich_help_panel=_DECODING)
    ] = 0.0
    top_k: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Sample from the N best tokens only.", rich_help_panel=_DECODING),
    ] = None
    top_p: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0, help="Sample from the best tokens that weigh so much only.", rich_help_panel=_DECODING
        ),
    ] = 1.0
    seed: Annotated[int, typer.Option(help="Of the samples.", rich_help_panel=_DECODING)] = 0
    acceptance_only: Annotated[
        bool,
        typer.Option(
            "--acceptance-only", help="Decode with the drafter and do nothing else.", rich_help_panel=_DECODING
        ),
    ] = False


@dataclass(frozen=True)
class OutputOptions:
    """What is written."""

    report: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Also write a page (.html) or a text (.md) with charts and tables; may be repeated.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None
    as_json: AsJson = False


@grouped
def validate(
    recipe: RecipePath,
    prompts: PromptOptions,
    decoding: DecodingOptions,
    output: OutputOptions,
    set_: Overrides = None,
    checkpoint: Checkpoint = None,
) -> None:
    """Measure a checkpoint: held-out metrics, real speculative decoding, losslessness, speed.

    The score is the mean over prompts of each prompt's mean acceptance length.

    Choose settings on some prompts (--skip 20), then score the others once (--limit 20).

    Fails when a proof fails, when greedy output differs, or samples have another distribution than the target's.
    """
    check_exists(checkpoint, "--checkpoint")
    for path in prompts.bench or ():
        check_exists(path, "--bench")
    _check_reports(output.report or [])
    from helixctl.plan import Plan

    plan = load_any_plan(recipe, set_, decodes=True)
    if not isinstance(plan, Plan):
        _validate_lm(plan, checkpoint, prompts, output)
        return
    with heavy_imports():
        from helixctl.training.validate import run_validation
        from helixctl.training.validation_page import write_validation
    with render.progress("validation") as show_progress:
        result = run_validation(
            plan,
            _request(checkpoint, prompts, decoding),
            on_progress=lambda what, done, total: show_progress(done, total, what),
        )
    for path in output.report or ():
        write_validation(result, path, plan.recipe.run.dir)
    if output.as_json:
        render.render_json(result)
    else:
        render.render_validation(result)
    if not (result.lossless and all(proof.passed for proof in result.proofs)):
        raise typer.Exit(1)


def _validate_lm(plan: CausalLMPlan, checkpoint: Path | None, prompts: PromptOptions, output: OutputOptions) -> None:
    """A causal LM: held-out loss and perplexity, samples, proofs."""
    if prompts.bench or output.report:
        fix = "name the texts to continue in validation.prompts"
        raise UsageError("--bench and --report are for drafters", fix=fix)
    with heavy_imports():
        from helixctl.training.lm_validate import run_lm_validation
    with render.progress("validation") as show_progress:
        result = run_lm_validation(
            plan, checkpoint=checkpoint, on_progress=lambda what, done, total: show_progress(done, total, what)
        )
    if output.as_json:
        render.render_json(result)
    else:
        for title, rows in lm_validation_sections(result):
            render.render_section(title, rows)
    if not all(proof.passed for proof in result.proofs):
        raise typer.Exit(1)


def _request(checkpoint: Path | None, prompts: PromptOptions, decoding: DecodingOptions) -> ValidationRequest:
    from helixctl.training.conversations import Choice
    from helixctl.training.validate import ValidationRequest

    return ValidationRequest(
        checkpoint=checkpoint,
        bench=tuple(prompts.bench or ()),
        choice=Choice(prompts.skip, prompts.limit, prompts.turns),
        max_new_tokens=decoding.max_new_tokens,
        block_size=decoding.block_size,
        confidence_threshold=decoding.confidence_threshold,
        tree_budget=decoding.tree_budget,
        temperature=decoding.temperature,
        top_k=decoding.top_k,
        top_p=decoding.top_p,
        seed=decoding.seed,
        acceptance_only=decoding.acceptance_only,
    )


def _check_reports(paths: list[Path]) -> None:
    """Refuse a report that cannot be written, before hours of decoding.

    Raises:
        UsageError: an unknown ending, or no folder to write to.
    """
    for path in paths:
        if path.suffix not in _REPORTS:
            raise UsageError(f"--report {path}: the ending must be one of {', '.join(_REPORTS)}", fix="rename it")
        if not path.parent.is_dir() or path.is_dir():
            raise UsageError(f"--report {path} cannot be written there", fix="name a file in a folder that exists")
