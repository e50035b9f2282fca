"""Uploads: opt-in, retried where that helps, and silent about tokens."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from helixctl.checkpoint.push import ATTEMPTS, push, without_tokens
from helixctl.errors import UsageError
from tests.cli.runner import Runner
from tests.training.conftest import TrainedWorld, trained  # noqa: F401 - a fixture

TOKEN = "hf_abcdefghijklmnop"


class HubError(Exception):
    def __init__(self, status: int | None, message: str) -> None:
        super().__init__(message)
        self.response = SimpleNamespace(status_code=status)


class FakeHub:
    """Answers with the errors given, one after the other, then takes everything."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def create_repo(self, repository: str, **options: Any) -> None:
        self.answer("create", repo_id=repository, **options)

    def upload_folder(self, **options: Any) -> SimpleNamespace:
        self.answer("upload", **options)
        return SimpleNamespace(commit_url=f"https://hub.example/{options['repo_id']}/commit/1")

    def answer(self, name: str, **options: Any) -> None:
        self.calls.append((name, options))
        if self.errors:
            raise self.errors.pop(0)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(*errors: Exception) -> FakeHub:
        fake = FakeHub(*errors)
        module = ModuleType("huggingface_hub")
        vars(module)["HfApi"] = lambda: fake
        monkeypatch.setitem(sys.modules, "huggingface_hub", module)
        return fake

    return install


def test_a_new_repository_is_private_and_gets_the_folder(tmp_path: Path, hub: Any) -> None:
    fake = hub()
    assert push(tmp_path, "team/drafter") == "https://hub.example/team/drafter/commit/1"
    (_, made), (_, uploaded) = fake.calls
    assert (made["repo_id"], made["private"], made["exist_ok"]) == ("team/drafter", True, True)
    assert (uploaded["folder_path"], uploaded["repo_type"]) == (str(tmp_path), "model")
    assert not any("token" in options for _, options in fake.calls)


def test_a_busy_hub_is_asked_again_and_a_refusal_is_final(tmp_path: Path, hub: Any) -> None:
    waits: list[float] = []
    fake = hub(HubError(503, "busy"), HubError(None, "connection reset"))
    push(tmp_path, "team/drafter", wait=waits.append)
    assert (len(fake.calls), waits) == (4, [2.0, 4.0])
    for error, calls in ((HubError(403, "forbidden"), 1), (HubError(404, "no such team"), 1)):
        fake = hub(error)
        with pytest.raises(UsageError, match="was not uploaded"):
            push(tmp_path, "team/drafter", wait=waits.append)
        assert len(fake.calls) == calls
    fake = hub(*[HubError(500, "down")] * 10)
    with pytest.raises(UsageError, match="down"):
        push(tmp_path, "team/drafter", wait=waits.append)
    assert len(fake.calls) == ATTEMPTS


def test_no_token_is_ever_shown(
    tmp_path: Path, hub: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret-without-prefix")
    text = f"401 with {TOKEN} and secret-without-prefix, Authorization: Bearer abc.def"
    hub(*[HubError(503, text)] * ATTEMPTS)
    with caplog.at_level(logging.DEBUG), pytest.raises(UsageError) as caught:
        push(tmp_path, "team/drafter", wait=lambda _: None)
    shown = caplog.text + str(caught.value) + repr(caught.value.__cause__)
    for secret in (TOKEN, "secret-without-prefix", "abc.def"):
        assert secret not in shown
    assert "401 with ***" in shown
    assert caught.value.__suppress_context__
    assert without_tokens("nothing here") == "nothing here"


def test_a_name_without_owner_is_refused(tmp_path: Path, hub: Any) -> None:
    with pytest.raises(UsageError, match="owner/name"):
        push(tmp_path, "drafter")


def test_the_command_uploads_only_when_asked_and_never_with_a_private_path(
    trained: TrainedWorld,  # noqa: F811 - the fixture
    tmp_path: Path,
    hub: Any,
    run: Runner,
) -> None:
    fake = hub()
    export = ["export", trained.recipe, "--output", tmp_path / "out", "--format", "speculators"]
    assert run(*export).code == 0 and not fake.calls
    done = run(*export, "--push", "team/drafter")
    assert done.code == 2 and "--base-model" in done.err and not fake.calls
    done = run(*export, "--push", "team/drafter", "--base-model", "org/target", "--license", "apache-2.0")
    assert done.code == 0, done.err
    assert "uploaded to https://hub.example/team/drafter" in done.out
    assert [name for name, _ in fake.calls] == ["create", "upload"]
    for name in ("README.md", "config.json"):
        assert str(trained.recipe.parent) not in (tmp_path / "out" / name).read_text()
    card = (tmp_path / "out" / "README.md").read_text()
    assert "base_model: org/target" in card and "license: apache-2.0" in card and "learning_rate" in card
