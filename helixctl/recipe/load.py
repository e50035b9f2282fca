"""Recipe file + `--set` options -> `Recipe`; every mistake at once, each with its place and a fix.

Environment variables (`$NAME`, `${NAME}`) and `~` are expanded in run.dir, data.store, target.model, target.features
and the paths of data sources and prompts, and nowhere else. Relative paths in the file start at the file's folder;
those given by `--set` at the current one. Never imports torch.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from helixctl.errors import HelixError, Problem, RecipeError, UsageError
from helixctl.plugins import DRAFTERS, FORMATS, SINKS, load_plugin, plugin_names, suggest
from helixctl.recipe import causal_lm
from helixctl.recipe.causal_lm import CausalLMRecipe, StageOptions
from helixctl.recipe.explain import Checked, all_keys, explain
from helixctl.recipe.schema import DrafterOptions, Recipe, SourceOptions
from helixctl.recipe.source import Key, Source, dotted, read_source, write_yaml

_HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_NAMES = {("target", "model"), ("model", "checkpoint"), ("model", "tokenizer"), ("dataset", "name")}
"""Keys that hold a folder or a hub name."""

AnyRecipe = Recipe | CausalLMRecipe


def load_any_recipe(path: Path, overrides: Sequence[str] = ()) -> AnyRecipe:
    """Read, merge and check a recipe; `kind` says of what.

    Args:
        path: YAML file.
        overrides: `a.b=value` options, values in YAML; later ones win.

    Raises:
        RecipeError: all mistakes that could be found, in the order of the file.
    """
    source = read_source(path, tuple(overrides))
    if not source.data:
        raise RecipeError(source.problems or [Problem("recipe", "the file is empty", source.name)])
    _resolve_paths(source, path.resolve().parent)
    is_lm = source.data.get("kind") == "causal_lm"
    recipe = _load_causal_lm(source) if is_lm else _load_drafter(source)
    if source.problems or recipe is None:
        raise RecipeError(sorted(source.problems, key=lambda problem: _line(problem, source)))
    return recipe


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """`load_any_recipe`, for what only drafters have.

    Raises:
        RecipeError: see there; or the recipe is of another kind.
    """
    recipe = load_any_recipe(path, overrides)
    if not isinstance(recipe, Recipe):
        text = f"is {recipe.kind}, and only drafters have this"
        raise locate(RecipeError([Problem("kind", text, fix="use the recipe of a drafter")]), path, overrides)
    return recipe


def locate(error: RecipeError, path: Path, overrides: Sequence[str] = ()) -> RecipeError:
    """The same mistakes with their places filled in; for checks made after loading, by key."""
    source = read_source(path, tuple(overrides))
    told = []
    for p in error.problems:
        told.append(replace(p, where=p.where or source.where(_key(p.key))))
    return RecipeError(told)


def dump_recipe(recipe: AnyRecipe) -> str:
    """YAML text that loads back equal, from any folder: paths are absolute by now."""
    return write_yaml(recipe.model_dump(mode="json"))


def recipe_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of recipes of either kind; `drafter` is one of the installed algorithms' options."""
    schema, other = Recipe.model_json_schema(), CausalLMRecipe.model_json_schema()
    definitions = {**schema.pop("$defs", {}), **other.pop("$defs", {}), "drafter": schema, "causal_lm": other}
    other["required"] = ["kind", *other["required"]]
    choices = []
    for name in plugin_names(DRAFTERS):
        part = _options_class(name).model_json_schema(ref_template=f"#/$defs/{name}.{{model}}")
        definitions.update({f"{name}.{model}": body for model, body in part.pop("$defs", {}).items()})
        part["properties"]["algorithm"] = {**part["properties"]["algorithm"], "const": name}
        definitions[name] = part
        choices.append({"$ref": f"#/$defs/{name}"})
    schema["properties"]["drafter"] = {"description": "The drafter's own options.", "oneOf": choices}
    kinds = [{"$ref": "#/$defs/drafter"}, {"$ref": "#/$defs/causal_lm"}]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "oneOf": kinds, "$defs": definitions}


def _key(name: str) -> Key:
    return tuple(int(part) if part.isdecimal() else part for part in name.split("."))


def _line(problem: Problem, source: Source) -> tuple[int, int]:
    """Sort key: the file's lines in order, then options."""
    name, _, line = problem.where.rpartition(":")
    return (0, int(line)) if name == source.name and line.isdecimal() else (1, 0)


