"""Options of a command in groups: one frozen dataclass each, flattened into the command line.

A command with many options would be a function with many parameters; here it takes a few groups instead:

    @grouped
    def doctor(paths: Paths, code: CodeOptions) -> None: ...

Every field of a group is annotated as a parameter is: `select: Annotated[list[str] | None, typer.Option()] = None`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from itertools import chain
from typing import Any, get_type_hints


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with the fields of its dataclass parameters as parameters of their own, for Typer to read."""
    hints = get_type_hints(command, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    given = inspect.signature(command).parameters
    plain = [parameter.replace(annotation=hints[name]) for name, parameter in given.items() if name not in groups]
    fields = {name: _parameters(group) for name, group in groups.items()}

    @functools.wraps(command)
    def flat(**values: Any) -> None:
        made = {
            name: group(**{field.name: values.pop(field.name) for field in fields[name]})  # type: ignore[operator]  # a dataclass type
            for name, group in groups.items()
        }
        command(**values, **made)

    parameters = [
        p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in [*plain, *chain.from_iterable(fields.values())]
    ]
    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # read by inspect.signature
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return flat


def _parameters(group: Any) -> list[inspect.Parameter]:
    """The fields of a group as keyword parameters."""
    hints = get_type_hints(group, include_extras=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(field.name, kind, default=field.default, annotation=hints[field.name])
        for field in dataclasses.fields(group)
    ]
