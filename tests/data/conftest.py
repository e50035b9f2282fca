"""Recipes for `prepare` with a tokenizer of bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helixctl.recipe.schema import Recipe
from tests.data import templates
from tests.data.recipes import write_rows


@pytest.fixture
def make_recipe(tmp_path: Path) -> Callable[..., Recipe]:
    """make_recipe(rows or sources, template=..., **data options): a recipe with a store of its own."""

    def make(train: list[Any], *, template: str = templates.CHATML, **data: Any) -> Recipe:
        templates.byte_tokenizer(template).save_pretrained(tmp_path / "target")
        is_sources = bool(train) and ("path" in train[0] or "dataset" in train[0])
        sources = train if is_sources else [{"path": write_rows(tmp_path / "train.jsonl", train)}]
        options = {"train": sources, "store": tmp_path / "store", "workers": 0, "validation": {"fraction": 0.0}, **data}
        target = {"model": str(tmp_path / "target")}
        return Recipe.model_validate({"run": {"dir": tmp_path}, "target": target, "data": options, "drafter": None})

    return make
