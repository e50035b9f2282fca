"""The plan of a causal LM: recipe + machine -> every derived number, as ``plan.py`` does for drafters.

Nothing is allocated and nothing is written; never imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from helixctl.devices import DtypeName, compute_dtype, stage_threads
from helixctl.errors import Problem, RecipeError
from helixctl.machine import Machine, World
from helixctl.memory import CUDA_LINE, PROCESS_LINE, MemoryLine, memory_problems, memory_warnings
from helixctl.models.drafters._memory import CPU_HEAD_CHUNK_ROWS, HEAD_CHUNK_ROWS
from helixctl.models.facts import DTYPE_BYTES, TargetFacts, read_model_facts, target_parameters
from helixctl.plan import Plan, check_pass_rows, make_plan
from helixctl.recipe.causal_lm import CausalLMRecipe, StageOptions, stage_data
from helixctl.recipe.load import AnyRecipe

if TYPE_CHECKING:
    from helixctl.data.store import MixLine
    from helixctl.data.window_count import WindowCounts

SLOTS = 3
"""Input buffers per training loop: one is trained on, one is full, one is being filled. They are small."""
_SAVED_BYTES_PER_PARAMETER = 12
"""float32 weights and two moments."""
_TRAINED_BYTES_PER_PARAMETER = 16
"""float32 master, gradient and two moments of Adam."""
_CUDA_CONTEXT_BYTES = 1 << 30
_SHORT = 256
"""As in models/attention.py: longer documents keep no weights of their scores."""
_FEWER_ROWS = "lower train.micro_batch_rows, and raise train.grad_accum_steps for the same step"
_SMALLER_MODEL = "use a smaller model"


@dataclass(frozen=True)
class PlannedStage:
    """One stage of the training, in optimizer steps. Numbers that need a store are None until `prepare` has run."""

    options: StageOptions
    first_step: int | None
    num_steps: int | None
    warmup_steps: int | None
    epochs: float | None
    """Passes over the stage's documents."""
    windows: int | None
    """Rows of one epoch."""
    held_out_windows: int | None


