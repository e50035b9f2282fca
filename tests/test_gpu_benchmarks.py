"""scripts/gpu_benchmarks.py runs scripts that exist, with options that they know."""

from __future__ import annotations

import importlib

import pytest

from scripts import gpu_benchmarks
from scripts.gpu_benchmarks import benchmarks
from tests.conftest import ROOT


def test_every_measurement_has_a_script_and_a_name_of_its_own(tmp_path):
    commands = benchmarks(tmp_path, 2)
    assert len({command.name for command in commands}) == len(commands)
    for command in commands:
        script, *words = command.words[1:]
        if script == "-m":
            assert callable(importlib.import_module(words[0]).main)
        else:
            assert (ROOT / script).is_file()


@pytest.mark.parametrize("name", ["scripts.benchmark_shape", "scripts.topologies", "scripts.warmup_shape"])
def test_options_are_known(name, tmp_path):
    module = importlib.import_module(name)
    for command in benchmarks(tmp_path, 2):
        if command.words[1:3] == ("-m", name):
            module.parse_options(list(command.words[3:]))


def test_words_choose_and_nothing_runs_without_time(tmp_path, capsys):
    assert gpu_benchmarks.main(["shape", "--out", str(tmp_path / "out"), "--limit-s", "0"]) == 1
    printed = capsys.readouterr().out
    assert "not: shape 8b packed" in printed and "lm 87m" not in printed
    assert gpu_benchmarks.main(["nothing of this name", "--out", str(tmp_path / "out")]) == 0
