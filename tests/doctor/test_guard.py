"""The fork guard: what counts as CUDA, what is refused and what is not, in real processes with a faked CUDA."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from helixctl.doctor import guard

FAKE_CUDA = """
import sys, types
fake = types.ModuleType("torch")
fake.cuda = types.SimpleNamespace(is_initialized=lambda: True)
sys.modules["torch"] = fake
"""
LOADER = """
import sys
import torch
from torch.utils.data import DataLoader

torch.cuda.is_initialized = lambda: True

if __name__ == "__main__":
    loader = DataLoader(list(range(8)), num_workers=2, multiprocessing_context=sys.argv[1])
    print(sum(int(batch) for batch in loader))
"""


def python(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A Python that gets the guard as `doctor --run` gives it."""
    env = guard.guarded_environment({**os.environ, **environ}) | environ
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=120)


def descriptors(proc: Path, *targets: str, maps: str = "") -> Path:
    """A /proc/self whose descriptors lead to `targets`."""
    (proc / "fd").mkdir(parents=True)
    for number, target in enumerate(targets):
        (proc / "fd" / str(number)).symlink_to(target)
    (proc / "maps").write_text(maps, encoding="utf-8")
    return proc


@pytest.fixture
def torch_says(monkeypatch):
    def say(initialised: bool) -> None:
        monkeypatch.setitem(
            sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: initialised))
        )

    say(False)
    return say


# ---------------------------------------------------------------------------------------------------------- evidence


def test_no_cuda_no_evidence(torch_says, tmp_path) -> None:
    assert guard.cuda_evidence() is None
    assert guard.cuda_evidence(tmp_path / "no proc") is None


