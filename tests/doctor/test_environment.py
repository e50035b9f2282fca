"""`doctor --env` on made-up machines (limits, control groups, drivers, variables), and on this one without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helixctl.doctor import environment_limits as limits
from helixctl.doctor import environment_python as python
from helixctl.doctor.environment import ENVIRONMENT
from helixctl.doctor.environment_host import Host, Space, existing_parent
from helixctl.doctor.probe import Outcome, Probe, Verdict, ok, outcomes_to_json, require, run_probes, skip
from helixctl.doctor.recipe_check import RECIPE
from helixctl.errors import DataError
from tests.conftest import ROOT
from tests.doctor.hosts import HostMaker, one


@pytest.fixture
def machine(tmp_path: Path) -> HostMaker:
    return HostMaker(tmp_path / "root")


def limit_file(**values: str) -> dict[str, str]:
    lines = [f"Max {name.replace('_', ' '):<22}{value:<21}{value:<21}units" for name, value in values.items()]
    return {"proc/self/limits": "\n".join(["Limit  Soft Limit  Hard Limit  Units", *lines])}


# ------------------------------------------------------------------------------------------------------------ probes


def test_a_broken_probe_does_not_hide_the_others() -> None:
    def broken(_: None) -> Verdict:
        raise KeyError("x")

    def refusing(_: None) -> Verdict:
        raise DataError("torn", fix="mend it")

    probes = [Probe("A", "a", broken), Probe("B", "b", refusing), Probe("C", "c", lambda _: [ok("1"), ok("2")])]
    found = list(run_probes(probes, None))
    assert [(o.id, o.state) for o in found] == [("A", "skip"), ("B", "fail"), ("C", "ok"), ("C", "ok")]
    assert "KeyError" in found[0].message and found[1].remedy == "mend it"


def test_a_required_check_may_not_be_skipped() -> None:
    found = list(run_probes([Probe[None]("A", "a", lambda _: skip("no GPU"))], None))
    assert [o.state for o in require(found, ["A"])] == ["fail"]
    assert [o.state for o in require(found, ["B"])] == ["skip"]


def test_json_tells_failure_from_the_rest() -> None:
    def outcome(state: Any) -> Outcome:
        return Outcome("A", "a", state, "m", None, 0.0)

    assert outcomes_to_json([outcome("warn"), outcome("skip"), outcome("ok")])["ok"] is True
    told = outcomes_to_json([outcome("fail"), outcome("ok")])
    assert (told["ok"], told["counts"]) == (False, {"ok": 1, "warn": 0, "fail": 1, "skip": 0})


def test_ids_are_distinct_and_documented() -> None:
    ids = [*(probe.id for probe in ENVIRONMENT), *(probe.id for probe in RECIPE)]
    assert len(set(ids)) == len(ids)
    page = (ROOT / "docs/doctor-machine.md").read_text(encoding="utf-8")
    names = [(probe.id, probe.name) for probe in ENVIRONMENT] + [(probe.id, probe.name) for probe in RECIPE]
    assert [id for id, name in names if f"| {id} | {name} |" not in page] == []


# ------------------------------------------------------------------------------------------------------------ limits


@pytest.mark.parametrize(("value", "state"), [("1024", "warn"), ("65536", "ok"), ("unlimited", "ok")])
def test_open_files(machine, value: str, state: str) -> None:
    assert one(limits.check_open_files(machine(limit_file(open_files=value)))).state == state


def test_threads_of_user_and_container(machine) -> None:
    assert one(limits.check_threads(machine(limit_file(processes="512")))).state == "warn"
    assert one(limits.check_threads(machine(limit_file(processes="unlimited")))).state == "ok"
    found = one(limits.check_threads(machine({"sys/fs/cgroup/pids.max": "100\n"})))
    assert found.state == "warn" and "container allows 100" in found.message


def test_locked_memory_matters_with_infiniband_only(machine) -> None:
    host = machine(limit_file(locked_memory="8388608"))
    assert one(limits.check_locked_memory(host)).state == "ok"
    (host.root / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    assert one(limits.check_locked_memory(host)).state == "warn"


@pytest.mark.parametrize(
    ("space", "state"),
    [(Space(64 << 20, 64 << 20), "warn"), (Space(8 << 30, 1), "warn"), (Space(8 << 30, 4 << 30), "ok")],
)
def test_shared_memory(machine, space: Space, state: str) -> None:
    host = machine({"dev/shm/x": ""}, space=lambda _: space)
    assert one(limits.check_shared_memory(host)).state == state


def test_no_shared_memory(machine) -> None:
    assert one(limits.check_shared_memory(machine())).state == "warn"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"sys/fs/cgroup/cpu.max": "150000 100000"}, 1.5),
        ({"sys/fs/cgroup/cpu.max": "max 100000"}, None),
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/cpu.max": "200000 100000"}, 2.0),
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/b/cpu.max": "50000 100000"}, 0.5),
        (
            {
                "proc/self/cgroup": "0::/a/b",
                "sys/fs/cgroup/a/cpu.max": "100000 100000",
                "sys/fs/cgroup/a/b/cpu.max": "400000 100000",
            },
            1.0,
        ),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, None),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/docker/abc",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "300000",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
            3.0,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu:/x\n3:memory:/y",
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "50000",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000",
            },
            0.5,
        ),
    ],
)
def test_quota_of_control_groups(machine, files: dict[str, str], quota: float | None) -> None:
    host = machine({"proc/self/status": "Cpus_allowed_list:\t0-3,8\n", **files})
    assert (host.num_cpus, host.cpu_quota) == (5, quota)
    assert one(limits.check_cpu_budget(host)).state == ("ok" if quota is None else "warn")


def test_compile_cache(machine, tmp_path: Path) -> None:
    local = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "a/b"), "TRITON_CACHE_DIR": str(tmp_path)}
    host = machine(
        {"proc/self/mounts": f"disk {tmp_path} ext4 rw 0 0\n"}, environ=local, space=lambda _: Space(9 << 30, 9 << 30)
    )
    assert [v.state for v in limits.check_compile_cache(host)] == ["ok", "ok"]
    remote = machine({"proc/self/mounts": f"server:/x {tmp_path} nfs4 rw 0 0\n"}, environ=local)
    assert [v.state for v in limits.check_compile_cache(remote)] == ["warn", "warn"]
    (host.root / "proc/self/mounts").unlink()
    full = machine(environ=local, space=lambda _: Space(9 << 30, 1 << 20))
    assert [v.state for v in limits.check_compile_cache(full)] == ["warn", "warn"]


def test_a_cache_that_cannot_be_written_fails(machine, monkeypatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert [v.state for v in limits.check_compile_cache(machine())] == ["fail", "fail"]


def test_file_system_of_the_nearest_mount(machine, tmp_path: Path) -> None:
    mounts = f"a / ext4 rw 0 0\nb {tmp_path} xfs rw 0 0\nc {tmp_path}/elsewhere nfs rw 0 0\n"
    host = machine({"proc/self/mounts": mounts})
    assert limits.file_system(host, existing_parent(tmp_path / "new/folder")) == "xfs"


# ------------------------------------------------------------------------------------------------------------ ptrace


@pytest.mark.parametrize(
    ("scope", "capabilities", "state"),
    [
        (None, "0", "ok"),
        ("0", "0", "ok"),
        ("1", "0", "warn"),
        ("1", "80000", "ok"),
        ("2", "0", "warn"),
        ("3", "80000", "warn"),
    ],
)
def test_ptrace_rights(machine, scope: str | None, capabilities: str, state: str) -> None:
    files = {"proc/self/status": f"CapEff:\t{capabilities}\nSeccomp:\t2\n"}
    files |= {"proc/sys/kernel/yama/ptrace_scope": f"{scope}\n"} if scope else {}
    found = one(python.check_ptrace(machine(files)))
    assert found.state == state and "seccomp" in found.message


@pytest.mark.parametrize(("text", "state"), [("", "warn"), ("0 0 0", "warn"), ("12 3 4", "ok")])
def test_scheduler_statistics(machine, text: str, state: str) -> None:
    assert one(python.check_schedstat(machine({"proc/self/schedstat": text}))).state == state


def test_pyspy_reads_a_child_of_ours() -> None:
    found = one(python.check_pyspy(Host()))
    if "cannot read" in found.message:
        pytest.skip(f"this machine forbids it: {found.message}")
    assert found.state == "ok", found


def py_spy(folder: Path, body: str) -> None:
    folder.mkdir()
    (folder / "py-spy").write_text(f"#!/bin/sh\n{body}\n")
    (folder / "py-spy").chmod(0o755)


def test_pyspy_without_rights(tmp_path: Path, monkeypatch) -> None:
    py_spy(tmp_path / "bin", "echo 'Permission Denied: try sudo' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    found = one(python.check_pyspy(Host()))
    assert found.state == "warn" and "Permission Denied" in found.message and "SYS_PTRACE" in str(found.remedy)


def test_pyspy_that_sees_something_else(tmp_path: Path, monkeypatch) -> None:
    py_spy(tmp_path / "bin", "echo '[]'")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert "does not show" in one(python.check_pyspy(Host())).message


def test_no_pyspy(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert one(python.check_pyspy(Host(python=str(tmp_path / "python")))).state == "skip"


# ------------------------------------------------------------------------------------------------------- the command


def command(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "helixctl", "doctor", *words]
    return subprocess.run(program, cwd=ROOT, env={**os.environ, **environ}, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(("broken", "state", "code"), [(None, "skip", 0), ("ImportError('libcudart')", "fail", 1)])
def test_the_command_works_without_torch(tmp_path: Path, broken: str | None, state: str, code: int) -> None:
    error = broken or "ModuleNotFoundError('no torch', name='torch')"
    (tmp_path / "torch.py").write_text(f"raise {error}\n")
    done = command("--env", "--json", PYTHONPATH=str(tmp_path), TOKENIZERS_PARALLELISM="false")
    assert done.returncode == code, done.stderr
    checks = {check["id"]: check for check in json.loads(done.stdout)["checks"]}
    assert (checks["ENV002"]["state"], checks["ENV005"]["state"]) == (state, "skip")
    assert set(checks) == {probe.id for probe in ENVIRONMENT}


def test_the_command_does_not_load_torch() -> None:
    program = (
        "import sys\nfrom helixctl.doctor.environment import ENVIRONMENT\n"
        "from helixctl.doctor.environment_host import Host\nfrom helixctl.doctor.probe import run_probes\n"
        "list(run_probes(ENVIRONMENT, Host()))\nprint('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["False"], done.stderr


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--fail-on", "warning"], 1),
        (["--fail-on", "never", "--require", "ENV003"], 0),
        (["--require", "ENV031"], 0),
        (["--require", "ENV999"], 2),
        (["--fail-on", "sometimes"], 2),
        (["--format", "sarif"], 2),
        (["src"], 2),
        (["--run"], 2),
        (["--live"], 2),
        (["--set", "a=b"], 2),
        (["--fix"], 2),
        (["--output-file", "x"], 2),
        (["--report", "--json"], 2),
    ],
)
def test_exit_codes(run, monkeypatch, words: list[str], code: int) -> None:
    quick = [probe for probe in ENVIRONMENT if probe.id in ("ENV003", "ENV031")]
    monkeypatch.setattr("helixctl.doctor.environment.ENVIRONMENT", tuple(quick))
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    done = run("doctor", "--env", *words)
    assert done.code == code, done.err


def test_text_names_state_id_message_and_fix(run, monkeypatch) -> None:
    quick = [probe for probe in ENVIRONMENT if probe.id == "ENV031"]
    monkeypatch.setattr("helixctl.doctor.environment.ENVIRONMENT", tuple(quick))
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    lines = run("doctor", "--env").out.splitlines()
    assert lines[0].startswith("warn  ENV031   environment variables: CUDA_LAUNCH_BLOCKING=1: ")
    assert lines[1].strip() == "fix: unset CUDA_LAUNCH_BLOCKING"
    assert lines[2].strip() == "0 ok, 1 warn, 0 fail, 0 skip"


@pytest.mark.parametrize(
    "words", [["--require", "ENV001"], ["--set", "a=b"], ["--live"], ["--run", "--json", "--", "x"]]
)
def test_options_without_their_check_are_refused(run, words: list[str]) -> None:
    done = run("doctor", *words)
    assert done.code == 2 and "fix:" in done.err
