"""What is promised about code that others wrote, secrets, links and permissions: a test for each promise."""

from __future__ import annotations

import ast
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from helixctl.cli.render import render_bug, render_error
from helixctl.engine.status import StatusFile
from helixctl.errors import ModelError, StageFailed, UsageError
from helixctl.models.facts import read_target_facts
from helixctl.models.loading import load_model
from helixctl.models.tokenizer import load_tokenizer
from helixctl.profiling.runs import command_line
from helixctl.recipe.schema import TargetOptions
from helixctl.training.run import run_training
from helixctl.training.run_dir import claimed_run_dir
from tests.conftest import ROOT
from tests.tiny import save_tiny, tiny_llama
from tests.training.worlds import make_world, make_world_plan

SECRET = "hf_" + "a1B2" * 8


# ----------------------------------------------------------------------------------------- what the package never does


def calls() -> Iterator[tuple[str, str, ast.Call]]:
    """Where, the full dotted name as far as it is written there, and the call; of the whole package."""
    for path in sorted((ROOT / "helixctl").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", ast.unparse(node.func), node


@pytest.fixture(scope="module")
def all_calls() -> list[tuple[str, str, ast.Call]]:
    found = list(calls())
    assert len(found) > 3000
    return found


LOADERS = {"pickle.load", "pickle.loads", "torch.load", "joblib.load", "marshal.loads", "marshal.load", "shelve.open"}
SHELLS = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "eval", "exec"}


def test_no_pickle_is_loaded_and_nothing_goes_to_a_shell_or_is_evaluated(all_calls) -> None:
    found = [f"{where} {name}" for where, name, _ in all_calls if name in LOADERS | SHELLS | {"pickle.Unpickler"}]
    found += [
        f"{where} yaml" for where, name, _ in all_calls if name in ("yaml.load", "yaml.unsafe_load", "yaml.full_load")
    ]
    for where, name, call in all_calls:
        given = {word.arg: ast.unparse(word.value) for word in call.keywords}
        if given.get("shell", "False") != "False" or given.get("allow_pickle", "False") != "False":
            found.append(f"{where} {name} {given}")
    assert not found


def test_code_of_a_checkpoint_is_run_only_where_an_option_is_handed_through(all_calls) -> None:
    values = {
        (where.partition(":")[0], ast.unparse(word.value))
        for where, _, call in all_calls
        for word in call.keywords
        if word.arg == "trust_remote_code"
    }
    assert values, "the search found nothing"
    assert {value for _, value in values} <= {"options.trust_remote_code", "trust_remote_code"}


