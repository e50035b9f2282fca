"""The frozen target: features for training, and decoding steps for validation and regeneration.

Loads any causal LM of transformers whose attention goes through its table of attention functions. Features are taken
by forward hooks that write only for a thread that asked; the forward ends after the last wanted layer. Nothing here
trains, samples, or knows a drafter.

Legend: R rows, S tokens per row, T new tokens per row, K taps, H target width, V vocabulary.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from helixctl.data.batch import MicroBatch
from helixctl.decoding.cache import RaggedCache
from helixctl.decoding.policy import Branches, RowCache
from helixctl.errors import ModelError
from helixctl.models import attention, loading
from helixctl.models.facts import TargetFacts, read_target_facts
from helixctl.models.features import FixedFeatures, check_calls
from helixctl.models.flex import FlexCall, make_flex
from helixctl.models.float8 import is_float8
from helixctl.models.float8_format import choose_float8
from helixctl.models.shared import SharedWeights
from helixctl.models.spread import RuleByDevice
from helixctl.recipe.schema import TargetOptions


class _Done(Exception):
    """Ends a forward after the last wanted layer."""


@dataclass
class _Capture:
    """What one forward of one thread wants: the outputs of ``layers``, and whether to stop after the last."""

    layers: frozenset[int]
    stop: bool
    states: dict[int, Tensor] = field(default_factory=dict)


class Target:
    """A frozen causal LM, what comes out of it on ``device``. Several threads may use it at once; see ``load``."""

    lends = False
    """Features are new memory at every call."""

    def __init__(
        self, model: Any, facts: TargetFacts, taps: Sequence[int], backend: attention.Backend, device: torch.device
    ) -> None:
        self.facts = facts
        self.taps = tuple(taps)
        self.device = device
        self.model = model
        self.backend = backend
        self.flex: FlexCall | None = make_flex(compiled=True) if backend == "flex" else None
        self._decoder: Any = loading.find_decoder(model, facts.num_layers)
        self._cache_argument = _cache_argument(self._decoder)
        self._local = threading.local()
        for index, layer in enumerate(self._decoder.layers):
            if index in self.taps or index == facts.num_layers - 1:
                layer.register_forward_hook(self._hook(index))
        self.dtype: torch.dtype = model.get_input_embeddings().weight.dtype
        self.float8 = is_float8(model)
        """Products are done in float8, so that the last bit of a state may become a percent of it."""
        shared = loading.shared_weights(model, self._decoder, facts)
        self.shared: SharedWeights = shared if shared.embedding.device == shared.head.device else shared.to(device)

    @classmethod
    def load(
        cls,
        options: TargetOptions,
        taps: Sequence[int],
        device: torch.device | str,
        dtype: torch.dtype,
        span: Sequence[torch.device] = (),
    ) -> Target:
        """Load the weights, frozen, in eval mode, with our attention.

        Args:
            options: Which checkpoint, and how.
            taps: Layers whose output is wanted.
            device: Where everything is, or at least what comes out.
            dtype: Of the weights.
            span: Several devices on which the layers stand in order, ``device`` last.

        Raises:
            ModelError: no such checkpoint, an unknown or unsupported architecture, or taps that it does not have.
        """
        device = torch.device(device)
        facts = read_target_facts(options)
        bad = [tap for tap in taps if not 0 <= tap < facts.num_layers]
        if bad or not taps:
            raise ModelError(
                f"target layers {bad or list(taps)} do not exist: {options.model} has {facts.num_layers} layers",
                fix=f"give target_layer_ids between 0 and {facts.num_layers - 1}",
            )
        apart, float8 = len(span) > 1, choose_float8(options, facts)
        backend = loading.spread_backend(options) if apart else loading.choose_backend(options, facts, device)
        model = loading.load_model(options, facts, dtype)
        loading.set_products(model, options, facts, float8)
        if apart:
            loading.spread_model(model, facts, span)
        else:
            model = model.to(device)
        return cls(model, facts, taps, backend, device)

    @property
    def precision(self) -> str:
        """What states and products are in, for people."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype} with float8 products" if self.float8 else dtype

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers, in order."""
        found: nn.ModuleList = self._decoder.layers
        return found

    @torch.no_grad()
    def features(self, batch: MicroBatch, *, last_hidden: bool = False) -> list[Tensor]:
        """Outputs of the tapped layers for packed rows, documents kept apart.

        Args:
            batch: R rows, on the CPU.
            last_hidden: Run all layers and append the last one's output, before the final norm.

        Returns:
            K tensors [R, S, H] in the order of the taps, one more with ``last_hidden``. Values at padding mean nothing.

        Raises:
            ModelError: several documents in a row of a recurrent target, or layers that bypass our attention.
        """
        order = self._order(last_hidden)
        wanted = set(order)
        capture = _Capture(frozenset(wanted), stop=True)
        ids = batch.input_ids.to(self.device, non_blocking=True)
        positions = batch.position_ids.to(self.device, non_blocking=True)
        with self._attend(batch) as rule, self._capturing(capture), suppress(_Done):
            self._decoder(input_ids=ids, position_ids=positions, use_cache=False)
        if rule is not None:
            check_calls(rule.num_calls, max(wanted) + 1, type(self._decoder).__name__)
        return [capture.states[layer].to(self.device, non_blocking=True) for layer in order]

    def fixed(self, batch: MicroBatch, *, last_hidden: bool = False) -> FixedFeatures | None:
        """What gives ``features`` fast for micro-batches of the shape of ``batch``, compiled and captured now.

        For the thread that will use it, under the compile lock, while other threads are at rest. None where the
        layers' attention is not flex: on a CPU, for a recurrent target, with ``target.compile: off``.

        Raises:
            ModelError: layers that bypass our attention.
        """
        if self.flex is None or self.facts.recurrent:
            return None
        return FixedFeatures(self._decoder, self._order(last_hidden), batch, self.flex, self.device)

    def _order(self, last_hidden: bool) -> tuple[int, ...]:
        """Layers in the order of the results."""
        return (*self.taps, self.facts.num_layers - 1) if last_hidden else self.taps

    @torch.no_grad()
    def decode_step(
        self,
        input_ids: Tensor,
        positions: Tensor,
        cache: RowCache,
        logits_at: Tensor | None = None,
        branches: Branches | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Run new tokens of ragged rows through the whole model and write them to the cache.

        Args:
            input_ids: [R, T] int64.
            positions: [R, T] int64; a row's tokens see its cached positions up to their own.
            cache: From ``new_cache``.
            logits_at: [R] int64, the one column of each row whose logits are wanted.
            branches: Where the cache holds them and what they see of each other, if they do not form a line.

        Returns:
            Logits [R, T, V] (with ``logits_at`` [R, 1, V]) in the target's dtype, and K features [R, T, H].
        """
        assert isinstance(cache, RaggedCache)
        if self.facts.recurrent:
            raise ModelError(
                f"{self.facts.model_type} keeps a recurrent state, which cannot be rolled back",
                fix="live decoding is not available for this target; set validation.live_prompts: 0",
            )
        length = cache.at(positions if branches is None else branches.places)
        rule = RuleByDevice(
            lambda device: attention.DecodeRule(
                positions.to(device), length, None if branches is None else branches.to(device)
            )
        )
        capture = _Capture(frozenset(self.taps), stop=False)
        with attention.attending(rule), self._capturing(capture):
            arguments = {self._cache_argument: cache, "use_cache": True}
            normed = self._decoder(input_ids=input_ids, position_ids=positions, **arguments).last_hidden_state
        if logits_at is not None:
            normed = normed[torch.arange(len(normed), device=normed.device), logits_at][:, None]  # [R, 1, H]
        return self.shared.logits(normed), [capture.states[tap].to(self.device) for tap in self.taps]

    def new_cache(self, num_rows: int, max_len: int) -> RaggedCache:
        """An empty cache for ``decode_step``: positions below ``max_len``."""
        return RaggedCache(num_rows, max_len)

    @contextmanager
    def _attend(self, batch: MicroBatch) -> Iterator[attention.Rule | None]:
        if self.facts.recurrent:
            if any(len(documents) > 1 for documents in batch.spans):
                raise ModelError(
                    f"{self.facts.model_type} is recurrent: documents of one row would leak into each other",
                    fix="set data.packing: false",
                )
            yield None
            return
        rule = RuleByDevice(lambda device: attention.make_packing(self.backend, batch, device, self.flex))
        with attention.attending(rule):
            yield rule

    @contextmanager
    def _capturing(self, capture: _Capture) -> Iterator[None]:
        self._local.capture = capture
        try:
            yield
        finally:
            self._local.capture = None

    def _hook(self, index: int) -> Any:
        def keep(_layer: nn.Module, _inputs: Any, output: Any) -> None:
            capture: _Capture | None = getattr(self._local, "capture", None)
            if capture is None or index not in capture.layers:
                return
            capture.states[index] = output[0] if isinstance(output, tuple) else output
            if capture.stop and index == max(capture.layers):
                raise _Done

        return keep


def _cache_argument(decoder: nn.Module) -> str:
    """Newer transformers call it ``cache`` and warn about the old name."""
    return "cache" if "cache" in inspect.signature(decoder.forward).parameters else "past_key_values"
