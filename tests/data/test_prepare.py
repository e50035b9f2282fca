"""prepare: every document is kept or dropped for a reason, splits never share content, failures leave the old store."""

from __future__ import annotations

import json
import pickle
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from helixctl.data.documents import hash_fraction
from helixctl.data.fingerprint import check_tokenizer, describe_tokenizer
from helixctl.data.prepare import prepare, samples
from helixctl.data.store import Store
from helixctl.errors import DataError, ModelError
from helixctl.recipe.schema import Recipe
from tests.data import templates
from tests.data.recipes import Row, balanced, chat, texts, write_rows


def test_chats_become_documents_in_the_order_of_the_file(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    progress: list[tuple[int, int, int]] = []
    recipe = make_recipe([chat("q1", "a1"), chat("q2", "a2", finish_reason="length")])
    result = prepare(recipe, on_progress=lambda *numbers: progress.append(numbers))
    train = result.store.split("train")
    first = "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\na1<|im_end|>\n"
    assert texts(train) == [first, "<|im_start|>user\nq2<|im_end|>\n<|im_start|>assistant\na2"]
    assert (result.read, result.kept, result.dropped, result.duplicates) == (2, 2, {}, 0)
    assert train.supervised_counts.tolist() == [3, 2]
    assert result.tokens == train.num_tokens and result.supervised_share == 5 / train.num_tokens
    num_bytes = (tmp_path / "train.jsonl").stat().st_size
    assert progress == [(num_bytes, num_bytes, 2)]
    assert result.manifest.sources[0].num_bytes == num_bytes
    assert Store.open(recipe.data.store).fingerprint == result.store.fingerprint


def test_every_row_is_kept_or_dropped_for_a_named_reason(make_recipe: Callable[..., Recipe]) -> None:
    rows: list[Row] = [
        chat("q", "answer"),
        chat("q", "<|im_end|>"),
        chat("q", "", finish_reason="length"),
        {"messages": [{"role": "laguna_s", "content": "x"}]},
        {"messages": [{"role": "laguna_s", "content": "y"}]},
        {"messages": [{"role": "narrator", "content": "x"}]},
        {"messages": []},
    ]
    result = prepare(make_recipe([*rows, *(chat("q", f"more {i}") for i in range(9))]))
    assert result.dropped == {"control_text": 1, "no_anchor": 1, "unknown_role": 3, "empty": 1}
    assert balanced(result) and result.read == 16
    assert [e.split(": ", 1)[1] for e in result.examples["unknown_role"]] == ["'laguna_s'", "'narrator'"]
    assert "0 of 20 tokens supervised" in result.examples["no_anchor"][0]


def test_rows_of_many_chunks_are_all_there(make_recipe: Callable[..., Recipe]) -> None:
    calls: list[int] = []
    rows = [chat(f"question {i}", f"answer {i}") for i in range(600)]
    result = prepare(make_recipe(rows), on_progress=lambda read, total, kept: calls.append(kept))
    assert (result.read, result.kept) == (600, 600)
    assert len(calls) == 3 and calls == sorted(calls)
    assert [f"question {i}" in text for i, text in enumerate(texts(result.store.split("train")))] == [True] * 600


def test_all_three_formats_go_into_one_store(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("a plain text")
    write_rows(
        tmp_path / "t.jsonl",
        [{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}, {"input_ids": [9999], "loss_mask": [1]}],
    )
    sources = [
        {"path": write_rows(tmp_path / "c.jsonl", [chat("q", "a")])},
        {"path": tmp_path / "book.txt", "format": "text"},
        {"path": tmp_path / "t.jsonl", "format": "tokens"},
    ]
    result = prepare(make_recipe(sources))
    train = result.store.split("train")
    assert texts(train)[1] == "a plain text" and train.loss_mask(1).all()
    assert train.tokens(2).tolist() == [5, 6, 7] and train.loss_mask(2).tolist() == [False, True, True]
    assert result.dropped == {"outside_vocabulary": 1}
    assert [source.kept for source in result.manifest.sources] == [1, 1, 1]


def test_the_last_turn_policy_reaches_the_store(make_recipe: Callable[..., Recipe]) -> None:
    messages = [*chat("q", "first")["messages"], *chat("r", "second")["messages"]]
    result = prepare(make_recipe([{"messages": messages}], mask_policy="last_turn"))
    assert result.store.split("train").supervised_counts.tolist() == [len("second") + 1]
    assert result.manifest.mask_policy == "last_turn"


def test_splits_follow_the_content_and_never_share_any(make_recipe: Callable[..., Recipe]) -> None:
    rows = [chat(f"question {i % 300}", "answer") for i in range(400)]
    result = prepare(make_recipe(rows, validation={"fraction": 0.2}))
    train, validation = result.store.split("train"), result.store.split("validation")
    assert not set(texts(train)) & set(texts(validation))
    assert train.num_documents + validation.num_documents == 400
    assert 40 < validation.num_documents < 120
    assert result.duplicates == 100
    again = prepare(make_recipe(rows[::-1], validation={"fraction": 0.2}))
    assert set(texts(again.store.split("validation"))) == set(texts(validation))


def test_all_answers_to_a_prompt_go_to_one_split_and_make_one_prompt(make_recipe: Callable[..., Recipe]) -> None:
    rows = [chat(f"question {i}", f"answer {j}") for j in range(3) for i in range(60)]
    store = prepare(make_recipe(rows, validation={"fraction": 0.2})).store
    questions = [{text.split("answer")[0] for text in texts(store.split(name))} for name in ("train", "validation")]
    assert not questions[0] & questions[1]
    assert store.split("validation").num_documents == 3 * len(store.prompts()) > 0


def test_prompts_are_what_precedes_the_first_answer(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("once upon a time")
    tools = [{"type": "function", "function": {"name": "f"}}]
    system = {"role": "system", "content": "s"}
    rows = [
        {"messages": [system, *chat("q", "a")["messages"], *chat("r", "b")["messages"]], "tools": tools},
        {"messages": [{"role": "assistant", "content": "nobody asked"}]},
    ]
    held_out = [
        {"path": write_rows(tmp_path / "held.jsonl", rows)},
        {"path": tmp_path / "book.txt", "format": "text"},
    ]
    result = prepare(make_recipe([chat("x", "y")], validation={"fraction": 0.0, "sources": held_out}))
    assert result.store.split("validation").num_documents == 3
    assert result.store.prompts() == [
        {"index": 0, "messages": [system, {"role": "user", "content": "q"}], "tools": tools, "source": "held.jsonl"},
        {"index": 2, "text": "once upo", "source": "book.txt"},
    ]


def test_a_held_out_conversation_never_trains(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    held = {"path": write_rows(tmp_path / "held.jsonl", [chat("secret", "test"), chat("other", "test")])}
    rows = [chat("secret", "test"), chat("open", "book"), chat("secret", "test")]
    result = prepare(make_recipe(rows, validation={"fraction": 0.0, "sources": [held]}, max_dropped=0.0))
    assert result.dropped == {"held_out": 2} and balanced(result)
    assert [source.role for source in result.manifest.sources] == ["validation", "train"]
    assert not any("secret" in text for text in texts(result.store.split("train")))


def test_the_draw_for_the_split_is_not_the_draw_for_copies() -> None:
    assert hash_fraction(bytes(8) + b"\xff" * 8, 0) == 0 != hash_fraction(bytes(8) + b"\xff" * 8, 1)


def test_documents_that_rows_cut_are_counted(make_recipe: Callable[..., Recipe]) -> None:
    rows = [chat("q", "a"), chat("q", "long " * 20), chat("question " * 9, "a")]
    result = prepare(make_recipe(rows, seq_len=40))
    assert (result.num_truncated, result.num_left_out) == (2, 1)
    assert result.store.split("train").longest > 100  # the store keeps whole documents


@pytest.mark.parametrize(
    ("rows", "template", "message"),
    [
        (
            [chat("q", "a")],
            templates.TAGS_UNUSED,
            r"(?s)of 1 documents none is left to train on.*no_anchor: 1.*0 of \d+",
        ),
        ([chat("q", "a")], templates.RAISING, "cannot render a question and an answer"),
        ([chat("q", "a")], templates.NO_MARKERS, r"train\.jsonl:1: the answers cannot be told from the rest"),
        ([{"messages": []}, chat("q", "<|im_end|>")], templates.CHATML, r"(?s)none is left.*empty: 1.*control_text: 1"),
        ([{"messages": []}] * 3 + [chat("q", "a")], templates.CHATML, r"(?s)3 of 4 .* allows 50%.*jsonl:1: the conv"),
    ],
)
def test_nothing_sensible_to_train_on_is_an_error_and_no_store(
    make_recipe: Callable[..., Recipe], rows: list[Row], template: str, message: str
) -> None:
    recipe = make_recipe(rows, template=template)
    with pytest.raises(DataError, match=message) as caught:
        prepare(recipe)
    assert caught.value.fix
    assert not recipe.data.store.exists()


def test_rows_that_the_template_refuses_are_counted(make_recipe: Callable[..., Recipe]) -> None:
    rows = [chat("q", "a"), {"messages": [{"role": "system", "content": "s"}, *chat("q", "a")["messages"]]}]
    result = prepare(make_recipe(rows, template=templates.ALTERNATING))
    assert result.dropped == {"template_error": 1}
    assert "train.jsonl:2: TemplateError: must begin with user" in result.examples["template_error"][0]


def test_a_mask_over_everything_is_an_error_that_shows_the_sample(make_recipe: Callable[..., Recipe]) -> None:
    """A template whose questions leave no text: all that is left is supervised."""
    tagged = "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    template = f"{{% for m in messages if m.role == 'assistant' %}}{tagged}{{% endfor %}}"
    with pytest.raises(DataError, match=r"100\.0% of the tokens are supervised, questions too: 'answer<"):
        prepare(make_recipe([chat("q", "answer")], template=template))


def test_broken_json_stops_before_anything_is_replaced(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    old = prepare(make_recipe([chat("q", "old")])).store.fingerprint
    lines = [json.dumps(chat("q", f"a{i}")) for i in range(10)]
    (tmp_path / "bad.jsonl").write_text("\n".join([*lines[:6], lines[6][:-3], *lines[7:]]))
    with pytest.raises(DataError, match=r"bad\.jsonl:7: not JSON"):
        prepare(make_recipe([{"path": tmp_path / "bad.jsonl"}]))
    assert Store.open(tmp_path / "store").fingerprint == old
    assert not (tmp_path / ".store.tmp").exists()


def test_every_source_is_looked_for_before_the_first_is_read(
    make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    first = {"path": write_rows(tmp_path / "a.jsonl", [chat("q", "a")])}
    calls: list[tuple[int, int, int]] = []
    with pytest.raises(DataError, match="no file or folder"):
        prepare(make_recipe([first, {"path": tmp_path / "missing.jsonl"}]), on_progress=lambda *n: calls.append(n))
    assert calls == []


def test_a_target_without_a_tokenizer_is_an_error(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    recipe = make_recipe([chat("q", "a")])
    empty = tmp_path / "empty"
    empty.mkdir()
    target = recipe.target.model_copy(update={"model": str(empty)})
    with pytest.raises(ModelError, match="tokenizer"):
        prepare(recipe.model_copy(update={"target": target}))


def test_a_full_disk_leaves_the_old_store(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    """The system's own limit on file sizes stands in for a full disk."""
    old = prepare(make_recipe([chat("q", "old")])).store.fingerprint
    recipe = make_recipe([chat("q", f"{i} " * 50) for i in range(300)])
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
        with pytest.raises(DataError, match=r"could not be written: .*what stood there is unchanged"):
            prepare(recipe)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert Store.open(tmp_path / "store").fingerprint == old
    assert not (tmp_path / ".store.tmp").exists()


def test_an_interrupt_leaves_the_old_store(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    old = prepare(make_recipe([chat("q", "old")])).store.fingerprint

    def interrupt(read: int, total: int, kept: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(make_recipe([chat("q", "new")]), on_progress=interrupt)
    assert Store.open(tmp_path / "store").fingerprint == old
    assert not (tmp_path / ".store.tmp").exists()


def test_samples_show_the_mask_token_by_token(make_recipe: Callable[..., Recipe]) -> None:
    recipe = make_recipe([chat("q", "ab"), chat("q", "c")])
    prepare(recipe)
    first, _ = samples(recipe, 5)
    assert "".join(first.tokens) == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nab<|im_end|>\n"
    marked = [token for token, flag in zip(first.tokens, first.supervised, strict=True) if flag]
    assert marked == ["a", "b", "<|im_end|>"]
    assert len(samples(recipe, 1)) == 1


def test_a_store_of_another_template_or_tokenizer_is_refused(make_recipe: Callable[..., Recipe]) -> None:
    recipe = make_recipe([chat("q", "a")])
    store = prepare(recipe).store
    check_tokenizer(store, templates.byte_tokenizer())
    with pytest.raises(DataError, match="made with another chat template than"):
        check_tokenizer(store, templates.byte_tokenizer(templates.CHATML + " "))
    other = templates.byte_tokenizer()
    other.add_tokens(["<mask>"])
    with pytest.raises(DataError, match="made with another tokenizer than"):
        check_tokenizer(store, other)
    make_recipe([chat("q", "a")], template=templates.CHATML + " ")
    with pytest.raises(DataError, match="another chat template"):
        samples(recipe, 1)


def test_the_fingerprint_of_a_tokenizer_does_not_depend_on_its_last_call() -> None:
    tokenizer = templates.byte_tokenizer()
    before = describe_tokenizer(tokenizer)
    tokenizer("a long text", truncation=True, max_length=4, padding="max_length")
    assert describe_tokenizer(tokenizer) == before
    assert (before.vocab_size, before.eos_token_id) == (len(tokenizer), tokenizer.eos_token_id)


def test_errors_of_processes_keep_their_fix() -> None:
    error = pickle.loads(pickle.dumps(DataError("what", fix="how")))
    assert (error.message, error.fix, str(error)) == ("what", "how", "what\n  fix: how")