@dataclass(frozen=True)
class CausalLMPlan:
    """What a run will be. Numbers that need a store are None until `prepare` has made one."""

    recipe: CausalLMRecipe
    model: TargetFacts
    trainer_devices: tuple[str, ...]
    num_slots: int
    """Input buffers per training loop."""
    threads: int
    """CPU threads of each training loop."""
    world: World
    """The processes that train together; devices, slots, threads and memory are those of one."""
    batches_per_step: int
    """Micro-batches of one step, all training loops of all processes together."""
    rows_per_step: int
    tokens_per_step: int
    """Real tokens on average; without a store, the room for them."""
    stages: tuple[PlannedStage, ...]
    total_steps: int | None
    validation_batches: int
    """Micro-batches of one validation pass, a multiple of the number of training loops; 0 when validation is off."""
    train_documents: int | None
    validation_documents: int | None
    supervised_share: float | None
    mix: tuple[MixLine, ...]
    """What an epoch of each store is made of, by source; empty until `prepare` has run."""
    compute_dtype: DtypeName
    parameters: int
    """Of the model, counted from its configuration; exact for Llama and its relatives."""
    flops_per_token: float | None
    """Of one training token, forward and backward, by the usual formula; None for mixtures of experts."""
    memory: tuple[MemoryLine, ...]
    lacks: tuple[Problem, ...]
    """Devices whose memory cannot hold the run; `train` refuses to start with them."""
    disk_bytes_per_checkpoint: int
    warnings: tuple[str, ...]

    @property
    def pass_rows(self) -> int:
        """Rows that go through forward and backward together."""
        train = self.recipe.train
        return train.micro_batch_rows if train.pass_rows == "auto" else train.pass_rows

    @property
    def trainer_role(self) -> str:
        """Begins the names of the loops that train."""
        return "trainer"

    @property
    def loops(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Roles of the loops that compute, and their devices."""
        return (("trainer", self.trainer_devices),)

    @property
    def devices(self) -> tuple[str, ...]:
        """Every device that this process uses, once."""
        return tuple(dict.fromkeys(self.trainer_devices))

    @property
    def num_trainers(self) -> int:
        """Training loops of all processes together."""
        return self.world.size * len(self.trainer_devices)

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values; the model's own config.json is left out."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        model = {f.name: getattr(self.model, f.name) for f in fields(self.model) if f.name != "raw"}
        stages = [{**vars(stage), "options": stage.options.model_dump(mode="json")} for stage in self.stages]
        plain |= {"recipe": self.recipe.model_dump(mode="json"), "model": model, "stages": stages}
        plain |= {name: [asdict(record) for record in plain[name]] for name in ("lacks", "mix")}
        return {**plain, "memory": [asdict(line) for line in self.memory], "world": asdict(self.world)}


AnyPlan = Plan | CausalLMPlan


def make_any_plan(recipe: AnyRecipe, machine: Machine) -> AnyPlan:
    """The plan of a recipe of either kind; raises as ``make_plan`` and ``make_lm_plan`` do."""
    return make_lm_plan(recipe, machine) if isinstance(recipe, CausalLMRecipe) else make_plan(recipe, machine)


def make_lm_plan(recipe: CausalLMRecipe, machine: Machine) -> CausalLMPlan:
    """Derive and check everything about a run.

    Raises:
        RecipeError: options that do not fit the model, the machine or the stores; all of them, by key.
        ModelError: the model's configuration cannot be read or is not supported.
        DataError: a store is torn.
    """
    model = read_model_facts(recipe.model)
    _refuse([*_check_devices(recipe, machine), *_check_model(recipe, model), *check_pass_rows(recipe.train)])
    devices = _devices(recipe, machine)
    num_trainers = machine.world.size * len(devices)
    rows_per_step = num_trainers * recipe.train.grad_accum_steps * recipe.train.micro_batch_rows
    counts = _count(recipe)
    stages = _plan_stages(recipe, counts, rows_per_step)
    _refuse([*_check_stages(recipe, model, stages, counts)])
    memory = _estimate_memory(recipe, model, devices, machine)
    known = [*{c.fingerprint: c for c in counts if c is not None}.values()]  # stages may share a store
    steps = [stage.num_steps for stage in stages]
    slots = recipe.pipeline.slots
    return CausalLMPlan(
        recipe=recipe,
        model=model,
        trainer_devices=devices,
        num_slots=SLOTS if slots == "auto" else slots,
        threads=stage_threads(recipe.pipeline, machine, len(devices)),
        world=machine.world,
        batches_per_step=num_trainers * recipe.train.grad_accum_steps,
        rows_per_step=rows_per_step,
        tokens_per_step=round(rows_per_step * (known[0].tokens_per_window if known else recipe.data.seq_len)),
        stages=stages,
        total_steps=None if None in steps else sum(step for step in steps if step is not None),
        validation_batches=_validation_batches(recipe, known, num_trainers),
        train_documents=sum(c.train_documents for c in known) if known else None,
        validation_documents=sum(c.validation_documents for c in known) if known else None,
        supervised_share=known[0].supervised_share if known else None,
        mix=tuple(line for c in known for line in c.mix),
        compute_dtype=compute_dtype(recipe.train, devices, machine),
        parameters=_parameters(model),
        flops_per_token=_flops_per_token(model, recipe.data.seq_len),
        memory=memory,
        lacks=tuple(memory_problems(memory, machine)),
        disk_bytes_per_checkpoint=_SAVED_BYTES_PER_PARAMETER * _parameters(model),
        warnings=(*_warnings(recipe, model, counts), *memory_warnings(memory, machine)),
    )


def _refuse(problems: list[Problem]) -> None:
    if problems:
        raise RecipeError(problems)


def _devices(recipe: CausalLMRecipe, machine: Machine) -> tuple[str, ...]:
    """By their numbers on the host; in a recipe `cuda:0` is the process's first GPU. `auto` is one loop per process."""
    gpus = machine.own_gpus
    if recipe.pipeline.trainers == "auto":
        return gpus[:1] or ("cpu",)
    host_names = {f"cuda:{i}": gpu for i, gpu in enumerate(gpus)}
    return tuple(host_names.get(device, device) for device in recipe.pipeline.trainers)


def _check_devices(recipe: CausalLMRecipe, machine: Machine) -> Iterator[Problem]:
    key, known = "pipeline.trainers", ("cpu", *(f"cuda:{i}" for i in range(len(machine.own_gpus))))
    if len(machine.gpus) % machine.world.local_size:
        message = f"{len(machine.gpus)} GPUs cannot be shared out evenly to {machine.world.local_size} processes"
        yield Problem(key, message, fix="choose another --nproc-per-node, or set CUDA_VISIBLE_DEVICES")
    trainers = recipe.pipeline.trainers
    if not trainers:
        yield Problem(key, "is empty", fix="name devices, or write auto")
    for device in () if trainers == "auto" else trainers:
        if device not in known:
            yield Problem(key, f"there is no {device} here", fix=f"use {', '.join(known)}, or auto")


def _check_model(recipe: CausalLMRecipe, model: TargetFacts) -> Iterator[Problem]:
    if model.recurrent and recipe.data.packing == "continuous":
        text = f"{model.model_type} keeps a state along the row, and documents of one row would leak into each other"
        yield Problem("data.packing", text, fix="set data.packing: document")


def _count(recipe: CausalLMRecipe) -> list[WindowCounts | None]:
    """By stage, of the stores that are there; numpy is loaded only where there is one."""
    found: list[WindowCounts | None] = []
    for i in range(len(recipe.stages)):
        data = stage_data(recipe, i)
        if not data.store.exists():
            found.append(None)
            continue
        from helixctl.data.window_count import WindowSource, count_windows_of_store

        found.append(count_windows_of_store(WindowSource(data, recipe.train.micro_batch_rows, recipe.run.seed, i)))
    return found


def _plan_stages(
    recipe: CausalLMRecipe, counts: list[WindowCounts | None], rows_per_step: int
) -> tuple[PlannedStage, ...]:
    planned: list[PlannedStage] = []
    first: int | None = 0
    for options, count in zip(recipe.stages, counts, strict=True):
        steps = _steps(options, count, rows_per_step, recipe.data.seq_len)
        planned.append(
            PlannedStage(
                options=options,
                first_step=first,
                num_steps=steps,
                warmup_steps=None if steps is None else options.warmup_of(steps),
                epochs=None if steps is None or not count else steps * rows_per_step / max(1, count.train_windows),
                windows=count.train_windows if count else None,
                held_out_windows=count.validation_windows if count else None,
            )
        )
        first = None if first is None or steps is None else first + steps
    return tuple(planned)


def _steps(options: StageOptions, count: WindowCounts | None, rows_per_step: int, seq_len: int) -> int | None:
    if options.steps is not None:
        return options.steps
    if options.tokens is not None:
        per_row = count.tokens_per_window if count and count.train_windows else seq_len
        return math.ceil(options.tokens / (rows_per_step * per_row))
    assert options.epochs is not None
    return None if count is None else options.epochs * count.train_windows // rows_per_step


def _check_stages(
    recipe: CausalLMRecipe, model: TargetFacts, stages: tuple[PlannedStage, ...], counts: list[WindowCounts | None]
) -> Iterator[Problem]:
    for i, (stage, count) in enumerate(zip(stages, counts, strict=True)):
        if count is None:
            continue
        key = "data.store" if recipe.stages[i].data is None else f"stages.{i}.data.store"
        if count.tokenizer_length > model.vocab_size:
            text = f"was made by a tokenizer of {count.tokenizer_length} tokens; the model knows {model.vocab_size}"
            rows = -(-count.tokenizer_length // 64) * 64
            yield Problem(key, text, fix=f"set vocab_size to {rows} in model.config, or prepare with another tokenizer")
        if count.train_windows == 0:
            text = f"the training documents fill no window of {recipe.data.seq_len} tokens"
            yield Problem(key, text, fix="lower data.seq_len, or give the recipe more documents")
        elif stage.num_steps == 0:
            text = f"is {stage.options.epochs} x {count.train_windows} rows, less than one step"
            fix = "lower train.micro_batch_rows or train.grad_accum_steps, raise epochs, or give steps"
            yield Problem(f"stages.{i}.epochs", text, fix=fix)


def _validation_batches(recipe: CausalLMRecipe, counts: list[WindowCounts], num_trainers: int) -> int:
    """Enough for the asked rows, or for those there are, rounded up so that every loop has the same number."""
    rows = recipe.validation.rows if recipe.validation.every_steps else 0
    if counts:
        rows = min(rows, max(count.validation_windows for count in counts))
    return math.ceil(rows / recipe.train.micro_batch_rows / num_trainers) * num_trainers


def _parameters(model: TargetFacts) -> int:
    return target_parameters(model) + (2 * model.num_layers + 1) * model.hidden_size


def _flops_per_token(model: TargetFacts, seq_len: int) -> float | None:
    """6 per weight, and the causal half of 12 x layers x width x length for attention (arXiv 2204.02311)."""
    if model.num_experts or model.recurrent:
        return None
    table = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
    attention = 6 * model.num_layers * model.num_heads * model.head_dim * seq_len
    return 6.0 * (target_parameters(model) - table) + attention


def _estimate_memory(
    recipe: CausalLMRecipe, model: TargetFacts, devices: tuple[str, ...], machine: Machine
) -> tuple[MemoryLine, ...]:
    train, size, lines = recipe.train, DTYPE_BYTES[compute_dtype(recipe.train, devices, machine)], []
    rows = train.micro_batch_rows if train.pass_rows == "auto" else train.pass_rows
    tokens = rows * recipe.data.seq_len
    masters = _TRAINED_BYTES_PER_PARAMETER * _parameters(model)
    copies = _parameters(model) * size if size < 4 else 0  # autocast keeps the cast weights until the backward
    for device in dict.fromkeys(devices):
        loops, on_cpu = devices.count(device), device == "cpu"
        kept = loops * tokens * model.num_layers * _kept_per_token(recipe, model, size, on_cpu=on_cpu)
        weights = loops * (masters + copies)
        lines.append(MemoryLine(device, "weights, gradients, Adam", weights, "model.config", _SMALLER_MODEL))
        lines.append(MemoryLine(device, "activations", kept, "train.micro_batch_rows", _FEWER_ROWS))
        lines.append(MemoryLine(device, "head, in chunks", loops * _head_bytes(model, tokens, size, on_cpu=on_cpu)))
        lines.append(
            MemoryLine(device, PROCESS_LINE, machine.process_bytes)
            if on_cpu
            else MemoryLine(device, CUDA_LINE, _CUDA_CONTEXT_BYTES)
        )
    return tuple(lines)


def _head_bytes(model: TargetFacts, tokens: int, size: int, *, on_cpu: bool) -> int:
    """A chunk of logits and its scores, the head in the compute type and its gradient.

    On a CPU scores and gradients replace the logits, and the gradient by the embedding stands beside the head's.
    """
    table = model.vocab_size * model.hidden_size
    if on_cpu:
        copy = size if size < DTYPE_BYTES["float32"] else 0
        return min(tokens, CPU_HEAD_CHUNK_ROWS) * model.vocab_size * size + table * (8 + copy)
    return min(tokens, HEAD_CHUNK_ROWS) * model.vocab_size * (size + 4) + table * (size + 4)


def _kept_per_token(recipe: CausalLMRecipe, model: TargetFacts, size: int, *, on_cpu: bool) -> int:
    """Bytes that one layer keeps for the backward: what autograd saves of Llama's layers, H and I wide, A in attention.

    Two norms in float32, the inputs of the products, queries to outputs, the MLP; on a CPU the weights of the scores.
    """
    hidden, heads = model.hidden_size, model.num_heads * model.head_dim
    intermediate = model.intermediate_size or 4 * hidden
    scores = 2 * size * model.num_heads * min(recipe.data.seq_len, _SHORT) if on_cpu else 0
    return 24 * hidden + size * (2 * hidden + 9 * heads + 4 * intermediate) + scores


def _warnings(recipe: CausalLMRecipe, model: TargetFacts, counts: list[WindowCounts | None]) -> Iterator[str]:
    seq_len = recipe.data.seq_len
    if 0 < model.max_positions < seq_len:
        yield f"data.seq_len {seq_len} is longer than the model's {model.max_positions} positions"
    stores = {stage_data(recipe, i).store: (i, count) for i, count in reversed([*enumerate(counts)])}
    for store, (i, count) in reversed(stores.items()):
        if count is None:
            yield f"there is no store at {store}: run `helixctl prepare` first; what depends on it is unknown"
        elif recipe.validation.every_steps and not count.validation_windows:
            yield f"the store {store} has no held-out documents, so stage {i} is not validated: raise its fraction"
    if recipe.model.trust_remote_code:
        yield (
            f"model.trust_remote_code is on: Python code that {recipe.model.checkpoint} brings along runs with your "
            "rights; leave it off unless you have read that code"
        )
