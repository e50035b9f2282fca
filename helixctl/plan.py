"""Recipe + machine -> every derived number, and the checks that need the target's config or the store.

Nothing is allocated and nothing is written; never imports torch. N targets, M drafters, K taps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from helixctl.devices import (
    DtypeName,
    Layout,
    check_devices,
    compute_dtype,
    homes,
    make_spans,
    stage_threads,
    target_dtype,
)
from helixctl.errors import Problem, RecipeError
from helixctl.machine import Machine, World
from helixctl.memory import Load, MemoryLine, device_bytes, estimate_memory, memory_problems, memory_warnings
from helixctl.models.drafters._memory import StepBytes, Work
from helixctl.models.drafters._parts import count_frozen, freeze_problems
from helixctl.models.facts import DTYPE_BYTES, TargetFacts, read_target_facts
from helixctl.models.float8_format import Float8, choose_float8, float8_warnings
from helixctl.models.taps import choose_taps
from helixctl.plugins import DRAFTERS, load_plugin
from helixctl.recipe.schema import DrafterOptions, Recipe, StepOptions

if TYPE_CHECKING:
    from helixctl.data.count import DataCounts
    from helixctl.data.store import MixLine

_PASS_SHARE = 0.1
"""Of a GPU's memory. More rows at once are hardly faster: 8B shape, 4 rows 520 ms, 2 rows 527 ms, 1 row 543 ms."""