def test_a_program_without_torch_has_no_evidence(monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert guard.cuda_evidence() is None


def test_torchs_flag_counts(torch_says) -> None:
    torch_says(True)
    assert "torch.cuda" in str(guard.cuda_evidence())


def test_pinned_memory_shows_in_the_drivers_files(torch_says, tmp_path) -> None:
    proc = descriptors(tmp_path / "self", "/dev/null", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0")
    assert "nvidia-uvm" in str(guard.cuda_evidence(proc))


def test_nvml_alone_is_harmless(torch_says, tmp_path) -> None:
    """`device_count()` and our own look at the GPUs open these and no more."""
    maps = "7f 00 /usr/lib/libnvidia-ml.so.1\n7f 00 /usr/lib/libcuda.so.1\n"
    assert guard.cuda_evidence(descriptors(tmp_path / "a", "/dev/nvidiactl", "/dev/nvidia0", maps=maps)) is None
    assert guard.cuda_evidence(descriptors(tmp_path / "b", "/dev/nvidiactl", maps=maps[-30:])) is None


def test_a_driver_without_unified_memory_counts(torch_says, tmp_path) -> None:
    proc = descriptors(tmp_path / "self", "/dev/nvidiactl", "/dev/nvidia3", maps="7f 00 /usr/lib/libcuda.so.1\n")
    assert "GPU open" in str(guard.cuda_evidence(proc))


def test_a_loaded_driver_without_a_gpu_is_harmless(torch_says, tmp_path) -> None:
    assert guard.cuda_evidence(descriptors(tmp_path / "self", maps="7f 00 /usr/lib/libcuda.so.1\n")) is None


# ----------------------------------------------------------------------------------------------------------- switches


@pytest.mark.parametrize(
    ("value", "default", "armed"), [("1", False, "1"), ("0", True, "0"), (None, True, "1"), (None, False, "0")]
)
def test_the_variable_decides(value: str | None, default: bool, armed: str) -> None:
    program = (
        "import os, sys; from helixctl.doctor.guard import install_guard;"
        f"print(int(install_guard(default={default})), int(hasattr(sys, '_helixctl_fork_guard')))"
    )
    env = {name: text for name, text in os.environ.items() if name != guard.VARIABLE}
    env |= {guard.VARIABLE: value} if value else {}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert done.stdout.split() == [armed, armed], done.stderr


def test_nothing_is_armed_by_the_path_alone() -> None:
    program = f"{FAKE_CUDA}\nimport os\nif pid := os.fork(): os.waitpid(pid, 0); print('parent')"
    done = python("-c", program, HELIXCTL_FORK_GUARD="")
    assert done.stdout.split() == ["parent"], done.stderr


@pytest.mark.parametrize(("words", "armed"), [("train", True), ("validate", True), ("plan", False)])
def test_training_and_validation_arm_themselves(words: str, armed: bool, run, monkeypatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr("helixctl.cli.app.install_guard", lambda *, default: asked.append(default))
    run(words, "no such recipe")
    assert asked == [armed]


def test_the_environments_own_path_and_sitecustomize_stay(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.mine = 1\n")
    program = f"{FAKE_CUDA}\nimport sys, os\nprint(sys.mine, {str(tmp_path)!r} in sys.path)\nos.fork()"
    done = python("-c", program, PYTHONPATH=os.pathsep.join([str(guard._SHIM), str(tmp_path)]))
    assert done.stdout.split() == ["1", "True"], done.stderr
    assert "ForkRefused: os.fork refused" in done.stderr


# ------------------------------------------------------------------------------------------------------------ refusal


@pytest.mark.parametrize(
    "fork", ["os.fork()", "os.forkpty()", "pty.fork()", "get_context('fork').Process(target=print).start()"]
)
def test_forks_are_refused_and_show_where(fork: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        f"import os, pty\nfrom multiprocessing import get_context\n{FAKE_CUDA}\ndef work():\n    {fork}\n\nwork()\n"
    )
    done = python(str(script))
    assert done.returncode == 1
    assert "CUDA does not survive a fork" in done.stderr
    message = done.stderr.split("ForkRefused: ", 1)[1]
    assert "train.py" in message and "in work" in message and "guard.py" not in message
    assert "fix: start processes with spawn" in message


def test_the_stack_is_in_the_message_whoever_catches_it() -> None:
    program = (
        f"{FAKE_CUDA}\nimport os\ndef train():\n    os.fork()\ntry: train()\nexcept Exception as error: print(error)"
    )
    done = python("-c", program)
    assert done.returncode == 0 and "in train" in done.stdout


@pytest.mark.parametrize(
    "start",
    [
        "subprocess.run(['true'], check=True)",
        "subprocess.run(['true'], check=True, preexec_fn=print)",
        "os.system('true')",
        "os.waitpid(os.posix_spawn('/bin/true', ['true'], os.environ), 0)",
        "os.popen('true').read()",
    ],
)
def test_other_programs_start_as_before(start: str) -> None:
    done = python("-c", f"{FAKE_CUDA}\nimport os, subprocess\n{start}")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_spawn_and_forkserver_start_as_before(method: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        f"import multiprocessing, os\n{FAKE_CUDA}\nif __name__ == '__main__':\n"
        f"    p = multiprocessing.get_context({method!r}).Process(target=os.getpid)\n    p.start(); p.join()\n"
        "    raise SystemExit(p.exitcode)\n"
    )
    done = python(str(script))
    assert done.returncode == 0, done.stderr


def test_a_fork_before_cuda_is_allowed() -> None:
    done = python("-c", "import os\npid = os.fork()\nif pid: os.waitpid(pid, 0); print('parent')")
    assert done.stdout.split() == ["parent"], done.stderr


@pytest.mark.slow
def test_forked_loader_workers_are_refused_and_spawned_ones_work(tmp_path: Path) -> None:
    script = tmp_path / "loaders.py"
    script.write_text(LOADER)
    forked = python(str(script), "fork")
    assert forked.returncode == 1
    assert "ForkRefused: os.fork refused: torch.cuda is initialised" in forked.stderr
    assert "loaders.py" in forked.stderr.split("Stack of the fork", 1)[1]
    spawned = python(str(script), "spawn")
    assert (spawned.returncode, spawned.stdout.split()) == (0, ["28"]), spawned.stderr
