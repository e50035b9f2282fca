"""The recipe of ``kind: causal_lm``: options that a drafter's recipe does not have. See schema.py for those of both.

Never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt

from helixctl.errors import Problem
from helixctl.recipe.schema import (
    Auto,
    CheckpointOptions,
    HeldOutOptions,
    LoopOptions,
    PassOptions,
    RecipeSections,
    ScheduleOptions,
    Section,
    SourceOptions,
    StepOptions,
    StoreOptions,
)


class ModelOptions(Section):
    """The model that is trained: any causal LM of transformers, new or from a checkpoint, and its tokenizer."""

    config: Path | dict[str, Any] | None = None
    """A new model with random weights: a config.json, or its content: `model_type`, `vocab_size`, `hidden_size`, ..."""
    checkpoint: str | None = None
    """Folder of a Hugging Face checkpoint, or a hub name, whose weights training starts from; instead of config."""
    tokenizer: str | None = None
    """Base of the HelixTokenizer: a folder or a hub name such as gpt2; left out, the checkpoint's own."""
    attention: Literal["auto", "segments", "flex", "dense"] = "auto"
    """How packed documents are kept apart: a call per document, compiled flex_attention, or one dense mask (slow)."""
    trust_remote_code: bool = False
    """Run Python code that the checkpoint brings along."""

    @property
    def tokenizer_base(self) -> str:
        """What the tokenizer is built on."""
        base = self.tokenizer or self.checkpoint
        assert base is not None, "load.py checks that there is one"
        return base


class LMDataOptions(StoreOptions):
    """Documents in, windows of `seq_len` tokens out."""

    packing: Literal["continuous", "document"] = "continuous"
    """continuous: documents, each with its end-of-text token, one behind the other, cut every seq_len tokens;
    document: a window holds one document or a part of it."""
    stride: PositiveInt | None = None
    """With packing document: tokens from one window of a document to the next; left out, seq_len (no overlap)."""
    min_tail_len: Annotated[int, Field(ge=2)] = 2
    """A last window with fewer new tokens is left out, and counted."""


class StageDataOptions(Section):
    """Other documents for one stage, such as chats for instruct tuning; the rest is as in `data`."""

    train: tuple[SourceOptions, ...] = Field(min_length=1)
    """Sources of training documents."""
    validation: HeldOutOptions = HeldOutOptions()
    """Held-out documents."""
    store: Path
    """Folder that `prepare` writes and `train` reads; another than data.store."""
    mask_policy: Literal["all_turns", "last_turn"] = "all_turns"
    """Which assistant turns of chats are learnt; plain text is learnt whole."""


class StageOptions(ScheduleOptions):
    """A part of the training with a learning-rate schedule of its own; documents are shuffled anew in each."""

    tokens: PositiveInt | None = None
    """Tokens to train on, rounded up to whole steps; give tokens, epochs or steps."""
    optimizer: Literal["carry", "fresh"] = "carry"
    """carry: Adam's moments go on from the stage before; fresh: they begin at zero."""
    data: StageDataOptions | None = None
    """Documents of this stage where they are not those of `data`."""