def _options_class(algorithm: str) -> type[DrafterOptions]:
    options: type[DrafterOptions] = load_plugin(DRAFTERS, algorithm, "options").Options
    assert issubclass(options, DrafterOptions), f"{algorithm}: Options must extend DrafterOptions"
    return options


def _load_drafter(source: Source) -> Recipe | None:
    drafter = _check_drafter(source)
    recipe = _check_recipe(source)
    if recipe is None:
        return None
    source.problems += _check_together(recipe, drafter, source)
    return recipe.model_copy(update={"drafter": drafter})


def _load_causal_lm(source: Source) -> CausalLMRecipe | None:
    checked = Checked(source, CausalLMRecipe, (), (*all_keys(CausalLMRecipe), *all_keys(StageOptions, "stages.0.")))
    recipe = _validate(source.data, checked)
    if not isinstance(recipe, CausalLMRecipe):
        return None
    for problem in causal_lm.check_together(recipe):
        source.problems.append(replace(problem, where=source.where(_key(problem.key))))
    sources: list[tuple[Key, tuple[SourceOptions, ...]]] = [
        (("data", "train"), recipe.data.train),
        (("data", "validation", "sources"), recipe.data.validation.sources),
    ]
    for i, stage in enumerate(recipe.stages):
        if stage.data is not None:
            sources.append((("stages", i, "data", "train"), stage.data.train))
            sources.append((("stages", i, "data", "validation", "sources"), stage.data.validation.sources))
    source.problems += _check_plugins(recipe.metrics.sinks, sources, source)
    return recipe


def _check_drafter(source: Source) -> DrafterOptions | None:
    """The drafter's options, checked by its plug-in; None after a problem."""
    data = source.data.get("drafter")
    if not isinstance(data, dict):
        return None  # absent or no section: told with the rest of the recipe
    algorithm = data.get("algorithm")
    try:
        if not isinstance(algorithm, str):
            raise UsageError("is required", fix=f"use one of: {', '.join(plugin_names(DRAFTERS))}")
        model = _options_class(algorithm)
    except UsageError as error:
        where = source.where(("drafter", "algorithm"))
        source.problems.append(Problem("drafter.algorithm", error.message, where, error.fix))
        return None
    checked = Checked(source, model, ("drafter",), _homes(model))
    options = _validate(_with_published(data, algorithm, source), checked)
    return options if isinstance(options, DrafterOptions) else None


