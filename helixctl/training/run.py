"""``helixctl train``: claims the run directory, runs the pipeline, and writes what came of it."""

from __future__ import annotations

import dataclasses
import logging
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from helixctl.checkpoint.atomic import write_json, write_text
from helixctl.checkpoint.store import load_checkpoint, remove_leftovers
from helixctl.data.store import Store
from helixctl.engine.interrupt import InterruptFlag
from helixctl.engine.status import EVERY_S, FILE_NAME, StatusFile
from helixctl.engine.supervisor import Progress
from helixctl.errors import Interrupted, StageFailed, UsageError
from helixctl.lm_plan import AnyPlan
from helixctl.metrics.sink import SinkGroup, open_sinks
from helixctl.recipe.load import dump_recipe
from helixctl.redact import redact, redact_text
from helixctl.training import environment
from helixctl.training.compiling import compiler
from helixctl.training.jobs import Job, make_job
from helixctl.training.peaks import expected_peaks, expected_process, measured_peaks, reserved_peaks, with_memory_advice
from helixctl.training.process import set_up_process
from helixctl.training.processes import Processes, joined_processes
from helixctl.training.recorder import Recorder
from helixctl.training.results import TrainResult
from helixctl.training.run_dir import claimed_run_dir, find_resume_point
from helixctl.training.state import TrainState, check_fingerprints, make_fingerprints, num_steps
from helixctl.training.warmup import allow_recompiling
from helixctl.training.wiring import Control, Pipeline

logger = logging.getLogger(__name__)


def run_training(plan: AnyPlan, *, resume: bool = False, status_every_s: float = EVERY_S) -> TrainResult:
    """Train until the last step, or until the user stops the run.

    Meanwhile ``status.json`` in the run directory is written anew every ``status_every_s`` seconds.

    Raises:
        UsageError: the run directory holds a run already, or cannot be written.
        DataError: no store, or one made with another tokenizer than the recipe's.
        CheckpointError: ``resume`` finds no whole checkpoint, or one of another run.
        StageFailed: a stage raised; its exception is the cause.
        ProcessLost: another process of the run failed or was killed.
        Interrupted: the user stopped the run; the last step is saved.
    """
    job = make_job(plan)
    set_up_process(plan)
    with (
        compiler(plan) as compiled,
        joined_processes(plan) as processes,
        _claimed(plan, processes),
        InterruptFlag() as interrupt,
    ):
        state, checkpoint = _start(plan, job, resume, processes)
        control = Control(interrupt, Progress(), processes, status_every_s, compiled)
        if processes.world.rank:
            return _run(plan, job, state, None, control)
        run_dir = plan.recipe.run.dir
        write_json(run_dir / "plan.json", redact(plan.to_json()))
        write_json(run_dir / environment.FILE, environment.describe_environment())
        write_text(run_dir / "recipe.yaml", redact_text(dump_recipe(plan.recipe)))
        sinks = _open_sinks(plan, run_dir, None if checkpoint is None else state.step)
        try:
            return _run(plan, job, state, _Record(sinks, checkpoint), control)
        finally:
            sinks.close()


@dataclass(frozen=True)
class _Record:
    """What the first process writes to, and where it goes on."""

    sinks: SinkGroup
    checkpoint: Path | None


def _claimed(plan: AnyPlan, processes: Processes) -> AbstractContextManager[object]:
    """The run directory is the first process's; the others wait for what it says in ``_start``."""
    return nullcontext() if processes.world.rank else claimed_run_dir(plan.recipe.run.dir)


def _start(plan: AnyPlan, job: Job, resume: bool, processes: Processes) -> tuple[TrainState, Path | None]:
    """Where the run begins: found by the first process, checked by every process against its own recipe and data."""

    def find() -> dict[str, Any]:
        run_dir = plan.recipe.run.dir
        remove_leftovers(run_dir / "checkpoints")
        found = find_resume_point(run_dir, resume)
        for skipped in found.skipped if found else ():
            logger.warning("a damaged checkpoint is passed over: %s", skipped.reason)
        if found is None or found.path is None:
            return {"state": TrainState(fingerprints=current).to_json(), "checkpoint": None}
        return {"state": load_checkpoint(found.path).state, "checkpoint": str(found.path)}

    current = make_fingerprints(plan, _store_fingerprints(job.stores))
    said = processes.from_first(find)
    state = TrainState.from_json(said["state"])
    check_fingerprints(state.fingerprints, current)
    return state, said["checkpoint"] and Path(said["checkpoint"])


def _open_sinks(plan: AnyPlan, run_dir: Path, resume_step: int | None) -> SinkGroup:
    try:
        return open_sinks(plan.recipe.metrics.sinks, run_dir, num_steps(plan), resume_step)
    except OSError as error:
        raise UsageError(
            f"metrics cannot be written to {run_dir}: {error.strerror or error}",
            fix="make it writable, or choose another folder: --set run.dir=...",
        ) from error


def _run(plan: AnyPlan, job: Job, state: TrainState, record: _Record | None, control: Control) -> TrainResult:
    recorder = None
    if record is not None:
        live = job.live(state, control)
        recorder = Recorder(plan, state, record.sinks, control, live=live, resume_from=record.checkpoint)
    pipeline = job.build(state, recorder, control)
    stopped: Interrupted | None = None
    try:
        with _status(pipeline, control, plan) if recorder else nullcontext():
            pipeline.supervisor.run()
    except Interrupted as error:
        if control.interrupt.urgent and control.processes.world.size > 1:
            raise  # the others have not stopped at the same step
        stopped = error
    except StageFailed as failed:
        raise with_memory_advice(plan, failed) from failed.__cause__
    finally:
        allow_recompiling()
    step = pipeline.drafters[0].step_number
    if step < num_steps(plan) and stopped is None:
        stopped = Interrupted(signal.SIGTERM, "stopped, as another process was told to,")
    result = _finish(plan, job, recorder, state, (pipeline, control))
    if stopped is not None:
        raise Interrupted(
            stopped.exit_code - 128,
            f"{stopped.message} at step {result.steps} of {num_steps(plan)}; saved: {result.checkpoint or 'nothing'}",
            fix="go on with: helixctl train RECIPE --resume",
        ) from None
    return result


