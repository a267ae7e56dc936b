"""Command-line flags as fields of frozen dataclasses: written once, parsed by what this makes.

A field made by ``flag`` carries its names and help; ``add_flags`` puts a dataclass's fields on a
parser and ``build`` turns what was parsed back into the dataclass.
"""

import argparse
import dataclasses
import json
from typing import Any, TypeVar, get_args

ArgsT = TypeVar("ArgsT")


def flag(help: str, *names: str, default: Any = None, type: Any = str, **options: Any) -> Any:
    """A dataclass field that is a flag. ``type`` bool: a switch; ``repeated``: a tuple of what
    every use of the flag gave (all its values, where it takes several). Other options are
    argparse's."""
    argument = {"help": help, "names": names, "type": type, **options}
    return dataclasses.field(default=default, metadata=argument)


def choices(literal: Any) -> dict[str, Any]:
    """The options of a flag that takes one of a Literal's values."""
    return {"choices": get_args(literal)}


def integers(text: str) -> tuple[int, ...]:
    """``1,2,3``. Raises ArgumentTypeError saying so."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be integers with commas between them, such as 1,2,3, got {text!r}"
        ) from None


def json_object(text: str) -> dict[str, Any]:
    """Raises ArgumentTypeError saying what is wrong."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text}")
    return value


class _Once(argparse.Action):
    """Aliases may repeat a value, not contradict it."""

    def __call__(self, parser, namespace, values, option_string=None):
        given = vars(namespace).setdefault("_given", {})
        before = given.get(self.dest)
        if before is not None and before[1] != values:
            parser.error(f"{before[0]} {before[1]} and {option_string} {values} contradict")
        given[self.dest] = option_string, values
        setattr(namespace, self.dest, values)


class _Repeated(argparse.Action):
    """The first use takes the place of the default, the others add to it."""

    def __call__(self, parser, namespace, values, option_string=None):
        given = getattr(namespace, self.dest)
        before = () if given is self.default or given is None else given
        setattr(namespace, self.dest, (*before, *((values or ()) if self.nargs else (values,))))


def add_flags(parser: argparse.ArgumentParser, args_class: type) -> None:
    """Add every field of ``args_class`` to ``parser``."""
    for field in dataclasses.fields(args_class):
        options = dict(field.metadata)
        names, kind = options.pop("names"), options.pop("type")
        action = _Repeated if options.pop("repeated", False) else _Once
        options["help"] = _with_default(options["help"], field.default)
        shared = {"dest": field.name, "default": field.default}
        if kind is bool:
            parser.add_argument(*names, action="store_true", **shared, **options)
        else:
            parser.add_argument(*names, action=action, type=kind, **shared, **options)


def _with_default(help: str, default: Any) -> str:
    """``help`` and the default, unless that is nothing, a switch's, or told already."""
    if default is None or isinstance(default, bool) or default == () or "(default" in help:
        return help
    values = default if isinstance(default, tuple) else (default,)
    text = " ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)
    return f"{help} (default: {text.replace('%', '%%')})"


def build(
    parser: argparse.ArgumentParser, args_class: type[ArgsT], namespace: argparse.Namespace
) -> ArgsT:
    """The dataclass of what ``parser`` parsed. A ValueError of the dataclass exits with its reason,
    as argparse does for unknown and wrong flags."""
    fields = dataclasses.fields(args_class)  # pyright: ignore[reportArgumentType]
    try:
        return args_class(**{field.name: getattr(namespace, field.name) for field in fields})
    except ValueError as error:
        parser.error(str(error))


def first_name(args_class: type, field_name: str) -> str:
    """The flag of a field, for messages."""
    field = next(f for f in dataclasses.fields(args_class) if f.name == field_name)
    return field.metadata["names"][0]
