"""What compiled code depends on, as plain values with names that people understand.

Torch checks much of it itself, graph by graph; here it is looked at beforehand, so that a cache that would miss is told
before anything is loaded; the driver and the processor, which torch leaves out, are among it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import helixctl
from helixctl.lm_plan import AnyPlan, CausalLMPlan
from helixctl.plan import Plan
from helixctl.version import __version__

Key = dict[str, Any]
"""Name to a plain value."""

_VARIABLES = ("TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_COMPILE", "TRITON_", "CUBLAS_WORKSPACE_CONFIG")
_NO_MATTER = ("_DIR", "_THREADS", "_DEBUG", "_PATH")
"""Ends of variables that say where and how fast, not what."""
_SOURCES = (
    "models",
    "training/build.py",
    "training/loop.py",
    "training/learner.py",
    "training/lm_build.py",
    "training/stages.py",
    "training/warmup.py",
)
_STARTS = ("init_from", "init_layers")
"""Options of drafters that choose values of weights."""
_DEVICE_WORDS = ("target on ", "drafter on ", "trainer on ")


def make_key(plan: AnyPlan) -> Key:
    """The key of this plan on this machine; call it before torch has compiled anything."""
    return dict([*_software(), *_hardware(plan), *_shapes(plan), *_variables(os.environ)])


def differences(cached: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Sentences about what stands between a cache and a plan; empty where the cache is good.

    A cache may hold more devices than the plan uses: processes of one host share a cache of all its GPUs.
    """
    found = []
    for name in sorted(cached.keys() | wanted.keys()):
        if name.startswith(_DEVICE_WORDS) and name not in wanted:
            continue
        here, there = wanted.get(name, "not set"), cached.get(name, "not set")
        if name.startswith(_DEVICE_WORDS) and name not in cached:
            found.append(f"nothing was compiled for the {name}")
        elif here != there:
            found.append(f"{name} is {_short(here)} here, {_short(there)} in the cache")
    return found


def compiled_devices(plan: AnyPlan) -> tuple[str, ...]:
    """Devices of the plan on which something is compiled."""
    return tuple(device for device in plan.devices if plan.recipe.compile.covers(device))


def _software() -> Iterator[tuple[str, Any]]:
    yield "helixctl", __version__
    yield "helixctl's code", _code_digest()
    yield "python", platform.python_version()
    yield "CUDA", torch.version.cuda or "none"
    for package in ("torch", "transformers", "triton"):
        yield package, _version(package)


def _hardware(plan: AnyPlan) -> Iterator[tuple[str, Any]]:
    yield "machine", platform.machine()
    for role, devices in plan.loops:
        for device in dict.fromkeys(devices):
            yield f"{role} on {device}", _describe(device)
    if any(device != "cpu" for device in compiled_devices(plan)):
        yield "driver", _driver()
    if "cpu" in compiled_devices(plan):
        yield "processor", _processor()
        yield "CPU threads", plan.threads


def _shapes(plan: AnyPlan) -> Iterator[tuple[str, Any]]:
    """What the recipe says of shapes and types, under the keys of the recipe."""
    recipe = plan.recipe
    yield "train.compute_dtype", plan.compute_dtype
    yield "data.seq_len", recipe.data.seq_len
    yield "train.micro_batch_rows", recipe.train.micro_batch_rows
    yield "train.pass_rows", plan.pass_rows
    yield "run.deterministic", recipe.run.deterministic
    for name, value in recipe.compile.model_dump(mode="json", exclude={"cache", "on_recompile"}).items():
        yield f"compile.{name}", value
    yield from _lm_shapes(plan) if isinstance(plan, CausalLMPlan) else _drafter_shapes(plan)


def _lm_shapes(plan: CausalLMPlan) -> Iterator[tuple[str, Any]]:
    yield "model's config.json", _digest(plan.model.raw)
    yield "model.attention", plan.recipe.model.attention
    yield "data.packing", plan.recipe.data.packing


def _drafter_shapes(plan: Plan) -> Iterator[tuple[str, Any]]:
    recipe = plan.recipe
    yield "target's config.json", _digest(plan.target.raw)
    yield "target.dtype", plan.target_dtype
    yield "taps", list(plan.target_layer_ids)
    yield "data.packing", plan.packing
    yield "stored features", recipe.target.features is not None
    for name in ("attention", "compile", "quantization"):
        yield f"target.{name}", getattr(recipe.target, name)
    yield from _flatten("drafter", recipe.drafter.model_dump(mode="json", exclude=set(_STARTS)))


def _digest(config: Any) -> str:
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _flatten(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(f"{prefix}.{name}", value)
        else:
            yield f"{prefix}.{name}", value


def _variables(environment: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    for name, value in environment.items():
        if name.startswith(_VARIABLES) and not name.endswith(_NO_MATTER):
            yield name, value


@functools.cache
def _code_digest() -> str:
    """Of the source that is compiled, or decides what is."""
    root, digest = Path(helixctl.__file__).parent, hashlib.sha256()
    for source in _SOURCES:
        paths = sorted((root / source).rglob("*.py")) if (root / source).is_dir() else [root / source]
        for path in filter(Path.is_file, paths):
            digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _describe(device: str) -> str:
    if device == "cpu":
        return "cpu"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)}, {major}.{minor}"


def _driver() -> str:
    import pynvml

    pynvml.nvmlInit()
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()


def _processor() -> str:
    """The name of the processor, and the instructions that torch compiles for."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _short(value: Any) -> str:
    return str(value) if len(str(value)) <= 60 else f"{str(value)[:57]}..."