def test_weights_of_a_target_that_are_pickles_are_refused_with_the_fix(tmp_path: Path) -> None:
    model = tiny_llama(vocab_size=64)
    save_tiny(model, tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    options = TargetOptions(model=str(tmp_path))
    with pytest.raises(ModelError) as caught:
        load_model(options, read_target_facts(options), torch.float32)
    assert "pickles" in str(caught.value) and "safetensors" in str(caught.value)


# --------------------------------------------------------------------------------------- code that a checkpoint brings

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
Path(__file__).parent  # where transformers copied it to
Path({mark!r}).write_text("ran")
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def strange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A target whose folder brings code along for config, model and tokenizer."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    recipe = make_world(tmp_path)
    folder = tmp_path / "target"
    (folder / "own.py").write_text(CODE.format(mark=str(tmp_path / "mark")))
    for name, entries in (
        ("config.json", {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}),
        ("tokenizer_config.json", {"AutoTokenizer": [None, "own.OwnTokenizer"]}),
    ):
        content = json.loads((folder / name).read_text())
        content["auto_map"] = entries
        if name == "config.json":
            content["model_type"] = "own"
        else:
            content["tokenizer_class"] = "OwnTokenizer"
        (folder / name).write_text(json.dumps(content))
    return recipe


def test_code_of_a_target_runs_only_where_the_recipe_says_so_and_the_plan_says_it_loudly(strange: Path) -> None:
    mark = strange.parent / "mark"
    for trusted in (False, True):
        options = TargetOptions(model=str(strange.parent / "target"), trust_remote_code=trusted)
        plan = make_world_plan(strange, f"target.trust_remote_code={str(trusted).lower()}")
        for load in (lambda o: load_model(o, read_target_facts(o), torch.float32), load_tokenizer):
            try:
                load(options)
            except ModelError:
                assert not trusted
        assert mark.exists() == trusted
        assert any("trust_remote_code is on: Python code that" in warning for warning in plan.warnings) == trusted


# --------------------------------------------------------------------------------------------- secrets in what is said


def test_secrets_are_taken_out_of_errors_and_of_the_tracebacks_of_stages(capsys: pytest.CaptureFixture[str]) -> None:
    cause = RuntimeError(f"401 for https://user:{SECRET}@host/file")
    try:
        raise cause
    except RuntimeError as error:
        failed = StageFailed("target-0", error)
        failed.__cause__ = error
    render_error(failed)
    render_error(UsageError(f"no such file: s3://x?token={SECRET}", fix=f"unset TOKEN={SECRET}"))
    render_bug(cause)
    shown = capsys.readouterr().err
    assert shown.count("Traceback") == 2 and "no such file" in shown
    assert SECRET not in shown and "user:" not in shown


def test_a_run_that_fails_leaves_no_secret_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make_world(tmp_path)

    def failing(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"refused: token={SECRET}")

    monkeypatch.setattr("helixctl.models.target.Target.features", failing)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    with pytest.raises(StageFailed):
        run_training(make_world_plan(recipe))
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"status.json", "plan.json", "recipe.yaml", "environment.json"} <= {path.name for path in files}
    assert not [path.name for path in files if SECRET.encode() in path.read_bytes()]


def test_command_lines_of_other_processes_are_shown_without_secrets(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cmdline").write_bytes(b"\0".join([b"python", b"x.py", b"--api-key", b"abcdef123456"]))
    assert command_line(7, tmp_path) == "python x.py --api-key (hidden)"


# ----------------------------------------------------------------------------------------------- links and permissions


def test_a_link_in_the_way_of_the_status_file_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    status = StatusFile(tmp_path / "status.json", lambda: pytest.fail("not asked"), dict)
    (tmp_path / f".status.json-{os.getpid()}").symlink_to(precious)
    status._stats = _NoStats  # type: ignore[assignment]
    status.write()
    assert precious.read_text() == "mine" and not (tmp_path / "status.json").exists()


class _NoStats:
    __dataclass_fields__: dict[str, Any] = {}  # noqa: RUF012  # dataclasses.asdict asks for it


@pytest.mark.parametrize("place", ["run", "run/checkpoints", "run/run.pid"])
def test_a_run_directory_with_a_link_in_it_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / place
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="link"), claimed_run_dir(tmp_path / "run"):
        pass
    assert not any((tmp_path / "elsewhere").iterdir())


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize("mask", [0o077, 0o022])
def test_what_a_run_writes_is_nobody_elses_to_write_and_heeds_the_umask(tmp_path: Path, mask: int) -> None:
    recipe = make_world(tmp_path)
    with umask(mask):
        run_training(make_world_plan(recipe, "train.steps=2", "metrics.sinks=[jsonl]"))
    found = {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "run").rglob("*")}
    assert len(found) > 8
    assert not {str(path): oct(mode) for path, mode in found.items() if mode & mask}
    assert not {str(path): oct(mode) for path, mode in found.items() if path.is_file() and mode & 0o111}


# ------------------------------------------------------------------------------------ values of a recipe are only text


def test_values_of_a_recipe_are_names_and_never_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make_world(tmp_path)
    monkeypatch.chdir(tmp_path)
    name = "$(touch pwned); `touch pwned` && touch pwned | #"
    result = run_training(make_world_plan(recipe, f"run.dir={json.dumps(str(tmp_path / name))}", "train.steps=2"))
    assert result.finished and (tmp_path / name / "result.json").is_file()
    assert not (tmp_path / "pwned").exists()
