"""The record of a run, kept by lane 0 of the first process: metrics, checkpoints, and which checkpoint is the best.

Checkpoints are written at the end of a step and of the validation pass that follows it, so that resuming begins with
the next step.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from helixctl.checkpoint.store import Best, load_checkpoint, prune, read_best, save_checkpoint, write_best
from helixctl.errors import HelixError
from helixctl.lm_plan import AnyPlan, CausalLMPlan
from helixctl.metrics import names
from helixctl.metrics.meter import Meter, Throughput
from helixctl.metrics.sink import SinkGroup
from helixctl.models.flops import peak_flops
from helixctl.training.evaluate import lm_validation_metrics, validation_metrics
from helixctl.training.optim import StepOutcome, load_optimizer_tensors, optimizer_tensors
from helixctl.training.state import TrainState, num_steps
from helixctl.training.wiring import Control

Live = Callable[[nn.Module], dict[str, float]]
"""Decodes a few prompts with what is being trained, after a validation pass; returns metrics."""

_TOKENS = "tokens"
_DOCUMENTS = "documents"


class BadFeatures(HelixError):
    """The target's features are not finite for too many documents."""


class Recorder:
    """The observer of lane 0 of the first process."""

    def __init__(
        self,
        plan: AnyPlan,
        state: TrainState,
        sinks: SinkGroup,
        control: Control,
        *,
        live: Live | None = None,
        resume_from: Path | None = None,
    ) -> None:
        self.validation: dict[str, float] = {}
        self.last_loss: float | None = None
        self.last_checkpoint = resume_from
        self.tokens = 0.0
        """Real tokens trained by this process, in flushed windows."""
        self.seconds = 0.0
        """Seconds of those windows; validation and checkpoints do not count."""
        self._plan = plan
        self._state = state
        self._num_steps = num_steps(plan)
        self._sinks = sinks
        self._progress = control.progress
        self._live = live
        self._is_lm = isinstance(plan, CausalLMPlan)
        self._stem = "model" if self._is_lm else "drafter"
        self._flops = _flops_per_token(plan)
        self._meter = Meter()
        self._throughput = Throughput()
        self._is_best = False
        found = read_best(self.root) if resume_from is not None else None
        self._best_metric = found.metric if found is not None else None

    @property
    def root(self) -> Path:
        """The folder of the run's checkpoints."""
        return self._plan.recipe.run.dir / "checkpoints"

    @property
    def failed_writes(self) -> dict[str, int]:
        """Metrics that a sink could not take, by sink; only sinks that failed."""
        return {f"metrics not written, {name}": count for name, count in self._sinks.failures.items() if count}

    def restore(self, model: nn.Module, optimizer: torch.optim.AdamW) -> None:
        """Put the checkpoint's tensors into the model and the optimizer, bit for bit."""
        if self.last_checkpoint is None:
            return
        loaded = load_checkpoint(self.last_checkpoint)
        model.load_state_dict(loaded.tensors[self._stem])
        load_optimizer_tensors(model, optimizer, loaded.tensors["optimizer"])

    def started(self) -> None:
        """The gate has opened: time counts from here."""
        self._throughput = Throughput()

    def stepped(self, step: int, sums: dict[str, Tensor], outcome: StepOutcome) -> None:
        """Add the step to the window; flush the window when it is full."""
        self._state.step = step
        meter = self._meter
        meter.add(names.TRAIN_LOSS, sums["loss_num"], sums["loss_den"])
        for name in sums:
            if name.startswith(names.TERM):
                meter.add(names.train_term(name.removeprefix(names.TERM)), sums[name], sums["loss_den"])
        meter.add(names.TRAIN_ACCURACY, sums["correct"], sums["count"])
        meter.add(names.TRAIN_GRAD_NORM, outcome.grad_norm)
        meter.set(names.TRAIN_LEARNING_RATE, outcome.learning_rate)
        meter.add_total(names.TRAIN_BAD_STEPS, (~outcome.finite).float())
        meter.add_total(names.TRAIN_EMPTY_STEPS, (outcome.finite & ~outcome.taken).float())
        meter.add_total(names.TRAIN_BAD_DOCUMENTS, sums["bad_documents"])
        meter.add_total(_TOKENS, sums["tokens"])
        meter.add_total(_DOCUMENTS, sums["documents"])
        self._throughput.step()
        if self._state.step % self._plan.recipe.train.log_every_steps == 0 or self._is_last_step():
            self._flush()

    def validated(self, sums: dict[str, Tensor], model: nn.Module, seconds: float) -> None:
        """Write the metrics of a pass that took ``seconds``; remember whether this is the best step so far."""
        self._throughput.pause(seconds)
        with self._throughput.paused():
            values = lm_validation_metrics(sums) if self._is_lm else validation_metrics(sums)
            if self._live is not None:
                values |= self._live(model)
            self.validation = values
            self._sinks.write(self._state.step, values)
            self._judge(values)

    def boundary(self, model: nn.Module, optimizer: torch.optim.AdamW, *, stopping: bool) -> None:
        """Save when a checkpoint is due: by cadence, as the best, at the end, or because the user stops the run."""
        on_cadence = self._state.step % self._plan.recipe.checkpoint.every_steps == 0
        if not (on_cadence or self._is_best or self._is_last_step() or stopping):
            return
        if self._throughput.num_steps:
            self._flush()
        with self._throughput.paused():
            self._save(model, optimizer)
        self._progress.beat(f"{self._plan.trainer_role}-0")

    def _is_last_step(self) -> bool:
        return self._state.step >= self._num_steps

    def _flush(self) -> None:
        values = self._meter.flush()
        num_tokens, num_documents = values.pop(_TOKENS), values.pop(_DOCUMENTS)
        elapsed_s = self._throughput.elapsed_s
        self.tokens += num_tokens
        self.seconds += elapsed_s
        self._state.trained_tokens += round(num_tokens)
        self._state.train_seconds += elapsed_s
        self._state.trained_documents += round(num_documents)
        self._state.bad_documents += round(values[names.TRAIN_BAD_DOCUMENTS])
        self._state.skipped_steps += round(values[names.TRAIN_BAD_STEPS] + values[names.TRAIN_EMPTY_STEPS])
        self.last_loss = values[names.TRAIN_LOSS]
        rates = self._throughput.flush(num_tokens)
        if self._flops and names.PERF_TOKENS_PER_S in rates:
            rates[names.PERF_MFU] = self._flops * rates[names.PERF_TOKENS_PER_S]
        self._sinks.write(self._state.step, {**values, **rates})
        self._check_bad_documents()

    def _check_bad_documents(self) -> None:
        bad, all_, limit = (
            self._state.bad_documents,
            self._state.trained_documents,
            self._plan.recipe.train.max_bad_fraction,
        )
        if bad > limit * all_:
            raise BadFeatures(
                f"the target's features were not finite for {bad} of {all_} documents, more than "
                f"train.max_bad_fraction {limit:g} of them",
                fix="use target.dtype float32 or bfloat16, look at the documents named above, or raise the limit",
            )

    def _judge(self, values: dict[str, float]) -> None:
        metric = names.best_metric(self._plan.recipe.checkpoint.best, values)
        if metric not in values:
            return
        value, best = values[metric], self._state.best_value
        if metric != self._best_metric:  # the recipe chooses by another metric since the run was resumed
            best, self._best_metric = None, metric
        self._is_best = best is None or (value > best if names.larger_is_better(metric) else value < best)
        if self._is_best:
            self._state.best_value, self._state.best_step = value, self._state.step

    def _save(self, model: nn.Module, optimizer: torch.optim.AdamW) -> None:
        options = self._plan.recipe.checkpoint
        tensors = {self._stem: dict(model.state_dict()), "optimizer": optimizer_tensors(model, optimizer)}
        self.last_checkpoint = save_checkpoint(self.root, self._state.step, tensors, self._state.to_json())
        if self._is_best:
            assert self._state.best_value is not None
            assert self._best_metric is not None
            write_best(self.root, Best(self._state.step, self._best_metric, self._state.best_value))
            self._is_best = False
        prune(self.root, options.keep_last, self._state.best_step)


def _flops_per_token(plan: AnyPlan) -> float | None:
    """Of one token, as a share of what all GPUs of the run can do in a second; None where that is unknown."""
    if not isinstance(plan, CausalLMPlan) or plan.flops_per_token is None or plan.compute_dtype != "bfloat16":
        return None
    peaks = [peak_flops(device) for device in plan.trainer_devices]
    known = [peak for peak in peaks if peak is not None]
    return plan.flops_per_token / (sum(known) * plan.world.size) if len(known) == len(peaks) else None
