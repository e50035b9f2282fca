"""Features of micro-batches of one shape, as fast as the device allows: layers compiled, the forward captured.

What cannot be compiled is interpreted, what cannot be captured is launched kernel by kernel; either is said once in
the log. The results are those of ``Target.features`` within rounding.

Legend: R rows, S tokens per row, K layers wanted, H target width.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from helixctl.data.batch import MicroBatch
from helixctl.errors import ModelError
from helixctl.models import attention
from helixctl.models.backbone import Backbone
from helixctl.models.captured import CapturedForward
from helixctl.models.flex import FlexCall, FlexPacking

logger = logging.getLogger(__name__)

OUTPUT_SETS = 2
"""A target computes one micro-batch while the last one is copied away."""


class FixedFeatures:
    """Made and called by one thread: it traces, compiles and captures when made, and never again."""

    def __init__(
        self, decoder: Any, layers: Sequence[int], batch: MicroBatch, flex: FlexCall, device: torch.device
    ) -> None:
        """Compile and capture for the shape of ``batch``.

        Args:
            decoder: Of transformers, on ``device``, with our attention.
            layers: Whose outputs are wanted.
            batch: Any micro-batch of the shape to come.
            flex: For layers that cannot be compiled.
            device: Where the decoder is.

        Raises:
            ModelError: layers that bypass our attention.
        """
        self._backbone = Backbone(decoder, layers)
        self._flex = flex
        self.device = device
        inputs = _inputs(batch)
        self._windows = self._probe(inputs, max(layers) + 1)
        self._compile(inputs)
        self._captured = self._capture(inputs)

    @property
    def lends(self) -> bool:
        """Whether the outputs are overwritten ``OUTPUT_SETS`` calls later."""
        return self._captured is not None

    def features(self, batch: MicroBatch) -> list[Tensor]:
        """K tensors [R, S, H], queued on the current stream."""
        inputs = _inputs(batch)
        if self._captured is not None:
            return self._captured(*inputs)
        return self._forward(*(tensor.to(self.device, non_blocking=True) for tensor in inputs))

    def _forward(self, input_ids: Tensor, position_ids: Tensor, document_ids: Tensor) -> list[Tensor]:
        rule = FlexPacking(self._flex, document_ids, document_ids)
        rule.make_masks(self._windows)
        with attention.attending(rule):
            return self._backbone(input_ids, position_ids)

    def _probe(self, inputs: Sequence[Tensor], num_layers: int) -> tuple[int | None, ...]:
        """The windows of the layers, after a forward without attention."""
        probe = attention.Probe()
        input_ids, position_ids, _ = (tensor.to(self.device) for tensor in inputs)
        with attention.attending(probe):
            self._backbone(input_ids, position_ids)
        check_calls(probe.num_calls, num_layers, self._backbone.name)
        return tuple(probe.windows)

    def _compile(self, inputs: Sequence[Tensor]) -> None:
        self._backbone.compile()
        try:
            self._forward(*(tensor.to(self.device) for tensor in inputs))
        except torch._dynamo.exc.TorchDynamoException as error:
            self._backbone.interpret()
            reason = str(error).strip().partition("\n")[0]
            logger.warning("the layers of %s are not compiled: %s", self._backbone.name, reason)

    def _capture(self, inputs: Sequence[Tensor]) -> CapturedForward | None:
        if self.device.type != "cuda":
            return None
        try:
            return CapturedForward(self._forward, inputs, self.device, OUTPUT_SETS)
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            logger.warning("the forward of %s is not captured in a CUDA graph: %s", self._backbone.name, reason)
            return None


def check_calls(num_calls: int, num_layers: int, name: str) -> None:
    """Refuse a decoder whose layers go past our attention.

    Raises:
        ModelError: ``num_calls``, of our attention in one forward, is not ``num_layers``.
    """
    if num_calls != num_layers:
        raise ModelError(
            f"{num_calls} of {num_layers} layers of {name} use our attention; in the others documents of one row "
            "could see each other",
            fix="use another target, or set data.packing: false and report this architecture",
        )


def _inputs(batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
    return batch.input_ids, batch.position_ids, batch.document_ids
