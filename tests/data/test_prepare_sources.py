"""prepare with several sources: exact weights, an account by source, files by pattern, tables, the mask token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from helixctl.cli.tables import prepare_rows
from helixctl.data import prepare as prepare_module
from helixctl.data.prepare import prepare
from helixctl.errors import DataError
from helixctl.recipe.schema import DrafterOptions, Recipe
from tests.data import templates
from tests.data.recipes import balanced, chat, texts, write_rows
from tests.data.test_tables import saved, write_parquet


def test_weights_repeat_and_sample_by_content(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    sources = [
        {"path": write_rows(tmp_path / "a.jsonl", [chat(f"A{i}.", "x") for i in range(100)]), "weight": 2.5},
        {"path": write_rows(tmp_path / "b.jsonl", [chat(f"B{i}.", "x") for i in range(100)]), "weight": 0.25},
        {"path": write_rows(tmp_path / "c.jsonl", [chat(f"C{i}.", "x") for i in range(100)])},
    ]
    result = prepare(make_recipe(sources, max_dropped=0.0))
    counts = Counter(texts(result.store.split("train")))
    a, b, c = ([n for text, n in counts.items() if f"user\n{name}" in text] for name in "ABC")
    assert len(a) == 100 and set(a) == {2, 3} and sum(a) == 250
    assert set(b) == {1} and len(b) == 25
    assert c == [1] * 100
    assert result.dropped == {"sampled_out": 75} and balanced(result)
    assert [source.repeats for source in result.manifest.sources] == [150, 0, 0]
    assert [source.documents for source in result.manifest.sources] == [250, 25, 100]


def test_sources_are_accounted_for_apart_to_the_token(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", [chat(f"A{i}.", "long answer") for i in range(90)] + [{"messages": []}] * 10)
    write_rows(tmp_path / "b.jsonl", [{"text": f"B{i}."} for i in range(50)])
    write_rows(tmp_path / "c.jsonl", [{"text": "only held out"}])
    sources = [
        {"path": tmp_path / "a.jsonl", "weight": 1.5, "name": "chats"},
        {"path": tmp_path / "b.jsonl", "format": "text", "weight": 0.1},
    ]
    held_out = {"fraction": 0.1, "sources": [{"path": tmp_path / "c.jsonl", "format": "text"}]}
    result = prepare(make_recipe(sources, validation=held_out))
    splits, counts = result.manifest.splits, {source.name: source for source in result.manifest.sources}
    assert list(counts) == ["c.jsonl", "chats", "b.jsonl"] and balanced(result)
    assert counts["chats"].read == 100 and counts["chats"].dropped == {"empty": 10}
    assert counts["c.jsonl"].held_out == 1 and counts["c.jsonl"].documents == counts["c.jsonl"].tokens == 0
    trained = counts["chats"].kept - counts["chats"].held_out
    assert counts["chats"].held_out > 0 and counts["chats"].documents == int(1.5 * trained + 0.5)
    assert counts["b.jsonl"].supervised == counts["b.jsonl"].tokens > counts["b.jsonl"].documents > 0
    assert counts["chats"].supervised == counts["chats"].documents * (len("long answer") + 1)
    for total, one in (("documents", "documents"), ("tokens", "tokens"), ("supervised", "supervised")):
        assert getattr(splits["train"], total) == sum(getattr(source, one) for source in counts.values())
    assert splits["validation"].documents == sum(source.held_out for source in counts.values())
    account = result.manifest.by_source
    assert [round(one["share"], 6) for one in account.values()] == [
        0.0,
        *(round(m.share, 6) for m in result.manifest.mix),
    ]
    shown = prepare_rows(result)
    assert shown["source chats"].startswith(f"100 read, {trained + counts['chats'].held_out} kept")
    assert "10 empty" in shown["source chats"] and "(weight 1.5)" in shown["source chats"]
    assert "documents an epoch" not in shown["source c.jsonl"]
    assert {prompt["source"] for prompt in result.store.prompts()} == {"chats", "b.jsonl", "c.jsonl"}


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sources=st.lists(
        st.tuples(st.integers(1, 40), st.sampled_from([0.1, 0.5, 1.0, 1.3, 2.0, 3.75])), min_size=1, max_size=4
    ),
    fraction=st.sampled_from([0.0, 0.3]),
    chunk=st.sampled_from([1, 7, 256]),
)
def test_any_mix_is_exact_and_does_not_depend_on_how_it_was_read(
    make_recipe: Callable[..., Recipe], tmp_path: Path, sources: list[tuple[int, float]], fraction: float, chunk: int
) -> None:
    listed = [
        {
            "path": write_rows(tmp_path / f"{number}.jsonl", [chat(f"{number}:{i}", "ab") for i in range(size)]),
            "weight": weight,
        }
        for number, (size, weight) in enumerate(sources)
    ]
    recipe = make_recipe(listed, validation={"fraction": fraction}, max_dropped=1.0)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(prepare_module, "_CHUNK_PIECES", chunk)
        try:
            result = prepare(recipe)
        except DataError as error:
            assume("none is left to train on" not in str(error))
            raise
    assert balanced(result)
    entries = Counter(text.split("user\n")[1].split("<")[0] for text in texts(result.store.split("train")))
    for number, (counts, (size, weight)) in enumerate(zip(result.manifest.sources, sources, strict=True)):
        own = {name: count for name, count in entries.items() if name.startswith(f"{number}:")}
        trained = size - counts.held_out
        assert sum(own.values()) == counts.documents == int(Fraction(str(weight)) * trained + Fraction(1, 2))
        assert set(own.values()) <= {int(weight), int(weight) + 1}
        assert counts.dropped.get("sampled_out", 0) == trained - len(own)
    assert prepare(recipe).store.fingerprint == result.store.fingerprint


def test_documents_keep_the_order_of_the_sources_whatever_their_weights(
    make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    sources = [
        {"path": write_rows(tmp_path / f"{i}.jsonl", [chat(f"{i}{j:03}", "a") for j in range(40)]), "weight": weight}
        for i, weight in enumerate((0.5, 1.0, 1.5))
    ]
    result = prepare(make_recipe(sources))
    asked = [text.split("user\n")[1][:4] for text in texts(result.store.split("train"))]
    assert asked == sorted(asked) and len(asked) == 20 + 40 + 60
    again = prepare(make_recipe(sources, workers=0))
    assert again.store.fingerprint == result.store.fingerprint


def test_a_share_that_is_missed_names_the_weight_that_would_give_it(
    make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    sources: list[dict[str, Any]] = [
        {"path": write_rows(tmp_path / "a.jsonl", [chat(f"A{i:03}", "x") for i in range(200)]), "share": 0.3},
        {"path": write_rows(tmp_path / "b.jsonl", [chat(f"B{i:03}", "x") for i in range(200)])},
    ]
    with pytest.raises(DataError, match=r"a\.jsonl makes up 50\.0% of the training tokens, not 30\.0%") as caught:
        prepare(make_recipe(sources))
    assert caught.value.fix and "weight 0.4286" in caught.value.fix
    sources[0]["weight"] = 0.4286
    result = prepare(make_recipe(sources))
    assert [source.documents for source in result.manifest.sources] == [86, 200]


def test_documents_with_the_mask_token_are_dropped_and_many_are_an_error(
    make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    tokenizer = templates.byte_tokenizer()
    options = DrafterOptions(algorithm="dflash", mask_token_id=tokenizer.encode("Z", add_special_tokens=False)[0])
    rows = [chat(f"question {i}", "answer") for i in range(150)]
    recipe = make_recipe([*rows, chat("which letter?", "Z")]).model_copy(update={"drafter": options})
    result = prepare(recipe)
    assert result.dropped == {"mask_token": 1}
    assert result.examples["mask_token"][0].endswith("train.jsonl:151: 'Z' is token 33 of 35")
    recipe = make_recipe([*rows, *[chat("which?", "Z")] * 3]).model_copy(update={"drafter": options})
    with pytest.raises(DataError, match=r"(?s)train\.jsonl: drafter\.mask_token_id occurs in 3 of 153 .*mask_token: 3"):
        prepare(recipe)
    ends = options.model_copy(update={"mask_token_id": tokenizer.eos_token_id})
    with pytest.raises(DataError, match=r"drafter\.mask_token_id .* which ends answers"):
        prepare(recipe.model_copy(update={"drafter": ends}))


def test_a_source_tree_becomes_texts_by_pattern(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for name, content in {
        "a.py": b"print('a')\r\n",
        "sub/latin.py": "# -*- coding: latin-1 -*-\n# \xe4\n".encode("latin-1"),
        "sub/broken.py": b"# \xff\n",
        "sub/__init__.py": b"",
        "site-packages/other.py": b"no",
        "data.json": b"{}",
        "notes.txt": b"no",
    }.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes(content)
    source = {"path": tree, "format": "text", "include": ["*.py"], "exclude": ["site-packages"]}
    result = prepare(make_recipe([source]))
    assert texts(result.store.split("train")) == ["print('a')\n", "# -*- coding: latin-1 -*-\n# ä\n"]
    assert result.dropped == {"empty": 1, "not_text": 1} and result.read == 4


def test_parquet_and_jsonl_of_the_same_rows_make_equal_stores(
    make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    rows = [chat(f"question {i}", "answer") for i in range(30)]
    plain = prepare(make_recipe(rows)).store.fingerprint
    write_parquet(tmp_path / "a.parquet", rows)
    assert prepare(make_recipe([{"path": tmp_path / "a.parquet"}])).store.fingerprint == plain
    saved(tmp_path / "set", rows)
    result = prepare(make_recipe([{"dataset": {"name": str(tmp_path / "set")}}]))
    assert result.store.fingerprint == plain
    assert result.manifest.sources[0].path == f"{tmp_path / 'set'}[train]"
