"""Names, types and shapes of the tensors in a published folder, from the files' headers alone. Never imports torch."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from helixctl.errors import CheckpointError
from helixctl.models.drafters._findings import TensorInfo

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
_MAX_HEADER_BYTES = 100 << 20
_DTYPES = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "I64": "int64",
    "I32": "int32",
    "BOOL": "bool",
    "U8": "uint8",
    "F8_E4M3": "float8_e4m3fn",
}


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json.

    Raises:
        CheckpointError: there is none, or it is no JSON object.
    """
    path = folder / CONFIG_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"there is no {path}", fix="name the folder of a published drafter") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}", fix="download the drafter again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object", fix="download the drafter again")
    return content


def weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors files, all shards of a sharded one.

    Raises:
        CheckpointError: there are none; names what stands there instead.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        other = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        found = f"; there is {', '.join(other)}" if other else ""
        raise CheckpointError(f"{folder} holds no .safetensors file{found}", fix="convert the weights to safetensors")
    return files


def read_headers(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor of the folder's safetensors files.

    Raises:
        CheckpointError: no such file, or one that is torn.
    """
    found: dict[str, TensorInfo] = {}
    for path in weight_files(folder):
        for name, entry in _read_header(path).items():
            if name != "__metadata__":
                dtype = _DTYPES.get(entry["dtype"], str(entry["dtype"]).lower())
                found[name] = TensorInfo(dtype, tuple(entry["shape"]))
    return found


def _read_header(path: Path) -> dict[str, Any]:
    """The JSON object in front of the data; also whether the file is as long as it says."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header: dict[str, Any] = json.loads(file.read(min(length, _MAX_HEADER_BYTES)))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        whole = path.stat().st_size == 8 + length + max(ends, default=0)
    except (OSError, ValueError, struct.error, AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is no safetensors file: {error}", fix="download the drafter again") from error
    if not whole:
        raise CheckpointError(f"{path} is torn: its size is not what its header says", fix="download the drafter again")
    return header
