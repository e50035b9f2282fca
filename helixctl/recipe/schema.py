"""The recipe: every option, its default and its unit, in one place.

Sections are strict (unknown keys are errors) and frozen. A drafter's own options live in its plug-in folder
(``models/drafters/<algorithm>/options.py``) and are checked by ``load.py``. Never imports torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Auto = Literal["auto"]


class Section(BaseModel):
    """Base of every group of options: unknown keys are errors, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class RunOptions(Section):
    """Where a run lives and what makes it repeatable."""

    dir: Path
    """Run directory: recipe, plan, metrics, checkpoints."""
    seed: NonNegativeInt = 0
    """Seeds document order, packing, anchors, initial weights and noise."""
    deterministic: bool = False
    """Bit-equal repeats on GPUs: no autotuning, deterministic kernels. CPU runs always are."""


class TargetOptions(Section):
    """The frozen model whose hidden states train the drafter."""

    model: str
    """Folder of a Hugging Face checkpoint, or a hub name."""
    config: Path | None = None
    """A stored config.json, used by `plan` when the model itself is not on this machine."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Weights and compute. auto: the checkpoint's own; float32 on a CPU without bfloat16 instructions."""
    quantization: Literal["auto", "none", "fp8"] = "auto"
    """What is served: fp8 does the products of the layers in float8, activations quantised token by token. auto: as
    the checkpoint is stored; none: in `dtype`, a float8 checkpoint too."""
    attention: Literal["auto", "segments", "flex", "dense"] = "auto"
    """How packed documents are kept apart: a call per document, compiled flex_attention, or one dense mask (slow)."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the target's layers with flex attention; off: segments. auto: on a GPU, or where `compile.mode` is on."""
    feature_cache_mib: NonNegativeInt = 0
    """Memory for features of documents already seen, per target loop and on its device: a set that fits needs one
    target pass. They are computed one document at a time; by a compiled target, in the rows of the first epoch. 0
    computes them anew for every row."""
    features: Path | None = None
    """Folder that `prepare --features` wrote: `train` reads features there, and runs no target. Decoding does."""
    trust_remote_code: bool = False
    """Run Python code that the checkpoint brings along."""


class DatasetOptions(Section):
    """A Hugging Face dataset; reading it needs the extra `datasets`."""

    name: str
    """Hub name, or a folder: of data files, or written by `save_to_disk`."""
    config: str | None = None
    """Name of the dataset's configuration, where it has several."""
    split: str = "train"
    """Name of the split, or a slice of it such as `train[:1000]`."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    streaming: bool = False
    """Read over the network while `prepare` works, in place of downloading everything into the local cache."""


class SourceOptions(Section):
    """One set of training documents: files, or a Hugging Face dataset."""

    path: Path | None = None
    """JSONL (may end in .gz), Parquet or text file, or a folder of them."""
    dataset: DatasetOptions | None = None
    """In place of `path`."""
    name: str | None = None
    """What tables call it; left out, the name of the file, folder or dataset."""
    format: str = "chat"
    """chat, text or tokens: a plug-in in data/formats."""
    weight: PositiveFloat = 1.0
    """How often its documents stand in an epoch: 1 is once each, 0.25 exactly a quarter, 2.5 two or three times
    each."""
    share: Fraction | None = None
    """Share of all training tokens that it has to make up; `prepare` fails when it is off by more than 0.01."""
    field: str | None = None
    """Name of the JSON field or column that holds the conversation or text, where it is not the usual one."""
    include: tuple[str, ...] = ()
    """Of a folder, only files that match a pattern such as `*.py`; left out, those of the format."""
    exclude: tuple[str, ...] = ()
    """Patterns of files and folders below `path` that are left out, such as `site-packages`."""

    @model_validator(mode="after")
    def _has_one_place(self) -> SourceOptions:
        if (self.path is None) == (self.dataset is None):
            raise ValueError("should have either `path` or `dataset`")
        return self

    @property
    def label(self) -> str:
        """What tables call the source."""
        if self.name or self.dataset is None:
            return self.name or str(self.path and self.path.name)
        split = "" if self.dataset.split == "train" else f" {self.dataset.split}"
        return self.dataset.name.rpartition("/")[2] + split

    @property
    def place(self) -> str:
        """Where it is, for messages and for the store."""
        if self.dataset is None:
            return str(self.path)
        return f"{self.dataset.name}[{self.dataset.split}]"


class HeldOutOptions(Section):
    """Documents kept for validation."""

    fraction: Fraction = 0.01
    """Share of conversations, chosen by a hash of their prompt: all answers to one prompt go to one split."""
    sources: tuple[SourceOptions, ...] = ()
    """Files used for validation only, in addition to the share."""


class RegenerateOptions(Section):
    """How `prepare --regenerate` lets the target write the answers."""

    prompts: Path | None = None
    """JSONL of prompts (`prompt`, `messages` or `turns`); their answers go to the file of the first training source."""
    max_new_tokens: PositiveInt = 512
    """Longest answer, in tokens."""
    batch_size: PositiveInt = 32
    """Prompts decoded together."""
    temperature: NonNegativeFloat = 0.0
    """0 is greedy."""
    samples: NonNegativeInt = 0
    """Further answers to every prompt, drawn at `sample_temperature`: more of the target's own text to learn from."""
    sample_temperature: PositiveFloat = 0.7
    """Temperature of the further answers."""