class LMStepOptions(StepOptions):
    """The optimizer loop, the same in all stages."""

    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay; never on norms, biases and embeddings."""


class LMPassOptions(PassOptions):
    """Validation during training, and `helixctl validate`."""

    prompts: tuple[str, ...] = ()
    """Texts that the model continues after every pass."""
    temperature: NonNegativeFloat = 0.0
    """Of these samples; 0 is greedy."""


class LMLoopOptions(LoopOptions):
    """Which devices train, and how far the readers may run ahead."""

    trainers: Auto | tuple[str, ...] = "auto"
    """Devices of the training loops of one process; auto: one loop on the first GPU, or on the CPU. Start one process
    per GPU with torchrun."""


class LMCheckpointOptions(CheckpointOptions):
    """What is saved, when, and how many are kept."""

    best: str = "val/loss"
    """Metric that chooses the best checkpoint; smaller is better if it ends in `loss` or `perplexity`."""


class CausalLMRecipe(RecipeSections):
    """What the user wrote, checked, for a causal LM."""

    kind: Literal["causal_lm"] = "causal_lm"
    """What is trained."""
    model: ModelOptions
    data: LMDataOptions
    stages: tuple[StageOptions, ...] = Field(min_length=1)
    """One after the other."""
    train: LMStepOptions = LMStepOptions()
    validation: LMPassOptions = LMPassOptions()
    pipeline: LMLoopOptions = LMLoopOptions()
    checkpoint: LMCheckpointOptions = LMCheckpointOptions()

    @property
    def text_model(self) -> ModelOptions:
        """Whose tokenizer makes tokens of documents."""
        return self.model


def stage_data(recipe: CausalLMRecipe, stage: int) -> LMDataOptions:
    """The documents of one stage: `data`, with what the stage replaces."""
    own = recipe.stages[stage].data
    return (
        recipe.data
        if own is None
        else recipe.data.model_copy(update={n: getattr(own, n) for n in type(own).model_fields})
    )


def data_sections(recipe: CausalLMRecipe) -> tuple[LMDataOptions, ...]:
    """Every store that the recipe needs, once, in the order of first use."""
    found = {data.store: data for data in (stage_data(recipe, stage) for stage in range(len(recipe.stages)))}
    return tuple(found.values())


def check_together(recipe: CausalLMRecipe) -> Iterator[Problem]:
    """Rules between options; single values are fine by now. Places are filled in by the caller."""
    yield from _check_model(recipe.model)
    yield from _check_data(recipe)
    for i, stage in enumerate(recipe.stages):
        given = [name for name in ("epochs", "steps", "tokens") if getattr(stage, name) is not None]
        if len(given) != 1:
            text = f"{' and '.join(given)} are given" if given else "none of epochs, steps and tokens is given"
            yield Problem(
                f"stages.{i}", text, fix="keep one" if given else "add `epochs: 1`, `steps: 1000` or `tokens: 1.0e9`"
            )
    if recipe.stages[0].optimizer == "fresh":
        text = "is fresh, and the first stage always begins with a fresh optimizer"
        yield Problem("stages.0.optimizer", text, fix="leave it out")


def _check_model(model: ModelOptions) -> Iterator[Problem]:
    if (model.config is None) == (model.checkpoint is None):
        text = (
            "both config and checkpoint are given"
            if model.config is not None
            else "neither config nor checkpoint is given"
        )
        yield Problem("model", text, fix="config for a new model, checkpoint to go on from weights")
    if model.tokenizer is None and model.checkpoint is None:
        yield Problem("model.tokenizer", "is required with a config", fix="name a base such as gpt2, or a folder")
    if isinstance(model.config, dict) and "model_type" not in model.config:
        yield Problem("model.config", "has no model_type", fix="add `model_type: llama` or another of transformers")


def _check_data(recipe: CausalLMRecipe) -> Iterator[Problem]:
    data = recipe.data
    if data.stride is not None and data.packing == "continuous":
        yield Problem("data.stride", "has no meaning with packing continuous", fix="leave it out, or pack by document")
    elif data.stride is not None and data.stride > data.seq_len:
        text = f"is {data.stride}, which would leave tokens out between windows of {data.seq_len}"
        yield Problem("data.stride", text, fix=f"use 1 to {data.seq_len}")
    if data.min_tail_len > data.seq_len:
        yield Problem("data.min_tail_len", f"is more than data.seq_len {data.seq_len}", fix="use a smaller number")
    stores = [stage.data.store for stage in recipe.stages if stage.data is not None]
    for i, stage in enumerate(recipe.stages):
        if stage.data is not None and (stage.data.store == data.store or stores.count(stage.data.store) > 1):
            text = "is the store of other documents too"
            yield Problem(
                f"stages.{i}.data.store", text, fix="give every stage with documents of its own another folder"
            )
