from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import resource
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError

from helixctl.data import regenerate as regenerate_module
from helixctl.data.answers import check_writable
from helixctl.data.prompts import BadPrompt, Prompt, read_prompts
from helixctl.data.regenerate import RegenerateJob, RegenerateProgress, regenerate
from helixctl.decoding.steady import SteadyDecoder
from helixctl.errors import DataError, UsageError
from helixctl.recipe.schema import RegenerateOptions
from tests.decoding.fakes import FakeTarget, SteadyFake

STOP, TURN = 1, 2
LETTERS = "abcdefghijklmnopqrstuvwxyz "


class FakeTokenizer:
    """One token per letter; a turn is TURN, the letters, and STOP."""

    eos_token_id = STOP
    chat_template = "letters"

    def apply_chat_template(self, conversation, **options):
        assert options["add_generation_prompt"] and not options["tokenize"]
        if any(message["role"] == "tool" for message in conversation):
            raise TemplateError("no tools")
        return "".join(f"<{message['content']}>" for message in conversation) + "<"

    def encode(self, text, *, add_special_tokens):
        assert not add_special_tokens
        return [{"<": TURN, ">": STOP}.get(c) or 3 + LETTERS.index(c) for c in text]

    def decode(self, token_ids, **options):
        assert options == {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return "".join({STOP: ">", TURN: "<", 0: "\ufffd"}.get(i) or LETTERS[i - 3] for i in token_ids)


def echo(prefix):
    """Answers with the last user turn, reversed, once; one of 'z' never ends."""
    turns = [i for i, token in enumerate(prefix) if token == TURN]
    if len(turns) < 2:
        return STOP
    question = prefix[turns[-2] + 1 : turns[-1] - 1][::-1]
    given = len(prefix) - turns[-1] - 1
    if question[:1] == [3 + LETTERS.index("z")]:
        return question[0]
    return question[given] if given < len(question) else STOP


TARGET = FakeTarget(40, script=echo)


def make_job(folder, records=(), **changes):
    if records:
        (folder / "prompts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    options = RegenerateOptions(max_new_tokens=changes.pop("max_new_tokens", 8), batch_size=2)
    job: dict[str, Any] = {"options": options, "stop_ids": frozenset(), "max_len": 60, "model": "fake"} | changes
    return RegenerateJob(prompts=folder / "prompts.jsonl", output=folder / "out" / "answers.jsonl", **job)


def answers(job):
    return [json.loads(line) for line in job.output.read_text().splitlines()]


def test_answers_keep_the_conversation_and_its_labels(tmp_path):
    chat = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "eno"}]
    records = [
        {"prompt": "abc", "source": "drills", "other": 1},
        {"turns": ["hello", "again"], "id": "mt/1"},
        {"messages": [*chat, {"role": "user", "content": "two"}, {"role": "assistant", "content": "old"}], "kind": "k"},
    ]
    job = make_job(tmp_path, records)
    result = regenerate(TARGET, FakeTokenizer(), job)
    by_text = {record["messages"][-1]["content"]: record for record in answers(job)}
    assert set(by_text) == {"cba", "olleh", "owt"}
    assert by_text["cba"]["source"] == "drills" and "other" not in by_text["cba"]
    assert by_text["olleh"]["id"] == "mt/1"
    assert by_text["owt"]["kind"] == "k"
    assert by_text["owt"]["messages"][:-1] == [*chat, {"role": "user", "content": "two"}]
    assert {record["finish_reason"] for record in by_text.values()} == {"stop"}
    assert (result.read, result.answered, result.stop, result.tokens) == (3, 3, 3, 3 + 5 + 3 + 3)


def test_every_prompt_is_accounted_for(tmp_path):
    job = make_job(tmp_path)
    lines = [
        json.dumps({"prompt": "abc"}),
        json.dumps({"prompt": "abc"}),
        json.dumps({"messages": [{"role": "user", "content": "abc"}]}),
        json.dumps({"prompt": "zz"}),
        "{broken",
        "[1]",
        json.dumps({"text": "abc"}),
        json.dumps({"messages": [{"role": "assistant", "content": "abc"}]}),
        json.dumps({"messages": [{"content": "abc"}]}),
        json.dumps({"messages": [{"role": "tool", "content": "x"}, {"role": "user", "content": "abc"}]}),
        json.dumps({"prompt": "a" * 50}),
        "",
        json.dumps({"messages": [{"role": "user", "content": ""}]}),
    ]
    job.prompts.write_text("\n".join(lines))
    result = regenerate(TARGET, FakeTokenizer(), job)
    assert result.errors == {
        "not_json": 1,
        "no_prompt": 3,
        "no_user_turn": 1,
        "template": 1,
        "too_long": 1,
        "empty_answer": 1,
    }
    assert (result.read, result.answered, result.duplicates, result.resumed) == (12, 2, 2, 0)
    assert (result.stop, result.length) == (1, 1)
    assert len(answers(job)) == 2