def _gpu_uuids(devices: set[str]) -> dict[str, str]:
    """What the driver calls them: CUDA and the driver may number GPUs differently."""
    return {device: f"GPU-{torch.cuda.get_device_properties(device).uuid}" for device in sorted(devices)}


@contextmanager
def _status(pipeline: Pipeline, control: Control, plan: AnyPlan) -> Iterator[None]:
    """Keep ``status.json`` fresh while the block runs, and leave in it how the run ended."""
    drafters = pipeline.drafters
    devices = {drafter.name: str(drafter.device) for drafter in drafters}
    for i, device in enumerate(getattr(plan, "target_devices", ())):
        devices |= dict.fromkeys((f"target-{i}", f"target-{i}-post"), device)
    gpus = _gpu_uuids({device for device in devices.values() if device.startswith("cuda")})

    def counters() -> dict[str, Any]:
        return {
            "step": drafters[0].step_number,
            "total_steps": num_steps(plan),
            "trained_tokens": sum(drafter.trained_tokens for drafter in drafters),
            "devices": devices,
            "gpus": gpus,
        }

    status = StatusFile(plan.recipe.run.dir / FILE_NAME, pipeline.stats, counters)
    control.progress.listen(status.write, control.status_every_s)
    try:
        yield
    except BaseException as error:
        status.finish(error)
        raise
    status.finish()


def _store_fingerprints(stores: tuple[Store, ...]) -> dict[str, str]:
    tokenizer = stores[0].manifest.tokenizer
    data = " ".join(store.fingerprint for store in stores)
    return {"data": data, "tokenizer": tokenizer.sha256, "chat template": tokenizer.template_sha256}


def _finish(
    plan: AnyPlan, job: Job, recorder: Recorder | None, state: TrainState, ran: tuple[Pipeline, Control]
) -> TrainResult:
    """The same result in every process, with the counts of all; the first one writes it down."""
    pipeline, control = ran
    processes = control.processes
    memory = {"peak": measured_peaks(plan), "reserved": reserved_peaks(plan)}
    memory |= {"predicted": expected_peaks(plan), "process": expected_process(plan)}
    parts = processes.gather({"counts": _count_batches(pipeline), **memory})

    def write() -> dict[str, Any]:
        assert recorder is not None
        counts = {name: sum(part["counts"][name] for part in parts) for name in parts[0]["counts"]}
        result = TrainResult(
            run_dir=str(plan.recipe.run.dir),
            finished=state.step >= num_steps(plan),
            steps=state.step,
            total_steps=num_steps(plan),
            tokens_per_s=recorder.tokens / recorder.seconds if recorder.seconds else 0.0,
            train_seconds=state.train_seconds,
            loss=recorder.last_loss,
            validation=recorder.validation,
            best_value=state.best_value,
            best_step=state.best_step,
            checkpoint=str(recorder.last_checkpoint) if recorder.last_checkpoint else None,
            peak_memory_bytes=_name_by_rank([part["peak"] for part in parts]),
            reserved_memory_bytes=_name_by_rank([part["reserved"] for part in parts]),
            predicted_memory_bytes=_name_by_rank([part["predicted"] for part in parts]),
            process_memory_bytes=_name_by_rank([part["process"] for part in parts]),
            compile_cache=str(control.compiled.cache) if control.compiled.components else "",
            compiled={name: dataclasses.asdict(compiled) for name, compiled in control.compiled.components.items()},
            accounting={**_count_documents(job.stores), **counts, "steps skipped": state.skipped_steps}
            | {"documents trained": state.trained_documents, "documents left out": state.bad_documents}
            | recorder.failed_writes,
            pipeline=_waits(pipeline),
            sources={name: counts for store in job.stores for name, counts in store.manifest.by_source.items()},
        )
        write_json(plan.recipe.run.dir / "result.json", redact(dataclasses.asdict(result)))
        return dataclasses.asdict(result)

    return TrainResult(**processes.from_first(write))


def _count_documents(stores: tuple[Store, ...]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for manifest in (store.manifest for store in stores):
        dropped = {f"documents dropped: {reason}": count for reason, count in sorted(manifest.dropped.items())}
        counts.update({"documents read": manifest.read, "documents kept": manifest.kept, **dropped})
    return dict(counts)


def _count_batches(pipeline: Pipeline) -> dict[str, int]:
    """Of this process."""
    produced = pipeline.wires.numbers.produced
    trained, validated = (sum(d.num_done[role] for d in pipeline.drafters) for role in ("train", "validation"))
    return {
        "micro-batches produced": produced,
        "micro-batches trained": trained,
        "micro-batches validated": validated,
        "micro-batches in flight at the end": produced - trained - validated,
    }


def _name_by_rank(peaks: list[dict[str, int]]) -> dict[str, int]:
    if len(peaks) == 1:
        return peaks[0]
    return {f"rank {rank} {device}": peak for rank, own in enumerate(peaks) for device, peak in own.items()}


def _waits(pipeline: Pipeline) -> dict[str, dict[str, float]]:
    """Seconds, those of the start apart: until the first micro-batch had come through."""
    wires = pipeline.wires
    channels = {channel.name: channel.room.waits("send", "receive") for channel in wires.channels}
    return {"slots": wires.slots.room.waits("acquire"), **channels}
