"""Published drafters of any format: which algorithm and format a folder is of, and its tensors under our names.

What belongs to one algorithm comes from its plug-in: its part ``published`` and the formats in its folder ``formats``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from helixctl.checkpoint.header import CONFIG_FILE, read_config, read_headers, weight_files
from helixctl.errors import CheckpointError
from helixctl.models.drafters._findings import TensorInfo
from helixctl.plugins import DRAFTERS, load_plugin, plugin_names

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PublishedDrafter:
    """A folder with a published drafter; its weights are not read yet."""

    folder: Path
    algorithm: str
    format: str
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    """As they stand in the files."""

    @property
    def format_plugin(self) -> ModuleType:
        """The module that reads and writes its format."""
        return load_format(self.algorithm, self.format)

    def describe(self) -> Any:
        """What the configuration says, as the algorithm's ``published.Published``.

        Raises:
            CheckpointError: it describes something that helixctl cannot compute.
        """
        return self.format_plugin.read(self.config)

    def load_tensors(self) -> dict[str, Tensor]:
        """The drafter's own tensors under our names; copies of the target's are left out.

        Raises:
            CheckpointError: a file cannot be read.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        own_name = load_plugin(DRAFTERS, self.algorithm, "published").own_tensor_name
        loaded: dict[str, Tensor] = {}
        for path in weight_files(self.folder):
            try:
                content = load_file(path)
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path} cannot be read: {error}", fix="download the drafter again") from error
            named = {own_name(name): tensor for name, tensor in content.items()}
            loaded |= {name: tensor for name, tensor in named.items() if name is not None}
        return loaded


def is_published(folder: Path) -> bool:
    """Whether a folder looks like a published drafter rather than a checkpoint of a run."""
    return (folder / CONFIG_FILE).is_file()


def formats_of(algorithm: str) -> tuple[str, ...]:
    """Names of the formats that an algorithm is published in."""
    return plugin_names(_package(algorithm))


def default_format(algorithm: str) -> str:
    """The format that an algorithm's drafters are published in unless another is asked for."""
    name: str = load_plugin(DRAFTERS, algorithm, "published").DEFAULT_FORMAT
    return name


def load_format(algorithm: str, name: str) -> ModuleType:
    """The module of one format.

    Raises:
        UsageError: the algorithm has no such format.
    """
    return load_plugin(_package(algorithm), name)


def open_published(folder: Path) -> PublishedDrafter:
    """Find out what a folder holds, from its configuration and the headers of its files.

    Raises:
        CheckpointError: no configuration, no weights, or of no format that a plug-in knows.
    """
    config = read_config(folder)
    for algorithm in plugin_names(DRAFTERS):
        for name in formats_of(algorithm):
            if load_format(algorithm, name).matches(config):
                return PublishedDrafter(folder, algorithm, name, config, read_headers(folder))
    kind = config.get("speculators_model_type") or config.get("architectures") or config.get("model_type")
    known = ", ".join(f"{algorithm} ({', '.join(formats_of(algorithm))})" for algorithm in plugin_names(DRAFTERS))
    raise CheckpointError(
        f"{folder} is neither a checkpoint of a run nor a drafter that helixctl knows: its config says {kind}",
        fix=f"name a folder like checkpoints/step-00000100, or a drafter of {known}",
    )


def _package(algorithm: str) -> str:
    if algorithm not in plugin_names(DRAFTERS):
        load_plugin(DRAFTERS, algorithm)  # raises, with the nearest name
    return f"{DRAFTERS}.{algorithm}.formats"
