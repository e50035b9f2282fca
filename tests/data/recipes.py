"""Documents for `prepare`, and looks at what it made."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from helixctl.data.prepare import PrepareResult
from helixctl.data.store import Split
from tests.data import templates

Row = dict[str, Any]


def chat(question: str, answer: str, **more: Any) -> Row:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], **more}


def write_rows(path: Path, rows: Iterable[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def texts(split: Split) -> list[str]:
    tokenizer = templates.byte_tokenizer()
    return [str(tokenizer.decode(split.tokens(i).tolist())) for i in range(split.num_documents)]


def balanced(result: PrepareResult) -> bool:
    sources = result.manifest.sources
    return result.read == result.kept + sum(result.dropped.values()) and all(
        source.read == source.kept + sum(source.dropped.values()) for source in sources
    )
