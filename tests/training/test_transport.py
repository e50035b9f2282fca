from __future__ import annotations

import pytest
import torch

from helixctl.engine.streams import StreamContext
from helixctl.errors import ModelError
from helixctl.training.transport import Direct, Pinned, choose_transport

CPU = torch.device("cpu")


@pytest.mark.parametrize("choice", ["auto", "peer", "pinned"])
def test_within_one_device_a_copy_is_direct(choice) -> None:
    assert isinstance(choose_transport(choice, CPU, CPU, 2), Direct)
    gpu = torch.device("cuda", 0)
    assert isinstance(choose_transport(choice, gpu, gpu, 2), Direct)
    assert isinstance(choose_transport(choice, gpu, CPU, 2), Direct)


@pytest.mark.parametrize(
    ("peers", "choice", "kind"), [(True, "auto", Direct), (False, "auto", Pinned), (True, "pinned", Pinned)]
)
def test_between_gpus_the_way_depends_on_what_they_can(monkeypatch, peers, choice, kind) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: peers)
    assert isinstance(choose_transport(choice, torch.device("cuda", 0), torch.device("cuda", 1), 2), kind)


def test_peer_is_refused_where_devices_are_none(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: False)
    with pytest.raises(ModelError, match=r"(?s)cuda:1 cannot read the memory of cuda:0.*pinned"):
        choose_transport("peer", torch.device("cuda", 0), torch.device("cuda", 1), 2)


@pytest.mark.gpu
def test_through_the_host_everything_arrives_whole() -> None:
    """On one GPU: the ring is used many times over, sources are overwritten as soon as the stream allows."""
    device = torch.device("cuda", 0)
    pinned = Pinned(2)
    source, arrived = torch.empty(1 << 20, device=device), []
    with StreamContext(device):
        for i in range(10):
            source.fill_(i)
            destination = torch.full_like(source, -1)
            pinned.copy(destination, source)
            arrived.append(destination)
    assert [float(d.min()) for d in arrived] == [float(d.max()) for d in arrived] == list(range(10))
