"""How a serving engine is told to use an exported drafter: as a DFlash one. Never imports torch."""

from __future__ import annotations

from helixctl.models.drafters.dflash import serving
from helixctl.models.drafters.jetspec.formats.zlab import ENGINES


def serving_commands(format_name: str, target: str, drafter: str, block_size: int) -> dict[str, str]:
    """Command lines by engine, for those that read the causality from the configuration."""
    commands = serving.serving_commands(format_name, target, drafter, block_size)
    return {engine: command for engine, command in commands.items() if engine in ENGINES}