@dataclass(frozen=True)
class Plan:
    """What a run will be. Numbers that need a store are None until `prepare` has made one."""

    recipe: Recipe
    target: TargetFacts
    target_layer_ids: tuple[int, ...]
    last_hidden: bool
    """The target's last hidden state is captured too, for a loss that compares with its distribution."""
    target_devices: tuple[str, ...]
    """Where the features of each target loop come out."""
    target_spans: tuple[tuple[str, ...], ...]
    """All devices of each target loop, in the order of its layers; one, where the target fits it."""
    drafter_devices: tuple[str, ...]
    num_slots: int
    """Input buffers per drafter."""
    threads: int
    """CPU threads of each compute stage."""
    world: World
    """The processes that train together; devices, slots, threads and memory are those of one."""
    packing: bool
    """Several documents per row; off for a recurrent target, whatever the recipe says."""
    batches_per_step: int
    """Micro-batches of one step, all drafters of all processes together."""
    rows_per_step: int
    pass_rows: int
    """Rows that go through a drafter's forward and backward together."""
    tokens_per_step: int
    """Real tokens on average; without a store, the room for them."""
    total_steps: int | None
    warmup_steps: int | None
    validation_batches: int
    """Micro-batches of one validation pass, a multiple of the number of drafters; 0 when validation is off."""
    train_documents: int | None
    validation_documents: int | None
    supervised_share: float | None
    anchor_coverage: float | None
    """Expected share of the supervised tokens that anchors put into a block, per epoch."""
    mix: tuple[MixLine, ...]
    """What an epoch is made of, by source; empty until `prepare` has run."""
    target_dtype: DtypeName
    float8: Float8 | None
    """How the products of the target's layers are done; None: in its dtype."""
    compute_dtype: DtypeName
    parameters: int
    """Trained parameters of the drafter."""
    frozen_parameters: int
    """Further ones, that `drafter.freeze` names."""
    memory: tuple[MemoryLine, ...]
    lacks: tuple[Problem, ...]
    """Devices whose memory cannot hold the run; `train` refuses to start with them."""
    disk_bytes_per_checkpoint: int
    warnings: tuple[str, ...]

    @property
    def trainer_role(self) -> str:
        """Begins the names of the loops that train."""
        return "drafter"

    @property
    def loops(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Roles of the loops that compute, and their devices."""
        return (("target", self.target_devices), ("drafter", self.drafter_devices))

    @property
    def devices(self) -> tuple[str, ...]:
        """Every device that this process uses, once."""
        return tuple(dict.fromkeys((*self.target_devices, *self.drafter_devices)))

    @property
    def trainer_devices(self) -> tuple[str, ...]:
        """Devices of the loops that train: the drafters'."""
        return self.drafter_devices

    @property
    def captured_layers(self) -> tuple[int, ...]:
        """The taps, and the last layer where its state is wanted."""
        return (*self.target_layer_ids, self.target.num_layers - 1) if self.last_hidden else self.target_layer_ids

    def span_of(self, device: str) -> tuple[str, ...]:
        """The devices of the target whose features come out on ``device``; that one alone where no target loop runs."""
        return next((span for span in self.target_spans if span[-1] == device), (device,))

    @property
    def num_drafters(self) -> int:
        """Drafters of all processes together."""
        return self.world.size * len(self.drafter_devices)

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values; the target's own config.json is left out."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        target = {f.name: getattr(self.target, f.name) for f in fields(self.target) if f.name != "raw"}
        records = {name: [asdict(record) for record in plain[name]] for name in ("memory", "lacks", "mix")}
        plain |= {"recipe": self.recipe.model_dump(mode="json"), "target": target, "world": asdict(self.world)}
        plain["float8"] = self.float8 and asdict(self.float8)
        return {**plain, **records}


def make_plan(recipe: Recipe, machine: Machine) -> Plan:
    """Derive and check everything about a run.

    Raises:
        RecipeError: options that do not fit the target, the machine or the store; all of them, by key.
        ModelError, DataError: the target cannot be read or is not supported; the store is torn.
    """
    target = read_target_facts(recipe.target)
    taps, problems = choose_taps(recipe.drafter, target)
    _refuse([*problems, *_check_drafter(recipe, target, taps), *check_devices(recipe.pipeline, machine)])
    counts = _count_data(recipe, packing := recipe.data.packing and not target.recurrent)
    spans, drafters = make_spans(recipe.pipeline, machine, stored=recipe.target.features is not None)
    steps = _count_steps(recipe, counts, machine.world.size * len(drafters))
    load = _make_load(recipe, target, (spans, drafters), machine, counts, steps)
    _refuse([*_check_data(recipe, target, counts, steps.total), *_check_features(recipe, taps, load)])
    return Plan(
        recipe=recipe,
        target=target,
        target_layer_ids=taps,
        last_hidden=load.last_hidden,
        target_devices=load.target_devices,
        target_spans=spans,
        drafter_devices=drafters,
        num_slots=load.num_slots,
        threads=stage_threads(recipe.pipeline, machine, len(spans) + len(drafters)),
        packing=packing,
        world=machine.world,
        batches_per_step=steps.batches_each,
        rows_per_step=steps.rows_each,
        pass_rows=load.pass_rows,
        tokens_per_step=round(steps.rows_each * (counts.tokens_per_row if counts else recipe.data.seq_len)),
        total_steps=steps.total,
        warmup_steps=None if steps.total is None else recipe.train.warmup_of(steps.total),
        validation_batches=_validation_batches(recipe, counts, machine.world.size * len(drafters)),
        train_documents=counts.train_documents if counts else None,
        validation_documents=counts.validation_documents if counts else None,
        supervised_share=counts.supervised_share if counts else None,
        anchor_coverage=counts.anchor_coverage if counts else None,
        mix=counts.mix if counts else (),
        target_dtype=load.target_dtype,
        float8=load.float8,
        compute_dtype=compute_dtype(recipe.train, drafters, machine),
        parameters=load.parameters,
        frozen_parameters=load.frozen_parameters,
        memory=(memory := estimate_memory(load)),
        lacks=tuple(memory_problems(memory, machine)),
        disk_bytes_per_checkpoint=load.saved_bytes,
        warnings=(*_data_warnings(recipe, target, counts), *_run_warnings(recipe, load, memory, machine)),
    )


class _Steps(NamedTuple):
    batches_each: int  # of all drafters of all processes
    rows_each: int
    total: int | None


def _count_steps(recipe: Recipe, counts: DataCounts | None, num_drafters: int) -> _Steps:
    num_batches = num_drafters * recipe.train.grad_accum_steps
    num_rows, total = num_batches * recipe.train.micro_batch_rows, recipe.train.steps
    if total is None and counts is not None:
        total = counts.train_rows // num_rows
    return _Steps(num_batches, num_rows, total)


def _refuse(problems: list[Problem]) -> None:
    if problems:
        raise RecipeError(problems)


def advised_slots(num_targets: int, num_drafters: int) -> int:
    """Smallest number of slots per drafter with which no loop waits for a slot: slots x M >= 2N + M."""
    return math.ceil((2 * num_targets + num_drafters) / num_drafters)


def _seen_tokens(recipe: Recipe, counts: DataCounts | None, steps: _Steps, num_loops: int) -> int | None:
    """Tokens of the documents that one target loop sees in the whole run; None where that is unknown."""
    if counts is None or steps.total is None:
        return None
    every, rows = recipe.validation.every_steps, recipe.validation.rows
    passes = math.ceil(steps.total / every) if every else 0
    return counts.seen_tokens(num_loops, steps.total * steps.rows_each, rows, passes)


def _make_load(
    recipe: Recipe, target: TargetFacts, devices: Layout, machine: Machine, counts: DataCounts | None, step: _Steps
) -> Load:
    spans, drafters = devices
    targets = homes(spans)
    options, slots = load_plugin(DRAFTERS, recipe.drafter.algorithm, "options"), recipe.pipeline.slots
    rows, seq_len = recipe.train.micro_batch_rows, recipe.data.seq_len
    size, taps = DTYPE_BYTES[compute_dtype(recipe.train, drafters, machine)], choose_taps(recipe.drafter, target)[0]
    num_frozen = count_frozen(recipe.drafter, target, taps)

    def steps(num_rows: int) -> dict[str, StepBytes]:
        most = None if counts is None else counts.most_anchors
        works = {d: Work(num_rows, seq_len, size, d != "cpu", recipe.compile.covers(d), most) for d in drafters}
        return {d: options.step_bytes(recipe.drafter, target, work) for d, work in works.items()}

    pass_rows = _pass_rows(recipe, steps, {d: device_bytes(d, machine) for d in drafters})
    return Load(
        target=target,
        target_spans=spans,
        drafter_devices=drafters,
        target_dtype=target_dtype(recipe.target, target.dtype, targets, machine),
        rows=rows,
        pass_rows=pass_rows,
        seq_len=seq_len,
        num_taps=len(taps),
        last_hidden=options.needs_last_hidden(recipe.drafter),
        num_slots=advised_slots(len(targets), len(drafters)) if slots == "auto" else slots,
        parameters=options.parameter_count(recipe.drafter, target) - num_frozen,
        frozen_parameters=num_frozen,
        step=steps(pass_rows),
        validation=recipe.validation,
        cache_limit_bytes=recipe.target.feature_cache_mib << 20,
        seen_tokens=_seen_tokens(recipe, counts, step, len(spans) * machine.world.size),
        num_processes=machine.world.size,
        process_bytes=machine.process_bytes,
        stored=recipe.target.features is not None,
        float8=choose_float8(recipe.target, target),
    )


def _pass_rows(recipe: Recipe, steps: Callable[[int], dict[str, StepBytes]], room: dict[str, int]) -> int:
    """auto: all rows on a CPU; on a GPU as many as keep what waits for backward in `_PASS_SHARE` of its memory."""
    rows = recipe.train.micro_batch_rows
    if recipe.train.pass_rows != "auto":
        return recipe.train.pass_rows

    def fits(num_rows: int) -> bool:
        kept = steps(num_rows)
        return all(device == "cpu" or kept[device].kept <= _PASS_SHARE * size for device, size in room.items())

    return next((n for n in range(rows, 1, -1) if rows % n == 0 and fits(n)), 1)


def _check_drafter(recipe: Recipe, target: TargetFacts, taps: tuple[int, ...]) -> Iterator[Problem]:
    yield from freeze_problems(recipe.drafter, target, taps)
    yield from _check_mask_token(recipe.drafter, target)
    yield from check_pass_rows(recipe.train)


def check_pass_rows(train: StepOptions) -> Iterator[Problem]:
    """Parts of a micro-batch are equal: the device sees one shape."""
    rows, asked = train.micro_batch_rows, train.pass_rows
    if asked != "auto" and rows % asked:
        yield Problem(
            "train.pass_rows", f"is {asked}, which does not divide train.micro_batch_rows ({rows})", fix="write auto"
        )


def _check_mask_token(drafter: DrafterOptions, target: TargetFacts) -> Iterator[Problem]:
    key, token = "drafter.mask_token_id", drafter.mask_token_id
    fix = f"choose an id below {target.vocab_size} that never occurs in text; `helixctl init` finds one"
    if token >= target.vocab_size:
        yield Problem(key, f"is {token}, but the target's embedding has {target.vocab_size} rows", fix=fix)
    roles = {"end-of-text": target.eos_token_ids, "padding": target.pad_token_ids, "beginning": target.bos_token_ids}
    taken = [name for name, ids in roles.items() if token in ids]
    if taken:
        yield Problem(key, f"is {token}, which is the target's {' and '.join(taken)} token", fix=fix)


def _count_data(recipe: Recipe, packing: bool) -> DataCounts | None:
    """Numbers of the store; numpy is loaded only where there is one."""
    if not recipe.data.store.exists():
        return None
    from helixctl.data.count import CountOptions, count_data

    drafter = recipe.drafter
    options = CountOptions(
        seed=recipe.run.seed,
        seq_len=recipe.data.seq_len,
        packing=packing,
        epochs=recipe.train.epochs or 1,
        num_anchors=drafter.num_anchors,
        block_size=drafter.block_size,
        mask_token_id=drafter.mask_token_id,
        anchors_per_document=drafter.anchors_per_document,
        curriculum=recipe.data.curriculum,
    )
    return count_data(recipe.data.store, options)


def _check_data(
    recipe: Recipe, target: TargetFacts, counts: DataCounts | None, total_steps: int | None
) -> Iterator[Problem]:
    if counts is None:
        return
    if counts.tokenizer_length > target.vocab_size:
        message = f"was made by a tokenizer of {counts.tokenizer_length} tokens; the target knows {target.vocab_size}"
        yield Problem("data.store", message, fix="run `helixctl prepare` again with this target")
    if counts.mask_token_seen:
        message = f"{recipe.drafter.mask_token_id} occurs in the training documents"
        yield Problem("drafter.mask_token_id", message, fix="choose an id that never does; `helixctl init` finds one")
    if counts.train_documents == 0:
        message = f"no training document has something to predict within {recipe.data.seq_len} tokens"
        yield Problem("data.store", message, fix="raise data.seq_len, or give the recipe other documents")
    elif total_steps == 0:
        fix = "lower train.micro_batch_rows or train.grad_accum_steps, raise train.epochs, or give train.steps"
        yield Problem("train.epochs", f"all epochs are {counts.train_rows} rows, less than one step", fix=fix)


def _check_features(recipe: Recipe, taps: tuple[int, ...], load: Load) -> Iterator[Problem]:
    """Stored features are those of this target, these taps and this data; numpy is loaded only where there are some."""
    if recipe.target.features is None:
        return
    from helixctl.data.stored_features import FeatureKey, check_features, digest_target

    width, target = load.target.hidden_size, digest_target(load.target.raw, load.float8)
    taps = (*taps, load.target.num_layers - 1) if load.last_hidden else taps
    wanted = FeatureKey("", target, taps, load.target_dtype, width, recipe.data.seq_len)
    yield from check_features(recipe.target.features, wanted, recipe.data.store)


def _validation_batches(recipe: Recipe, counts: DataCounts | None, num_drafters: int) -> int:
    """Enough for the asked rows, or for those there are, rounded up so that every drafter has the same number."""
    rows = recipe.validation.rows if recipe.validation.every_steps else 0
    if counts is not None:
        rows = min(rows, counts.validation_rows)
    return math.ceil(rows / recipe.train.micro_batch_rows / num_drafters) * num_drafters


def _data_warnings(recipe: Recipe, target: TargetFacts, counts: DataCounts | None) -> Iterator[str]:
    seq_len = recipe.data.seq_len
    if 0 < target.max_positions < seq_len:
        yield f"data.seq_len {seq_len} is longer than the target's {target.max_positions} positions"
    if target.recurrent and recipe.data.packing:
        yield "the target has recurrent layers, so every document gets a row of its own"
    if counts is None:
        yield f"there is no store at {recipe.data.store}: run `helixctl prepare` first; what depends on it is unknown"
        return
    if counts.truncated:
        yield f"{counts.truncated} documents are longer than data.seq_len {seq_len} and are cut there"
    if counts.left_out:
        yield f"{counts.left_out} documents have nothing to predict within {seq_len} tokens and are left out"
    if recipe.validation.every_steps and not counts.validation_rows:
        yield "the store has no held-out documents, so there is no validation: raise data.validation.fraction"


def _run_warnings(recipe: Recipe, load: Load, memory: tuple[MemoryLine, ...], machine: Machine) -> Iterator[str]:
    if recipe.target.features is not None and recipe.validation.every_steps and recipe.validation.live_prompts:
        yield "target.features is set: nothing is decoded during training, `helixctl validate` does so afterwards"
    yield from float8_warnings(recipe.target, load.target, load.float8)
    if recipe.target.trust_remote_code:
        yield (
            f"target.trust_remote_code is on: Python code that {recipe.target.model} brings along runs with your "
            "rights; leave it off unless you have read that code"
        )
    advised = advised_slots(len(load.target_devices), len(load.drafter_devices))
    if load.num_slots < advised:
        yield f"pipeline.slots is {load.num_slots}; loops will wait for each other with fewer than {advised}"
    if "cpu" in load.target_devices and load.target_dtype != "float32" and not machine.has_bf16_cpu:
        yield f"target.dtype {load.target_dtype} is slow on this processor; use float32"
    yield from memory_warnings(memory, machine)
