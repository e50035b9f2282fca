"""The block for bug reports: what is in it, and what must never be."""

from __future__ import annotations

import getpass
import platform
from pathlib import Path
from typing import Any

import pytest

from helixctl.doctor.environment_host import Host
from helixctl.doctor.probe import Outcome
from helixctl.doctor.report import anonymise, make_report
from helixctl.version import __version__
from tests.doctor.fake_nvml import HEALTHY, FakeNvml

HOME = {"HOME": "/home/ada", "USER": "ada"}
OUTCOME = Outcome("ENV030", "compile cache", "warn", "/home/ada/cache is on nfs4", "move it", 0.1)


def report(environ: dict[str, str], **fields: Any) -> str:
    return make_report(Host(environ=HOME | environ, **{"nvml": FakeNvml(init_error=12), **fields}), [OUTCOME])


def test_versions_machine_and_checks_are_told() -> None:
    text = report({"OMP_NUM_THREADS": "4"}, nvml=FakeNvml(HEALTHY | {"MigMode": [1, 1]}))
    assert f"helixctl      {__version__}\n" in text
    assert f"python        {platform.python_version()}" in text
    assert "\ntorch         " in text and "\npy-spy        " in text
    assert "gpu 0         NVIDIA H200, 140 GiB, MIG\n" in text and "driver        570.86, CUDA 12.8\n" in text
    assert "\nOMP_NUM_THREADS=4\n" in text
    assert "0 ok, 1 warn, 0 fail, 0 skip" in text
    assert "warn ENV030 compile cache: ~/cache is on nfs4" in text


def test_it_is_one_block_of_markdown() -> None:
    lines = report({}).splitlines()
    assert lines[0].startswith("<details>") and lines[-1] == "</details>"
    assert lines.count("```text") == lines.count("```") == 1
    assert "gpus          none: NVML error 12" in lines


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "NCCL_AUTH", "TORCH_API_KEY", "HELIXCTL_PASSWORD", "X"],
)
def test_secrets_and_strange_variables_stay_out(name: str) -> None:
    text = report({name: "hunter2"})
    assert "hunter2" not in text


def test_the_tokenizers_variable_is_no_secret() -> None:
    assert "TOKENIZERS_PARALLELISM=true" in report({"TOKENIZERS_PARALLELISM": "true"})


def test_gpu_numbers_of_one_card_stay_out() -> None:
    assert "GPU-a" not in report({}, nvml=FakeNvml(HEALTHY))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("/home/ada/x", "~/x"),
        ("/home/ada", "~"),
        ("a:/home/ada:b", "a:~:b"),
        ("/home/adam/x", "/home/adam/x"),
        ("/tmp/torchinductor_ada", "/tmp/torchinductor_USER"),
        ("https://ada:p@w@host/simple", "https://(hidden)@host/simple"),
        ("refused: https://host/x?token=abcdef12", "refused: https://host/x?token=(hidden)"),
        ("an adage", "an adage"),
    ],
)
def test_names_are_taken_out(text: str, told: str) -> None:
    assert anonymise(text, HOME) == told


def test_this_home_and_this_user_are_taken_out(monkeypatch) -> None:
    monkeypatch.setattr(getpass, "getuser", lambda: "lovelace")
    monkeypatch.setattr(platform, "node", lambda: "analytical-engine")
    monkeypatch.setattr(Path, "home", lambda: Path("/mnt/people/lovelace"))
    text = anonymise("/mnt/people/lovelace/run on analytical-engine by lovelace", {})
    assert text == "~/run on HOST by USER"


def test_a_user_without_a_name_and_home(monkeypatch) -> None:
    def nobody() -> str:
        raise KeyError("uid not found")

    def nowhere() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(getpass, "getuser", nobody)
    monkeypatch.setattr(Path, "home", nowhere)
    assert anonymise("text", {}) == "text"


def test_the_command_prints_it(run, monkeypatch) -> None:
    monkeypatch.setattr("helixctl.doctor.environment.ENVIRONMENT", ())
    done = run("doctor", "--report")
    assert done.code == 0 and done.out.startswith("<details>") and str(Path.home()) + "/" not in done.out