class StoreOptions(Section):
    """Documents in, a store of tokens out."""

    train: tuple[SourceOptions, ...] = Field(min_length=1)
    """Sources of training documents."""
    validation: HeldOutOptions = HeldOutOptions()
    """Held-out documents."""
    store: Path
    """Folder that `prepare` writes and `train` reads."""
    seq_len: PositiveInt = 2048
    """Tokens per row; a drafter's documents are cut here."""
    mask_policy: Literal["all_turns", "last_turn"] = "all_turns"
    """Which assistant turns are supervised."""
    workers: NonNegativeInt = 2
    """Processes that `prepare` uses (started by spawn); 0 works in this process."""
    max_dropped: Fraction = 0.5
    """`prepare` fails when a larger share of documents is dropped."""


class CurriculumOptions(Section):
    """Short documents first; off unless `epochs` is given."""

    epochs: NonNegativeInt = 0
    """So many epochs, from the first on, go from short documents to long ones; the others are in random order."""
    spread: Fraction = 0.25
    """Documents are mixed with those up to so large a share of the epoch away; 0 sorts them strictly."""


class DataOptions(StoreOptions):
    """Documents in, rows out."""

    packing: bool = True
    """Several documents per row; off: one document per row."""
    curriculum: CurriculumOptions = CurriculumOptions()
    """Order of documents by their length."""
    regenerate: RegenerateOptions = RegenerateOptions()
    """Options of `prepare --regenerate`."""


class ScheduleOptions(Section):
    """How long, and with which learning rates. A step is always an optimizer step."""

    epochs: PositiveInt | None = None
    """Passes over the training documents; give epochs or steps."""
    steps: PositiveInt | None = None
    """Optimizer steps; give epochs or steps."""
    learning_rate: PositiveFloat = 6.0e-4
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Shape after warm-up; wsd holds the peak, then falls over the last `decay_ratio` of the steps."""
    warmup_ratio: Fraction = 0.04
    """Share of the steps with a rising learning rate."""
    warmup_steps: NonNegativeInt | None = None
    """The same in optimizer steps, whatever the accumulation; used in place of the share where it is given."""
    decay_ratio: Fraction = 0.2
    """Share of the steps that wsd spends falling."""
    min_lr_ratio: Fraction = 0.0
    """Final learning rate over the peak."""

    def warmup_of(self, total_steps: int) -> int:
        """Steps with a rising learning rate, of so many in all."""
        return (
            round(self.warmup_ratio * total_steps) if self.warmup_steps is None else min(self.warmup_steps, total_steps)
        )


class StepOptions(Section):
    """What one optimizer step is made of."""

    micro_batch_rows: PositiveInt = 1
    """Rows that go through the pipeline together."""
    pass_rows: Auto | PositiveInt = "auto"
    """Rows that go through the trained model's forward and backward together; fewer need less memory."""
    grad_accum_steps: PositiveInt = 1
    """Micro-batches per training loop and step."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """AdamW's moment decays."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay; never on norms."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradient clipping threshold, over all parameters."""
    compute_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Matrix products of what is trained; masters are always float32. auto: bfloat16 where the hardware has it."""
    max_bad_steps: PositiveInt = 3
    """Stop after this many consecutive steps whose loss or gradient norm is not finite."""
    max_bad_fraction: Fraction = 0.01
    """Stop when a larger share of the documents had features that are not finite; up to that they are left out."""
    log_every_steps: PositiveInt = 10
    """Steps per logged window."""


class TrainOptions(ScheduleOptions, StepOptions):
    """The optimizer loop. A step is always an optimizer step."""


class PassOptions(Section):
    """Validation during training, and the defaults of `helixctl validate`."""

    every_steps: NonNegativeInt = 500
    """0 turns it off."""
    rows: PositiveInt = 64
    """Rows per pass, rounded up to whole micro-batches."""
    max_new_tokens: PositiveInt = 128
    """Longest answer decoded by `validate`, in tokens."""
    num_workers: NonNegativeInt = 0
    """Reserved for loaders that use processes; validation reads the store with threads."""


class ValidationOptions(PassOptions):
    """Validation during training, and the defaults of `helixctl validate`."""

    live_prompts: NonNegativeInt = 8
    """Held-out prompts decoded by `validate`, and 8 of them at most after every validation pass; 0 decodes none."""
    live_new_tokens: PositiveInt = 48
    """Longest answer after a validation pass, in tokens: enough cycles for a trend, few enough to cost seconds."""
    batch_size: PositiveInt = 8
    """Prompts decoded together."""


class LoopOptions(Section):
    """How far the stages may run ahead, and how long they may stand still."""

    readers: PositiveInt = 1
    """Reader threads."""
    slots: Auto | PositiveInt = "auto"
    """Input buffers per training loop; auto: the smallest number that never stalls."""
    stall_timeout_s: PositiveFloat = 300.0
    """A run without any progress for this long ends with a report."""
    start_timeout_s: PositiveFloat = 1800.0
    """Longest time for loading, compiling and warming up."""
    threads: Auto | PositiveInt = "auto"
    """CPU threads of each compute stage on a CPU run."""


class TargetSpan(Section):
    """One target loop over several devices, for a target that does not fit one of them."""

    devices: tuple[str, ...] = Field(min_length=1)
    """In the order of the layers, e.g. [cuda:0, cuda:1]; features come out on the last."""


class PipelineOptions(LoopOptions):
    """Which devices run what, and how far the stages may run ahead."""

    targets: Auto | tuple[str | TargetSpan, ...] = "auto"
    """Devices of the target loops, e.g. [cuda:0, cuda:1]; `{devices: [cuda:0, cuda:1]}` is one loop over two GPUs."""
    drafters: Auto | tuple[str, ...] = "auto"
    """Devices of the drafter loops."""
    transport: Literal["auto", "peer", "pinned"] = "auto"
    """How features cross devices."""


class CompileOptions(Section):
    """torch.compile."""

    mode: Literal["auto", "on", "off"] = "auto"
    """auto: on a GPU. on: on a CPU too (minutes of compilation; for tests of it). off: everywhere as it is written, for
    debugging; `train --eager` is the same."""
    cache: Path | None = None
    """File that `warmup-compile` writes and `train` reads; null: the one that fits, in ~/.cache/helixctl/compile."""
    graphs: Literal["auto", "on", "off"] = "auto"
    """Whether a drafter's training pass is replayed from a CUDA graph; auto: where it is short. Targets always are."""
    on_recompile: Literal["fail", "warn"] = "fail"
    """What a recompilation after warm-up does."""

    def covers(self, device: str) -> bool:
        """Whether work on ``device`` (`cpu`, `cuda:0`) is compiled."""
        return self.mode == "on" or (self.mode == "auto" and device != "cpu")


