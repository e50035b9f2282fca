"""Rows of Parquet files and of Hugging Face datasets, as if each were a line of JSONL: the formats need not know.

The packages that read them are optional and imported when the first such source is opened.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from helixctl.data.records import Piece
from helixctl.errors import DataError
from helixctl.recipe.schema import DatasetOptions

_BATCH_ROWS = 256

Row = Mapping[str, Any]


def row_piece(path: str, number: int, row: Row) -> Piece:
    """Row ``number`` (from 1) of a table as a line of JSONL. Dates and the like become text, bytes base64."""
    raw = json.dumps(row, ensure_ascii=False, default=_plain)
    return Piece(path, number, raw.encode("utf-8", "surrogatepass"))


def parquet_rows(file: Path) -> Iterator[tuple[Row, float]]:
    """Rows of a Parquet file, each with the share of the file that has been read behind it.

    Raises:
        DataError: there is no pyarrow, or the file is damaged.
    """
    parquet = _import("pyarrow.parquet", "parquet", f"{file} is a Parquet file")
    arrow = _import("pyarrow", "parquet", "")
    try:
        with parquet.ParquetFile(file) as table:
            num_rows, done = table.metadata.num_rows, 0
            for batch in table.iter_batches(batch_size=_BATCH_ROWS):
                for row in batch.to_pylist():
                    done += 1
                    yield row, done / num_rows
    except arrow.ArrowException as error:
        raise DataError(f"{file} is damaged: {_first_line(error)}", fix="fetch or write it again") from error


class DatasetReader:
    """Yields rows of a Hugging Face dataset as pieces; afterwards ``num_bytes`` and ``sha256`` tell what was read."""

    total_bytes = 0
    done_bytes = 0
    """How large a dataset is, is not known before it is read: progress is counted in documents alone."""

    def __init__(self, options: DatasetOptions) -> None:
        """Opens it, and downloads it first if it is neither streamed nor in the local cache.

        Raises:
            DataError: there is no package `datasets`, no such dataset, or no such split.
        """
        self._label = f"{options.name}[{options.split}]"
        self._dataset = _open(options, self._label)
        self._hash = hashlib.sha256()
        self.num_bytes = 0
        """Of the rows as JSON."""

    @property
    def sha256(self) -> str:
        """Hash of the rows read so far, as JSON."""
        return self._hash.hexdigest()

    def pieces(self) -> Iterator[Piece]:
        """One per row, in order.

        Raises:
            DataError: the dataset is empty, or reading fails on the way.
        """
        number = 0
        for row in self._rows():
            number += 1
            piece = row_piece(self._label, number, row)
            self._hash.update(piece.raw)
            self.num_bytes += len(piece.raw)
            yield piece
        if not number:
            raise DataError(f"{self._label} is empty", fix="take it out of the recipe, or name another split")

    def _rows(self) -> Iterator[Row]:
        batches = iter(self._dataset.iter(batch_size=_BATCH_ROWS))
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except (OSError, ValueError, RuntimeError) as error:
                fix = "check the network, or download it first: set dataset.streaming: false"
                raise DataError(f"{self._label} cannot be read: {_first_line(error)}", fix=fix) from error
            names = list(batch)
            for values in zip(*batch.values(), strict=True):
                yield dict(zip(names, values, strict=True))


def _open(options: DatasetOptions, label: str) -> Any:
    datasets = _import("datasets", "datasets", f"{label} is a Hugging Face dataset")
    datasets.disable_progress_bars()  # ours are the only ones
    try:
        if _is_saved(Path(options.name)):
            return _saved_split(datasets.load_from_disk(options.name), options)
        return datasets.load_dataset(
            options.name,
            options.config,
            split=options.split,
            revision=options.revision,
            streaming=options.streaming,
        )
    except (OSError, ValueError, RuntimeError) as error:  # what the package raises, its own errors are among these
        fix = "correct name, config and split; without a network it must be in the local cache, or be a folder"
        raise DataError(f"{label} cannot be opened: {_first_line(error)}", fix=fix) from error


def _is_saved(folder: Path) -> bool:
    """Whether ``save_to_disk`` wrote it."""
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _saved_split(saved: Any, options: DatasetOptions) -> Any:
    """The split of what ``save_to_disk`` wrote: all splits, or a single one."""
    if not isinstance(saved, dict):
        return saved
    if options.split not in saved:
        raise ValueError(f"it has the splits {', '.join(map(str, saved))}")
    return saved[options.split]


def _import(module: str, extra: str, why: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise DataError(
            f"{why}, and the package {package} cannot be imported: {error}", fix=f"pip install 'helixctl[{extra}]'"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _plain(value: Any) -> Any:
    """What JSON has no form for."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)