def test_a_cut_answer_says_so_and_ends_with_a_whole_character(tmp_path):
    job = make_job(tmp_path, [{"prompt": "abc"}], max_new_tokens=3)
    target = FakeTarget(40, script=lambda prefix: [3, 4, 0][max(len(prefix), 6) - 6])
    result = regenerate(target, FakeTokenizer(), job)
    [record] = answers(job)
    assert record["messages"][-1] == {"role": "assistant", "content": "ab"}
    assert record["finish_reason"] == "length" and result.length == 1


WORDS = ["abc", "de", "zq", "fghij", "k", "lmnopq", "rs"]


@settings(max_examples=30)
@given(data=st.data())
def test_a_kill_at_any_byte_loses_no_prompt_and_repeats_none(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("kill")
    job = make_job(folder, [{"prompt": word} for word in WORDS])
    regenerate(TARGET, FakeTokenizer(), job)
    whole = job.output.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    job.output.write_bytes(whole[:cut])
    result = regenerate(TARGET, FakeTokenizer(), job)
    assert result.resumed == whole[:cut].count(b"\n")
    assert result.resumed + result.answered == result.stop + result.length == len(WORDS)
    assert sorted(job.output.read_bytes().splitlines()) == sorted(whole.splitlines())


def _killed_after(folder: Path, num_answers: int) -> None:
    job = make_job(folder)

    def script(prefix):
        if job.output.exists() and job.output.read_bytes().count(b"\n") >= num_answers:
            os.kill(os.getpid(), signal.SIGKILL)
        return echo(prefix)

    regenerate(FakeTarget(40, script=script), FakeTokenizer(), job)


@pytest.mark.slow
def test_kill_9_of_a_real_process_keeps_what_was_answered(tmp_path):
    job = make_job(tmp_path, [{"prompt": word} for word in WORDS])
    process = multiprocessing.get_context("spawn").Process(target=_killed_after, args=(tmp_path, 3))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    result = regenerate(TARGET, FakeTokenizer(), job)
    assert result.resumed >= 3 and result.resumed + result.answered == len(WORDS)


@pytest.mark.parametrize("change", [{"model": "other"}, {"max_new_tokens": 9}])
def test_answers_of_other_settings_are_refused(tmp_path, change):
    job = make_job(tmp_path, [{"prompt": "abc"}])
    regenerate(TARGET, FakeTokenizer(), job)
    before = job.output.read_bytes()
    with pytest.raises(UsageError, match="answered with another"):
        regenerate(TARGET, FakeTokenizer(), make_job(tmp_path, **change))
    assert job.output.read_bytes() == before


@pytest.mark.parametrize("content", ['{"messages": []}\n', '{"messages": []}', "some text", "\n"])
def test_a_file_of_something_else_is_left_alone(tmp_path, content):
    job = make_job(tmp_path, [{"prompt": "abc"}])
    job.output.parent.mkdir()
    job.output.write_text(content)
    with pytest.raises(DataError, match=r"answers\.jsonl:1 is not a regenerated answer"):
        regenerate(TARGET, FakeTokenizer(), job)
    assert job.output.read_text() == content


def test_a_second_writer_is_refused(tmp_path):
    job = make_job(tmp_path, [{"prompt": "abc"}])
    refused = []

    def again(progress):
        with pytest.raises(UsageError, match="another process writes"):
            regenerate(TARGET, FakeTokenizer(), job)
        refused.append(progress)

    regenerate(TARGET, FakeTokenizer(), job, on_progress=again)
    assert refused


@pytest.mark.parametrize("blocked", ["folder", "file"])
def test_an_output_that_cannot_be_written_is_an_error_before_and_during_the_work(tmp_path, blocked):
    job = make_job(tmp_path, [{"prompt": "abc"}])
    if blocked == "folder":
        job.output.mkdir(parents=True)
    else:
        job.output.parent.write_text("a file where a folder should be")
    for attempt in (lambda: check_writable(job.output), lambda: regenerate(TARGET, FakeTokenizer(), job)):
        with pytest.raises(DataError, match=r"answers cannot be written to .*answers\.jsonl: ") as caught:
            attempt()
        assert caught.value.fix and "data.train[0].path" in caught.value.fix


def test_the_look_at_the_output_leaves_nothing_behind_and_nothing_changed(tmp_path):
    check_writable(tmp_path / "new" / "answers.jsonl")
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "old").write_text("kept")
    check_writable(tmp_path / "old")
    assert (tmp_path / "old").read_text() == "kept"


def test_a_full_disk_keeps_what_was_answered(tmp_path):
    """The system's own limit on file sizes stands in for a full disk."""
    job = make_job(tmp_path, [{"prompt": word} for word in WORDS])
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (700, hard))
        with pytest.raises(DataError, match="answers cannot be written to"):
            regenerate(TARGET, FakeTokenizer(), job)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    result = regenerate(TARGET, FakeTokenizer(), job)
    assert result.resumed > 0 and result.resumed + result.answered == len(WORDS)


