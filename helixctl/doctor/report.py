"""`helixctl doctor --report`: a block of Markdown for a bug report. No secrets, no names of people or machines."""

from __future__ import annotations

import getpass
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from helixctl.doctor.environment_host import Host
from helixctl.doctor.environment_nvml import NvmlProblem
from helixctl.doctor.probe import Outcome, count_states
from helixctl.redact import HIDDEN, redact_text
from helixctl.version import __version__

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "jinja2",
    "pydantic",
    "typer",
    "rich",
    "psutil",
    "nvidia-ml-py",
    "py-spy",
    "tensorboard",
    "gguf",
    "accelerate",
)
_TOLD = re.compile(
    r"^(CUDA_|NVIDIA_(VISIBLE|TF32|DRIVER)|NCCL_|TORCH|PYTORCH_|OMP_|GOMP_|KMP_|MKL_|TOKENIZERS_|TRITON_|HELIXCTL_"
    r"|HF_HUB_OFFLINE$|HF_HOME$|TRANSFORMERS_OFFLINE$|PYTHON(MALLOC|TRACEMALLOC|DEVMODE|PATH)|MALLOC_|LD_PRELOAD$|CI$)"
)
_SECRET = re.compile(r"TOKEN(?!IZERS)|SECRET|PASSW|CREDENTIAL|(API|ACCESS|PRIVATE)_?KEY|AUTH", re.IGNORECASE)
_MIN_NAME = 3
"""Shorter user names occur in ordinary words."""


def make_report(host: Host, outcomes: Sequence[Outcome]) -> str:
    """The block, ready to be pasted: versions, machine, variables, and what the checks said."""
    lines = ["<details><summary>helixctl doctor --report</summary>", "", "```text"]
    lines += [*_versions(), "", *_machine(host), "", *_variables(host.environ), "", *_checks(outcomes)]
    lines += ["```", "", "</details>"]
    return "\n".join(anonymise(line, host.environ) for line in lines) + "\n"


def anonymise(text: str, environ: Mapping[str, str]) -> str:
    """Without the home directory, the user's name, the machine's name, and secrets."""
    text = redact_text(text)
    for home in filter(None, (environ.get("HOME"), _home())):
        if home != "/":
            text = re.sub(re.escape(home) + r"(?=/|\b|$)", "~", text)
    names = {environ.get("USER", ""): "USER", _user(): "USER", platform.node(): "HOST"}
    for name, instead in names.items():
        if len(name) >= _MIN_NAME and name not in ("root", "localhost"):
            text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", instead, text)
    return text


def _versions() -> Iterator[str]:
    yield f"helixctl      {__version__}"
    yield f"python        {platform.python_version()} ({platform.python_implementation()})"
    libc = "-".join(platform.libc_ver())
    yield f"system        {platform.system()} {platform.release()} {platform.machine()}, {libc}"
    for package in PACKAGES:
        try:
            yield f"{package:<13} {metadata.version(package)}"
        except metadata.PackageNotFoundError:
            continue


def _machine(host: Host) -> Iterator[str]:
    quota = "" if host.cpu_quota is None else f", quota {host.cpu_quota:g}"
    yield f"cpu           {_field(host, 'proc/cpuinfo', 'model name') or platform.processor() or 'unknown'}"
    yield f"cores         {host.num_cpus} of {os.cpu_count()}{quota}"
    total_kib = (_field(host, "proc/meminfo", "MemTotal").split() or ["0"])[0]
    yield f"memory        {int(total_kib) / 2**20:.1f} GiB"
    found = host.gpus
    if isinstance(found, NvmlProblem):
        yield f"gpus          none: {found.text}"
        return
    yield f"driver        {found.driver}, CUDA {found.cuda[0]}.{found.cuda[1]}"
    for gpu in found.gpus:
        memory = "" if gpu.total_bytes is None else f", {gpu.total_bytes / 2**30:.0f} GiB"
        yield f"gpu {gpu.index}         {gpu.name}{memory}{', MIG' if gpu.is_mig else ''}"


def _variables(environ: Mapping[str, str]) -> Iterator[str]:
    told = sorted(name for name in environ if _TOLD.match(name))
    for name in told:
        yield f"{name}={HIDDEN if _SECRET.search(name) else environ[name]}"
    if not told:
        yield "no variable that matters is set"


def _checks(outcomes: Sequence[Outcome]) -> Iterator[str]:
    yield ", ".join(f"{count} {state}" for state, count in count_states(outcomes).items())
    for outcome in outcomes:
        yield f"{outcome.state:<4} {outcome.id} {outcome.name}: {outcome.message}"


def _field(host: Host, path: str, name: str) -> str:
    for line in host.read(path).splitlines():
        if line.startswith(name):
            return line.split(":", 1)[1].strip()
    return ""


def _home() -> str:
    try:
        return str(Path.home())
    except RuntimeError:  # no home at all
        return ""


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in containers
        return ""
