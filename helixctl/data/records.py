"""What a dataset format yields, before any tokenizer has seen it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
"""``role`` (system, user, assistant, tool), ``content`` (str), and where given ``reasoning_content``, ``tool_calls``,
``name``, ``tool_call_id``."""


@dataclass(frozen=True)
class Piece:
    """The raw bytes of one document."""

    path: str
    line: int
    """Line of the file, from 1; 0 when the piece is the whole file."""
    raw: bytes

    @property
    def where(self) -> str:
        """Place for messages: ``file:line`` or ``file``."""
        return f"{self.path}:{self.line}" if self.line else self.path


@dataclass(frozen=True)
class Chat:
    """A conversation with at least one assistant turn."""

    messages: list[Message]
    tools: list[Any] | None
    where: str
    cut: bool = False
    """The last answer was cut by a length limit: what would close its turn is no part of the document."""


@dataclass(frozen=True)
class Text:
    """Plain text; all of it is supervised."""

    text: str
    where: str


@dataclass(frozen=True)
class Tokens:
    """Ids and mask made elsewhere, with this target's tokenizer."""

    input_ids: Sequence[int]
    loss_mask: Sequence[bool]
    where: str


@dataclass(frozen=True)
class Bad:
    """A row that is well-formed and of no use; it is counted under ``reason``."""

    reason: str
    where: str
    detail: str


Record = Chat | Text | Tokens | Bad