def test_the_decoder_of_gpus_writes_the_same_answers(tmp_path, monkeypatch):
    jobs = []
    for name in ("plain", "steady"):
        (tmp_path / name).mkdir()
        jobs.append(make_job(tmp_path / name, [{"prompt": word} for word in WORDS]))
    plain = regenerate(TARGET, FakeTokenizer(), jobs[0])
    monkeypatch.setattr(regenerate_module, "choose_decoder", lambda target: SteadyDecoder(target).stream)
    steady = regenerate(SteadyFake(40, script=echo), FakeTokenizer(), jobs[1])
    assert sorted(jobs[0].output.read_bytes().splitlines()) == sorted(jobs[1].output.read_bytes().splitlines())
    assert replace(steady, elapsed_s=0) == replace(plain, elapsed_s=0)


def test_progress_ends_with_everything_done(tmp_path):
    job = make_job(tmp_path, [{"prompt": word} for word in WORDS])
    seen: list[RegenerateProgress] = []
    result = regenerate(TARGET, FakeTokenizer(), job, on_progress=seen.append)
    assert (seen[-1].num_read, seen[-1].num_done, seen[-1].num_tokens) == (7, 7, result.tokens)
    tokens = [progress.num_tokens for progress in seen]
    assert tokens == sorted(tokens)


def test_samples_do_not_depend_on_what_was_answered_before(tmp_path):
    records = [{"prompt": word} for word in WORDS]
    options = RegenerateOptions(max_new_tokens=5, batch_size=3, temperature=1.0)
    (tmp_path / "one").mkdir()
    one = make_job(tmp_path / "one", records, options=options, seed=5)
    regenerate(FakeTarget(20), FakeTokenizer(), one)
    (tmp_path / "two").mkdir()
    two = make_job(tmp_path / "two", records[:3], options=options, seed=5)
    regenerate(FakeTarget(20), FakeTokenizer(), two)
    regenerate(FakeTarget(20), FakeTokenizer(), make_job(tmp_path / "two", records, options=options, seed=5))
    assert sorted(one.output.read_text().splitlines()) == sorted(two.output.read_text().splitlines())


def test_a_tokenizer_without_a_chat_template_is_refused(tmp_path):
    tokenizer = FakeTokenizer()
    tokenizer.chat_template = ""
    with pytest.raises(UsageError, match="no chat template"):
        regenerate(TARGET, tokenizer, make_job(tmp_path, [{"prompt": "abc"}]))


def test_prompts_are_read_from_gzip_and_unreadable_files_are_errors(tmp_path):
    path = tmp_path / "p.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "abc"}\n\n{"prompt": ""}\n'))
    assert list(read_prompts(path)) == [Prompt(({"role": "user", "content": "abc"},)), BadPrompt("no_prompt")]
    path.write_bytes(b"not gzip")
    with pytest.raises(DataError, match="cannot read the prompts"):
        list(read_prompts(path))
    with pytest.raises(DataError, match="cannot read the prompts"):
        list(read_prompts(tmp_path / "absent.jsonl"))


def test_the_hash_tells_messages_and_tools_apart():
    messages = ({"role": "user", "content": "abc"},)
    same = Prompt(messages, {"source": "elsewhere"})
    assert Prompt(messages).hash == same.hash
    assert len({Prompt(messages).hash, Prompt(messages, {"tools": [1]}).hash, Prompt((*messages, *messages)).hash}) == 3


def test_further_samples_are_other_answers_to_the_same_prompts_and_resume(tmp_path):
    records = [{"prompt": word} for word in WORDS[:4]]
    options = RegenerateOptions(max_new_tokens=5, batch_size=3, samples=2, sample_temperature=1.5)
    job = make_job(tmp_path, records, options=options)
    result = regenerate(FakeTarget(20), FakeTokenizer(), job)
    assert result.read == 12 == result.answered + sum(result.errors.values())
    greedy = make_job(tmp_path / "alone", options=options.model_copy(update={"samples": 0}))
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "prompts.jsonl").write_text((tmp_path / "prompts.jsonl").read_text())
    regenerate(FakeTarget(20), FakeTokenizer(), greedy)
    by_hash = {record["prompt_hash"]: record["messages"] for record in answers(job)}
    assert all(by_hash[record["prompt_hash"]] == record["messages"] for record in answers(greedy))
    drawn = [messages for name, messages in by_hash.items() if name.endswith(("-1", "-2"))]
    assert drawn and any(messages not in [r["messages"] for r in answers(greedy)] for messages in drawn)
    again = regenerate(FakeTarget(20), FakeTokenizer(), job)
    assert again.resumed == result.answered and again.answered == 0
