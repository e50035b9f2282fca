"""Workers that start when CUDA is under way: the case that stalls validation at 0 % where workers are forked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helixctl.data.loaders import WorkerOptions, create_document_loader, create_streaming_loader
from helixctl.data.window_set import ListedDocuments
from helixctl.data.windows import WindowOptions
from tests.data.test_streaming import OPTIONS, stream, write_text

DOCUMENTS = ListedDocuments([[5 + n % 50] * 90 for n in range(40)])


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("pin_memory", [False, True])
def test_two_epochs_of_training_and_validation_after_cuda_began(method: Any, pin_memory: bool, tmp_path: Path) -> None:
    weights = torch.randn(64, 8, device="cuda", requires_grad=True)
    torch.nn.functional.embedding(torch.tensor([1], device="cuda"), weights).sum().backward()
    workers = WorkerOptions(2, 1, method, timeout_s=120.0, pin_memory=pin_memory)
    options = WindowOptions(seq_len=16, rows=4, eos_id=1)
    source = stream(write_text(tmp_path / "text"))
    for _ in range(2):
        train = create_document_loader(DOCUMENTS, options, role="train", workers=workers)
        validation = create_document_loader(DOCUMENTS, options, role="validation", workers=workers)
        streamed = create_streaming_loader(source, OPTIONS, role="train", workers=workers)
        assert sum(step(batch.input_ids % 64, weights) for batch in train) == len(train)
        with torch.no_grad():
            assert sum(1 for batch in validation if batch.input_ids.to("cuda").shape == (4, 16)) == len(validation)
        assert sum(step(batch.input_ids % 64, weights) for batch in streamed) > 3


def step(ids: torch.Tensor, weights: torch.Tensor) -> int:
    torch.nn.functional.embedding(ids.to("cuda", non_blocking=True), weights).square().mean().backward()
    return 1
