"""Bad input: every command says what is wrong, where, and the fix; nothing is half-written, nothing whole is lost."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from helixctl.training.run import run_training
from tests.chats import conversations, make_chat_world, prepare_world, write_jsonl
from tests.cli.runner import Done, Runner
from tests.data import templates
from tests.training.worlds import make_world_plan

Spoil = Callable[[Path], object]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound world; tests spoil copies of it."""
    return make_chat_world(tmp_path_factory.mktemp("sound")).parent


@pytest.fixture
def world(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "world"))


@pytest.fixture(scope="module")
def trained_original(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same world, prepared and trained."""
    folder = Path(shutil.copytree(original, tmp_path_factory.mktemp("trained") / "world"))
    run_training(make_world_plan(prepare_world(folder / "recipe.yaml")))
    return folder


@pytest.fixture
def trained_world(trained_original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained_original, tmp_path / "world"))


@dataclass(frozen=True)
class Case:
    """A fault, the command that meets it, and what the user reads."""

    command: str
    spoil: Spoil
    code: int
    says: tuple[str, ...]
    overrides: tuple[str, ...] = ()


def set_line(number: int, text: str) -> Spoil:
    def spoil(world: Path) -> None:
        path = world / "data/train.jsonl"
        lines = path.read_text().splitlines()
        lines[number - 1] = text
        path.write_text("\n".join(lines) + "\n")

    return spoil


def with_role(role: str, count: int) -> Spoil:
    def spoil(world: Path) -> None:
        rows = conversations(40)
        for row in rows[:count]:
            row["messages"][0]["role"] = role
        write_jsonl(world / "data/train.jsonl", rows)

    return spoil


def with_template(template: str | None) -> Spoil:
    def spoil(world: Path) -> None:
        (world / "target/chat_template.jinja").unlink()
        templates.byte_tokenizer(template).save_pretrained(world / "target")

    return spoil


def answers_of_one_token(world: Path) -> None:
    rows = conversations(40)
    for row in rows:
        row["messages"][1]["content"] = ""
    write_jsonl(world / "data/train.jsonl", rows)


def without_tokenizer(world: Path) -> None:
    for path in (world / "target").glob("*token*"):
        path.unlink()
    for path in (world / "target").glob("chat_template*"):
        path.unlink()


def without_weights(world: Path) -> None:
    (world / "target/model.safetensors").unlink()


def half_weights(world: Path) -> None:
    path = world / "target/model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


def nothing(world: Path) -> None:
    pass


PREPARE = {
    "missing file": Case("prepare", lambda w: (w / "data/train.jsonl").unlink(), 1, ("data/train.jsonl", "no file")),
    "empty file": Case("prepare", lambda w: write_jsonl(w / "data/train.jsonl", []), 1, ("train.jsonl is empty",)),
    "broken JSON": Case("prepare", set_line(7, '{"messages": [{"role": "user", '), 1, ("train.jsonl:7", "not JSON")),
    "unknown role": Case(
        "prepare", with_role("narrator", 40), 1, ("40 documents", "unknown_role: 40", "'narrator'", "train.jsonl:1")
    ),
    "template that raises": Case("prepare", with_template(templates.RAISING), 1, ("template", "takes nothing")),
    "template without turns": Case("prepare", with_template(templates.MUTE), 1, ("template",)),
    "no template": Case("prepare", with_template(None), 1, ("template",)),
    "answers too short for a block": Case("prepare", answers_of_one_token, 1, ("no_anchor: 40", "train.jsonl:1")),
    "no target": Case("prepare", lambda w: shutil.rmtree(w / "target"), 1, ("target", "no folder")),
    "no tokenizer": Case("prepare", without_tokenizer, 1, ("no tokenizer.json", "target")),
    "store on a read-only file system": Case(
        "prepare", nothing, 1, ("could not be written", "/sys/helixctl-test"), ("data.store=/sys/helixctl-test/store",)
    ),
    "validation file missing": Case(
        "prepare", nothing, 1, ("no file", "held.jsonl"), ("data.validation={sources: [{path: held.jsonl}]}",)
    ),
    "unknown format": Case(
        "prepare", nothing, 2, ("format", "chat"), ("data.train=[{path: data/train.jsonl, format: chats}]",)
    ),
}
TRAIN = {
    "no store": Case("train", lambda w: shutil.rmtree(w / "store"), 1, ("no store", "helixctl prepare")),
    "torn store": Case(
        "train",
        lambda w: (w / "store/train/tokens.bin").write_bytes(b"x"),
        1,
        ("torn", "tokens.bin", "helixctl prepare"),
    ),
    "wrong layers": Case("train", nothing, 2, ("target_layer_ids", "0 to 3"), ("drafter.target_layer_ids=[0, 4]",)),
    "no target": Case("train", lambda w: shutil.rmtree(w / "target"), 1, ("target", "no folder")),
    "no weights": Case("train", without_weights, 1, ("target", "weights")),
    "half the weights": Case("train", half_weights, 1, ("target", "weights")),
    "no tokenizer": Case("train", without_tokenizer, 1, ("no tokenizer.json", "target")),
    "run directory on a read-only file system": Case(
        "train", nothing, 2, ("cannot be written", "/sys/helixctl-test"), ("run.dir=/sys/helixctl-test",)
    ),
    "another template": Case(
        "train", with_template(templates.CHATML + " "), 1, ("another chat template", "helixctl prepare")
    ),
    "run directory is a file": Case(
        "train", nothing, 2, ("cannot be written", "run.dir"), ("run.dir=recipe.yaml/run",)
    ),
    "mask token is eos": Case(
        "train", nothing, 2, ("drafter.mask_token_id", "end-of-text"), ("drafter.mask_token_id=257",)
    ),
    "mask token outside": Case(
        "train", nothing, 2, ("drafter.mask_token_id", "320 rows"), ("drafter.mask_token_id=999",)
    ),
}


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def check(done: Done, case: Case) -> None:
    assert done.code == case.code, done.err
    assert "Traceback" not in done.err and "bug" not in done.err
    assert "fix" in done.err, done.err
    for words in case.says:
        assert words in done.err, f"{words!r} is not in {done.err}"


def options(case: Case) -> list[str]:
    return [part for override in case.overrides for part in ("--set", override)]


@pytest.mark.parametrize("case", PREPARE.values(), ids=PREPARE.keys())
def test_prepare(case: Case, world: Path, run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(world)
    case.spoil(world)
    before = snapshot(world)
    check(run(case.command, "recipe.yaml", *options(case)), case)
    assert snapshot(world) == before


@pytest.mark.parametrize("case", TRAIN.values(), ids=TRAIN.keys())
def test_train(case: Case, trained_world: Path, run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trained_world)
    shutil.rmtree("run")
    case.spoil(trained_world)
    before = snapshot(trained_world)
    check(run(case.command, "recipe.yaml", *options(case)), case)
    after = snapshot(trained_world)
    assert {name: content for name, content in after.items() if not name.startswith("run/")} == before
    assert not [name for name in after if "checkpoints" in name or name.endswith("run.pid")]


CHECKPOINT = "run/checkpoints/step-00000004"


def tear(path: str) -> Spoil:
    """Cut a file in half."""

    def spoil(world: Path) -> None:
        content = (world / path).read_bytes()
        (world / path).write_bytes(content[: len(content) // 2])

    return spoil


def flip(path: str) -> Spoil:
    """Change one byte; the size stays."""

    def spoil(world: Path) -> None:
        content = bytearray((world / path).read_bytes())
        content[-1] ^= 1
        (world / path).write_bytes(bytes(content))

    return spoil


def tear_all(world: Path) -> None:
    for path in (world / "run/checkpoints").glob("step-*"):
        tear(f"run/checkpoints/{path.name}/drafter.safetensors")(world)


def without_best(spoil: Spoil) -> Spoil:
    """The newest checkpoint is the one that is used."""

    def both(world: Path) -> None:
        (world / "run/checkpoints/best.json").unlink()
        spoil(world)

    return both


AFTERWARDS = {
    "no run": Case("validate", lambda w: shutil.rmtree(w / "run"), 1, ("no checkpoint", "helixctl train")),
    "no run to export": Case("export", lambda w: shutil.rmtree(w / "run"), 1, ("no checkpoint", "helixctl train")),
    "torn": Case("validate", tear(f"{CHECKPOINT}/drafter.safetensors"), 1, ("drafter.safetensors",), ("ck",)),
    "flipped": Case("export", flip(f"{CHECKPOINT}/drafter.safetensors"), 1, ("drafter.safetensors",), ("ck",)),
    "state torn": Case("validate", tear(f"{CHECKPOINT}/state.json"), 1, ("state.json",), ("ck",)),
    "all torn": Case("export", without_best(tear_all), 1, ("no checkpoint in", "is whole", "drafter.safetensors")),
    "all torn, resume": Case("resume", tear_all, 1, ("no checkpoint in", "is whole", "drafter.safetensors")),
    "no checkpoint there": Case("validate", nothing, 2, ("--checkpoint", "none"), ("none",)),
    "not a checkpoint": Case("validate", nothing, 1, ("target", "checkpoint"), ("target",)),
    "begun already": Case("train", nothing, 2, ("already holds a run", "--resume")),
    "store changed": Case("resume", with_template(templates.CHATML + " "), 1, ("another chat template",)),
}


@pytest.mark.parametrize("case", AFTERWARDS.values(), ids=AFTERWARDS.keys())
def test_after_training(case: Case, trained_world: Path, run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trained_world)
    case.spoil(trained_world)
    before = snapshot(trained_world)
    words = ["train", "recipe.yaml", "--resume"] if case.command == "resume" else [case.command, "recipe.yaml"]
    if case.overrides:
        words += ["--checkpoint", CHECKPOINT if case.overrides[0] == "ck" else case.overrides[0]]
    check(run(*words), case)
    assert snapshot(trained_world) == before


def test_metrics_that_cannot_be_opened_end_the_run_before_it_begins(
    trained_world: Path, run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained_world)
    shutil.rmtree("run")
    Path("run/metrics.jsonl.1").mkdir(parents=True)
    monkeypatch.setattr("helixctl.metrics.sinks.jsonl.FILE", "absent/metrics.jsonl")
    check(run("train", "recipe.yaml"), Case("train", nothing, 2, ("metrics cannot be written", "run.dir")))
    assert not list(Path("run/checkpoints").iterdir()) and not Path("run/run.pid").exists()


def test_a_place_for_checkpoints_that_cannot_be_written_is_found_before_the_first_step(
    trained_world: Path, run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained_world)
    shutil.rmtree("run")
    Path("run").mkdir()
    Path("run/checkpoints").write_text("")
    done = run("train", "recipe.yaml")
    check(done, Case("train", nothing, 2, ("run/checkpoints: File exists", "run.dir")))
    assert not Path("run/run.pid").exists()


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("init", "none", "data/train.jsonl", "-o", "new.yaml"), 1, ("none",)),
        (("init", "target", "none.jsonl", "-o", "new.yaml"), 2, ("none.jsonl",)),
        (("init", "target", "data/train.jsonl", "-o", "recipe.yaml"), 2, ("recipe.yaml exists", "--force")),
        (("init", "target", "data/train.jsonl", "-o", "/sys/helixctl/r.yaml"), 2, ("cannot be written",)),
        (("report", "a" * 300), 2, ("File name too long",)),
        (("init", "target", "data/train.jsonl", "-o", "data"), 2, ("data is a folder",)),
        (("init", "data/train.jsonl", "data/train.jsonl", "-o", "new.yaml"), 1, ("data/train.jsonl is a file",)),
        (("init", "target", "target/model.safetensors", "-o", "new.yaml"), 1, ("no documents", "docs data sources")),
        (("prepare", "recipe.yaml", "--features", "recipe.yaml"), 1, ("recipe.yaml is not a folder of features",)),
        (("prepare", "recipe.yaml", "--features", "data"), 1, ("data is not a folder of features",)),
        (("plan", "recipe.yaml", "--set", "train=5"), 2, ("should be a section", "indented")),
        (("export", "recipe.yaml", "--format", "none"), 2, ("there is no 'none' among the formats", "zlab")),
        (("export", "--check", "recipe.yaml"), 1, ("there is no recipe.yaml/config.json",)),
        (("convert", "recipe.yaml", "out"), 1, ("there is no recipe.yaml/config.json",)),
        (("doctor", "--recipe", "data"), 2, ("--recipe: data is a folder",)),
        (("profile", "--compare", "recipe.yaml", "none"), 2, ("recipe.yaml cannot be read as a report",)),
        (("export", "recipe.yaml", "--output", "/sys/helixctl"), 1, ("/sys/helixctl",)),
        (("export", "recipe.yaml", "--output", "data"), 1, ("data is not an export",)),
        (("validate", "recipe.yaml", "--bench", "recipe.yaml"), 1, ("recipe.yaml:1", "not JSON")),
        (("validate", "recipe.yaml", "--bench", "none.jsonl"), 2, ("--bench", "none.jsonl")),
        (("prepare", "recipe.yaml", "--regenerate"), 2, ("data.regenerate.prompts",)),
        (("plan", "recipe.yaml", "--set", "target.model=data"), 1, ("data has no config.json",)),
    ],
)
def test_other_commands(
    words: tuple[str, ...],
    code: int,
    says: tuple[str, ...],
    trained_world: Path,
    run: Runner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(trained_world)
    before = snapshot(trained_world)
    check(run(*words), Case(words[0], nothing, code, says))
    assert snapshot(trained_world) == before


def test_a_few_bad_rows_are_counted_and_shown(world: Path, run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(world)
    with_role("narrator", 3)(world)
    done = run("prepare", "recipe.yaml")
    assert done.code == 0
    assert "dropped: unknown_role" in done.out
    assert "train.jsonl:1:'narrator'" in "".join(done.out.split())  # paths are folded at 100 columns


def test_documents_shorter_than_a_block_train_to_their_end(
    world: Path, run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(world)
    rows = conversations(40)
    for row in rows:
        row["messages"][1]["content"] = "a"
    write_jsonl(world / "data/train.jsonl", rows)
    assert run("prepare", "recipe.yaml", "--set", "drafter.block_size=16").code == 0
    done = run("train", "recipe.yaml", "--set", "drafter.block_size=16")
    assert done.code == 0, done.err
    assert json.loads(Path("run/result.json").read_text())["finished"]
