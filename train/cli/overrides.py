"""``--set FIELD=VALUE``: a recipe with some of its fields changed."""

import collections.abc
import dataclasses
import json
import types
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from train.recipes import Recipe


class _Given(NamedTuple):
    value: Any


Changes = dict[str, Any]
"""By field: a _Given, or the Changes of a part."""


def with_overrides(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """``recipe`` with FIELD=VALUE applied, dots leading into its parts. Values are JSON, or plain
    text for a string; an object makes a part that is not there yet, such as one of ``answers``.

    All apply at once, so that steps may give way to epochs. Raises ValueError naming a field that
    is not there, with those that are; a value that does not fit, with what does; and what the
    recipe says of them together.
    """
    changes: Changes = {}
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals:
            raise ValueError(f"--set wants FIELD=VALUE, got {override!r}")
        try:
            _note(changes, recipe, path.split("."), text)
        except (ValueError, TypeError) as error:
            raise ValueError(f"--set {override}: {error}") from None
    try:
        return _changed(recipe, changes)
    except ValueError as error:
        raise ValueError(f"--set {' '.join(overrides)}: {error}") from None


def _note(changes: Changes, part: Any, path: Sequence[str], text: str) -> None:
    """Add what one override says of ``part`` to ``changes``."""
    name, *rest = path
    kind = _field(type(part), name)
    held = getattr(part, name)
    if rest:
        if not dataclasses.is_dataclass(held):
            raise ValueError(f"{name} has no parts")
        _note(changes.setdefault(name, {}), held, rest, text)
    elif dataclasses.is_dataclass(held):
        parts = ", ".join(f"{name}.{field.name}" for field in dataclasses.fields(held))
        raise ValueError(f"set one of {parts}")
    else:
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        try:
            changes[name] = _Given(_fit(value, text, kind))
        except TypeError:
            raise ValueError(f"{name} must be {_kind_name(kind)}, got {text}") from None


def _field(owner: type, name: str) -> Any:
    """What type the field has."""
    hints = get_type_hints(owner)
    fields = sorted(field.name for field in dataclasses.fields(owner))
    if name not in fields:
        raise ValueError(f"{owner.__name__} has no field {name!r}; it has {', '.join(fields)}")
    return hints[name]


def _fit(value: Any, text: str, kind: Any) -> Any:
    """``value`` (JSON, written as ``text``) as a ``kind``. Raises TypeError."""
    origin, of = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _first_fit(value, text, of)
    if kind is type(None) and value is None:
        return None
    if kind in (bool, int) and type(value) is kind:
        return value
    if kind is float and type(value) in (int, float) and value == value:
        return float(value)
    if kind is str:
        return value if isinstance(value, str) else text
    if origin is Literal and value in of:
        return value
    if origin is tuple and isinstance(value, list):
        return tuple(_fit(item, json.dumps(item), of[0]) for item in value)
    if origin is collections.abc.Mapping and isinstance(value, dict):
        return value
    if hasattr(kind, "_fields") and isinstance(value, list):  # a NamedTuple
        kinds = get_type_hints(kind).values()
        return kind(*(_fit(v, json.dumps(v), k) for v, k in zip(value, kinds, strict=True)))
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        assert isinstance(kind, type)
        return kind(
            **{name: _fit(v, json.dumps(v), _field(kind, name)) for name, v in value.items()}
        )
    raise TypeError


def _first_fit(value: Any, text: str, kinds: Sequence[Any]) -> Any:
    """As the first of ``kinds`` that takes it, None before text."""
    for kind in sorted(kinds, key=lambda kind: kind is not type(None)):
        try:
            return _fit(value, text, kind)
        except TypeError:
            continue
    raise TypeError


def _kind_name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(map(str, get_args(kind)))
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)


def _changed(part: Any, changes: Changes) -> Any:
    return dataclasses.replace(
        part,
        **{
            name: change.value
            if isinstance(change, _Given)
            else _changed(getattr(part, name), change)
            for name, change in changes.items()
        },
    )