def _with_published(data: dict[str, Any], algorithm: str, source: Source) -> dict[str, Any]:
    """The drafter's section; what it leaves out comes from the published drafter that it starts from, if any."""
    start = data.get("init_from")
    config = Path(start) / "config.json" if isinstance(start, str) else None
    if config is None or not config.is_file():
        return data
    where = source.where(("drafter", "init_from"))
    try:
        found = _published_options(algorithm, json.loads(config.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        source.problems.append(Problem("drafter.init_from", f"{config} cannot be read: {error}", where))
        return data
    except HelixError as error:
        source.problems.append(Problem("drafter.init_from", f"{start}: {error.message}", where, error.fix))
        return data
    given = {"target_layer_ids"} if data.get("num_taps") is not None else set()
    return {name: value for name, value in found.items() if name not in given} | data


def _published_options(algorithm: str, config: dict[str, Any]) -> dict[str, Any]:
    """What the configuration of a published drafter says of our section; nothing where it is another algorithm's."""
    formats = f"{DRAFTERS}.{algorithm}.formats"
    for name in plugin_names(formats):
        form = load_plugin(formats, name)
        if form.matches(config):
            options: DrafterOptions = load_plugin(DRAFTERS, algorithm, "published").options_of(form.read(config))
            return options.model_dump(mode="json", exclude_unset=True, exclude={"algorithm"})
    return {}


def _check_recipe(source: Source) -> Recipe | None:
    drafter = source.data.get("drafter")
    if "drafter" in source.data and not isinstance(drafter, dict):
        message = f"should be a section of `name: value` lines, not {drafter!r}"
        source.problems.append(Problem("drafter", message, source.where(("drafter",)), "begin with `algorithm:`"))
    recipe = _validate(source.data, Checked(source, Recipe, (), _homes(None)))
    return recipe if isinstance(recipe, Recipe) else None


def _validate(data: Any, checked: Checked) -> BaseModel | None:
    try:
        return checked.model.model_validate(data)
    except ValidationError as error:
        checked.source.problems += explain(error, checked)
        return None


def _homes(drafter: type[BaseModel] | None) -> tuple[str, ...]:
    """Every key of a recipe; without a known algorithm, the drafter keys that all have."""
    return (*all_keys(Recipe), *all_keys(drafter or DrafterOptions, "drafter."))


def _path_keys(data: dict[str, Any]) -> Iterator[tuple[Key, bool]]:
    """Keys that hold paths, and whether environment variables are expanded in them."""
    yield ("run", "dir"), True
    yield ("data", "store"), True
    yield ("target", "model"), True
    yield ("target", "config"), False
    yield ("target", "features"), True
    yield ("compile", "cache"), False
    yield ("drafter", "init_from"), True
    yield ("data", "regenerate", "prompts"), True
    yield ("model", "config"), True
    yield ("model", "checkpoint"), True
    yield ("model", "tokenizer"), True
    sections: list[Key] = [("data",)]
    stages = data.get("stages")
    for i in range(len(stages) if isinstance(stages, list) else 0):
        yield ("stages", i, "data", "store"), True
        sections.append(("stages", i, "data"))
    for sources in (key for section in sections for key in ((*section, "train"), (*section, "validation", "sources"))):
        listed = _get(data, sources)
        for i in range(len(listed) if isinstance(listed, list) else 0):
            yield (*sources, i, "path"), True
            yield (*sources, i, "dataset", "name"), True


def _get(data: Any, key: Key) -> Any:
    for part in key:
        if isinstance(data, dict):
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int):
            data = data[part] if part < len(data) else None
        else:
            return None
    return data


def _resolve_paths(source: Source, folder: Path) -> None:
    """Expand and resolve in place; a hub name stays as it is."""
    for key, expands in _path_keys(source.data):
        value = _get(source.data, key)
        if not isinstance(value, str):
            continue
        text = _expand(value, key, source) if expands else value
        base = Path.cwd() if source.set_by_option(key) else folder
        if not text:
            source.problems.append(Problem(dotted(key), "is empty", source.where(key), "write a path"))
        elif key[-2:] not in _NAMES or _is_folder(text, base):
            text = os.path.normpath(base / text)
        _get(source.data, key[:-1])[key[-1]] = text


def _is_folder(text: str, base: Path) -> bool:
    """A model is a folder if it looks like a path or exists; otherwise a hub name."""
    return _HUB_NAME.match(text) is None or (base / text).is_dir()


def _expand(text: str, key: Key, source: Source) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in os.environ:
            fix = f"export {name}=..., or write the path out"
            message = f"the environment variable {name} is not set"
            source.problems.append(Problem(dotted(key), message, source.where(key), fix))
        return os.environ.get(name, match[0])

    return os.path.expanduser(_VARIABLE.sub(value, text))


def _check_together(recipe: Recipe, drafter: DrafterOptions | None, source: Source) -> Iterator[Problem]:
    """Rules between options; single values are fine by now."""
    train = recipe.train
    if train.epochs is not None and train.steps is not None:
        fix = "keep one; on the command line, `--set train.epochs=null` takes the other away"
        yield Problem("train.steps", "train.epochs is given too", source.where(("train", "steps")), fix)
    if train.epochs is None and train.steps is None:
        yield Problem(
            "train", "neither epochs nor steps is given", source.where(("train",)), "add `steps: 1000` or `epochs: 3`"
        )
    if drafter is not None and drafter.block_size > recipe.data.seq_len:
        message = f"is {drafter.block_size}, but a row has only {recipe.data.seq_len} tokens"
        fix = "use a smaller block_size or a larger data.seq_len"
        yield Problem("drafter.block_size", message, source.where(("drafter", "block_size")), fix)
    start = drafter and drafter.init_from
    if start and not (start / "config.json").is_file():
        where = source.where(("drafter", "init_from"))
        yield Problem("drafter.init_from", f"{start} holds no config.json", where, "name a published drafter's folder")
    sources = [
        (("data", "train"), recipe.data.train),
        (("data", "validation", "sources"), recipe.data.validation.sources),
    ]
    yield from _check_plugins(recipe.metrics.sinks, sources, source)


def _check_plugins(
    sinks: Sequence[str], sources: Sequence[tuple[Key, Sequence[SourceOptions]]], source: Source
) -> Iterator[Problem]:
    used: list[tuple[str, Key, str]] = []
    for where, listed in sources:
        used += [(FORMATS, (*where, i, "format"), options.format) for i, options in enumerate(listed)]
    used += [(SINKS, ("metrics", "sinks", i), name) for i, name in enumerate(sinks)]
    for package, key, name in used:
        known = plugin_names(package)
        if name not in known:
            yield Problem(dotted(key), f"there is no {name!r}", source.where(key), suggest(name, known))