class CheckpointOptions(Section):
    """What is saved, when, and how many are kept."""

    every_steps: PositiveInt = 500
    """Steps between checkpoints; the last step always saves."""
    keep_last: PositiveInt = 3
    """Newest checkpoints kept, beside the best."""
    best: str = "auto"
    """Metric that chooses the best checkpoint; larger is better, unless it ends in `loss`. auto: `val/accept_len_live`,
    or `val/accept_len` where no prompts are decoded during training."""


class MetricsOptions(Section):
    """Where numbers go."""

    sinks: tuple[str, ...] = ("console", "jsonl", "tensorboard")
    """Plug-ins in metrics/sinks."""


class RecipeSections(Section):
    """Sections of every recipe, whatever is trained."""

    run: RunOptions
    compile: CompileOptions = CompileOptions()
    metrics: MetricsOptions = MetricsOptions()


class Recipe(RecipeSections):
    """What the user wrote, checked, for a drafter. `drafter` holds the options object of the chosen plug-in."""

    kind: Literal["drafter"] = "drafter"
    """What is trained."""
    target: TargetOptions
    data: DataOptions
    drafter: Any
    train: TrainOptions = TrainOptions()
    validation: ValidationOptions = ValidationOptions()
    pipeline: PipelineOptions = PipelineOptions()
    checkpoint: CheckpointOptions = CheckpointOptions()

    @property
    def text_model(self) -> TargetOptions:
        """Whose tokenizer makes tokens of documents."""
        return self.target


class DrafterOptions(Section):
    """Options that every drafter algorithm has; plug-ins extend it in their options.py."""

    algorithm: str
    """Name of a plug-in folder in models/drafters."""
    num_layers: PositiveInt = 5
    """Decoder layers of the drafter."""
    num_taps: PositiveInt | None = None
    """Number of tapped target layers, spread evenly; default: num_layers. Ignored when target_layer_ids is given."""
    target_layer_ids: tuple[NonNegativeInt, ...] | None = None
    """0-based target layers whose output is captured."""
    block_size: Annotated[int, Field(ge=2)] = 16
    """Tokens drafted per block, the anchor included."""
    num_anchors: PositiveInt = 512
    """Blocks per row."""
    anchors_per_document: PositiveInt | None = None
    """At most so many of them in one document, in training; null: as many as the row has room for."""
    mask_token_id: NonNegativeInt
    """Fills the rest of a block: a row of the embedding that never occurs in text; not eos, not pad."""
    init_from: Path | None = None
    """Folder of a published drafter for the same target, whoever made it, whose weights training starts from. What the
    recipe does not say of the drafter's sizes, taps, block and mask token is then taken from its configuration."""
    freeze: tuple[str, ...] = ()
    """Parts whose weights stay as they are, by the names of the published tensors: `fc`, `layers.0`, `layers.*.mlp`."""

    @property
    def tells_confidence(self) -> bool:
        """Whether decoding learns from such a drafter how sure it is of its drafts."""
        return False
