"""A stand-in for the module pynvml: as many GPUs as wanted, each answering what it is told to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

HEALTHY: dict[str, Any] = {
    "Name": "NVIDIA H200",
    "UUID": "GPU-a",
    "MemoryInfo": SimpleNamespace(total=140 << 30, used=1 << 30),
    "MigMode": [0, 0],
    "PersistenceMode": 1,
    "ComputeMode": 0,
    "CurrentClocksEventReasons": 1,
    "CurrPcieLinkWidth": 16,
    "MaxPcieLinkWidth": 16,
    "TotalEccErrors": 0,
    "RemappedRows": (0, 0, 0, 0),
}


class FakeNvml:
    """Answers of a driver. What a GPU has no answer for raises, as with an old driver."""

    class NVMLError(Exception):
        """As pynvml's."""

        def __init__(self, value: int) -> None:
            super().__init__(f"NVML error {value}")
            self.value = value

    def __init__(self, *gpus: dict[str, Any], init_error: int | None = None, p2p: int = 0) -> None:
        self.gpus = gpus
        self.init_error = init_error
        self.p2p = p2p
        self.is_open = False

    def nvmlInit(self) -> None:
        if self.init_error is not None:
            raise self.NVMLError(self.init_error)
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 12080

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"570.86"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, kind: int) -> int:
        assert kind == 0
        return self.p2p

    def __getattr__(self, name: str) -> Any:
        what = name.removeprefix("nvmlDeviceGet")

        def answer(handle: int, *_: Any) -> Any:
            if what not in self.gpus[handle]:
                raise self.NVMLError(3)
            return self.gpus[handle][what]

        return answer
