"""Command lines of scripts: options from dataclasses, and one sentence if they are invalid.

A dataclass is a command line: its fields are the options, its type hints the allowed values, and
its docstring the help. There are two kinds:

- *options* (`read_options`) are words, as in most programs: `--per-host 2 --rates 50mbit 1gbit`;
- *settings* (`read_settings`) may also come from a YAML file, `--config FILE`, and are written as
  in that file: `--drops [2,4] --checkpoint true`.

jsonargparse parses both.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import types
import typing
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

LOCAL_RANK = ("HOROVOD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
"""Environment variables that launchers set to the rank within the host."""


MODE = "finite yaml"
"""Name under which jsonargparse knows `_load_yaml`."""


def stop(sentence: str) -> NoReturn:
    """End this rank with status 2. One rank per host writes the sentence."""
    ranks = [os.environ.get(name, "0") for name in LOCAL_RANK]
    if set(ranks) == {"0"}:
        sys.stderr.write(f"{sentence}\n")
        sys.stderr.flush()
    raise SystemExit(2)


def _new_parser(description: str | None) -> Any:
    """Return a parser without arguments.

    Raises:
        ValueError: if jsonargparse is not installed.
    """
    try:
        import docstring_parser  # noqa: F401 (of the extra "signatures")
        import jsonargparse
    except ImportError:
        raise ValueError(
            "the scripts need jsonargparse, which is not installed; "
            "install the extra in the clone: pip install '.[train]'."
        ) from None
    warnings.filterwarnings("ignore", module="jsonargparse")
    jsonargparse.set_loader(MODE, _load_yaml, (ValueError,))
    return jsonargparse.ArgumentParser(
        description=description, exit_on_error=False, parser_mode=MODE
    )


def _load_yaml(text: str) -> Any:
    """Return the value of a YAML text, as jsonargparse reads it.

    Raises:
        ValueError: if the text is no YAML, or if a value contains itself, for which jsonargparse
            would search without end.
    """
    import jsonargparse
    from yaml import YAMLError

    try:
        value = jsonargparse.get_loader("yaml")(text)
    except YAMLError as error:
        raise ValueError(str(error)) from error
    try:
        json.dumps(value, skipkeys=True, default=repr)
    except ValueError:
        raise ValueError("a value contains itself") from None
    return value


def _parse(parser: Any, arguments: Sequence[str] | None, refusal: Callable[[str], str]) -> Any:
    """Return the parsed values as a dict.

    Args:
        parser: the parser.
        arguments: arguments to parse; None: those of the command line.
        refusal: function that makes a sentence of a message of the parser.

    Raises:
        ValueError: if an argument is invalid.
    """
    from jsonargparse import ArgumentError

    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        return parser.parse_args(given).as_dict()
    except (ArgumentError, TypeError) as error:
        raise ValueError(refusal(" ".join(str(error).split()))) from None


# ----------------------------------------------------------------------------------------- options
def option(default: Any, *names: str, hidden: bool = False) -> Any:
    """Return a field of an options class with other names, or one that the help omits.

    Args:
        default: value without the option.
        names: names on the command line; by default `--` and the field's name.
        hidden: whether the help omits the option.
    """
    return dataclasses.field(default=default, metadata={"names": names, "hidden": hidden})


def words(*default: str) -> Any:
    """Return a field of an options class for the words that belong to no option, if any."""
    return dataclasses.field(default_factory=lambda: list(default), metadata={"words": True})


def read_options(
    kind: type | Mapping[str, type],
    arguments: Sequence[str] | None = None,
    *,
    owner: str,
    about: str = "",
) -> Any:
    """Return the options of the command line: an instance of `kind`.

    Invalid options end the process with status 2 and one sentence that names the option, its value
    and the allowed values.

    Args:
        kind: class of the options, whose fields without a default are words; or the classes of
            several actions by their names.
        arguments: arguments to parse; None: those of the command line.
        owner: name of the program in sentences.
        about: description of a program with several actions.
    """
    try:
        return parse_options(kind, arguments, about)
    except ValueError as error:
        stop(f"{owner}: {str(error).removeprefix(f'{owner}: ')}")


def parse_options(
    kind: type | Mapping[str, type], arguments: Sequence[str] | None = None, about: str = ""
) -> Any:
    """Return the options as `read_options` does, but raise ValueError if they are invalid."""
    if isinstance(kind, Mapping):
        return _parse_action(kind, sys.argv[1:] if arguments is None else arguments, about)
    return kind(**_parse(_options_parser(kind), arguments, lambda text: _refuse(text, kind)))


def _parse_action(kinds: Mapping[str, type], arguments: Sequence[str], about: str) -> Any:
    """Return the options of the action that the first word names."""
    parser = _new_parser(about)
    actions = parser.add_subcommands(dest="action")
    for name, kind in kinds.items():
        actions.add_subcommand(name, _options_parser(kind), help=_documentation(kind)[0])
    chosen = kinds.get(arguments[0]) if arguments else None

    def refusal(text: str) -> str:
        if chosen is not None:
            return _refuse(text, chosen)
        given = f"{arguments[0]!r} is not an action" if arguments else "the action is missing"
        return f"{given}; allowed are {', '.join(kinds)}."

    found = _parse(parser, arguments, refusal)
    return kinds[found["action"]](**found[found["action"]])


def as_settings(options: Any) -> dict[str, Any]:
    """Return the values of an options object for JSON."""
    values = dataclasses.asdict(options).items()
    return {key: str(value) if isinstance(value, Path) else value for key, value in values}


def _options_parser(kind: Any) -> Any:
    parser, hints = _new_parser(None), typing.get_type_hints(kind)
    from jsonargparse import SUPPRESS

    parser.description, texts = _documentation(kind)
    for field in dataclasses.fields(kind):
        hint, several = _element(hints[field.name])
        about: dict[str, Any] = {"help": texts.get(field.name, ""), "default": _default(field)}
        if field.metadata.get("hidden"):
            about["help"] = SUPPRESS
        if about["default"] in (None, []) or about["default"] is False:
            about["default"] = SUPPRESS  # the help omits it, and the class has it
        if hint is bool:
            about["action"] = "store_true"
        else:
            about["type"] = hint if several else hints[field.name]
        if several:
            about["nargs"] = "*" if field.metadata.get("words") else "+"
        if field.metadata.get("names"):
            about["dest"] = field.name
        parser.add_argument(*_names(field), **about)
    return parser


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _names(field: dataclasses.Field[Any]) -> tuple[str, ...]:
    """Return the names of an option on the command line, or the name of words."""
    required = field.default is field.default_factory is dataclasses.MISSING
    if required or field.metadata.get("words"):
        return (field.name,)
    return field.metadata.get("names") or ("--" + field.name.replace("_", "-"),)


def _element(hint: Any) -> tuple[Any, bool]:
    """Return the type of one value, and whether the option takes several."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        inner = [arm for arm in typing.get_args(hint) if arm is not types.NoneType]
        hint = inner[0] if len(inner) == 1 else hint
    if typing.get_origin(hint) is list:
        return typing.get_args(hint)[0], True
    return hint, False


def _documentation(kind: type) -> tuple[str, dict[str, str]]:
    """Return the first sentence of a class's docstring, and the texts about its fields."""
    from docstring_parser import parse

    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        for row in parse(base.__doc__ or "").params:
            texts[row.arg_name] = " ".join((row.description or "").split()).rstrip(".")
    return parse(kind.__doc__ or "").short_description or "", texts


def _refuse(message: str, kind: Any) -> str:
    """Rewrite a message of the parser about options as a sentence."""
    shown = {field.name: _names(field)[-1] for field in dataclasses.fields(kind)}
    hints = {key: _element(hint)[0] for key, hint in typing.get_type_hints(kind).items()}
    if wrong := re.search(r"[Uu]nrecognized arguments: (.*)", message):
        return f"{wrong[1]!r} is not known; allowed are {', '.join(shown.values())}."
    if wrong := _wrong_value(message):
        return f"{shown[wrong[1]]} is {wrong[2]!r}, but must be {_allowed(hints[wrong[1]])}."
    if wrong := re.search(r"argument (\S+): expected (?:at least )?one argument", message):
        name = wrong[1].split("/")[-1]
        key = next(key for key, names in shown.items() if names == name)
        return f"{name} has no value, but must be {_allowed(hints[key])}."
    if wrong := re.search(r"arguments are required: (.*)", message):
        return f"{wrong[1].rpartition('.')[2]} is missing; --help shows the usage."
    return f"{message.rstrip('.')}."


# ---------------------------------------------------------------------------------------- settings
def read_settings(description: str | None, arguments: Sequence[str] | None, kind: Any) -> Any:
    """Return the settings of the command line: an instance of `kind`.

    Invalid settings end the process with status 2 and one sentence that names the key, its value
    and the allowed values: on every rank, before anything has been started.

    Args:
        description: description of the script, for --help.
        arguments: arguments to parse; None: those of the command line.
        kind: class of the settings.
    """
    try:
        return parse_settings(description, arguments, kind)
    except ValueError as error:
        stop(str(error))


def parse_settings(description: str | None, arguments: Sequence[str] | None, kind: Any) -> Any:
    """Return the settings as `read_settings` does, but raise ValueError if they are invalid."""
    parser = _new_parser(description)
    parser.add_argument("--config", action="config", help="a YAML file with any of these settings")
    parser.add_class_arguments(kind)
    try:
        found = _parse(parser, arguments, lambda text: _refuse_setting(text, kind))
    except RecursionError:  # hundreds of brackets, say
        raise ValueError("settings: values are nested too deeply.") from None
    found.pop("config", None)
    for key, hint in typing.get_type_hints(kind).items():
        if found.get(key, ...) is None and type(None) not in typing.get_args(hint):
            raise ValueError(f"settings: {key} is null, but must be {_allowed(hint)}.")
    return kind(**found)


def _refuse_setting(message: str, kind: Any) -> str:
    """Rewrite a message of the parser about settings as a sentence."""
    names = ", ".join(field.name for field in dataclasses.fields(kind))
    hints = typing.get_type_hints(kind)
    if wrong := re.search(r"Option '([^']+)' is not accepted", message):
        return f"settings: {wrong[1]!r} is not known; allowed are {names}."
    if wrong := re.search(r"[Uu]nrecognized arguments: (.*)", message):
        return f"settings: {wrong[1]!r} is not known; allowed are --config and, as --key, {names}."
    if wrong := _wrong_value(message):
        hint = hints.get(wrong[1].partition(".")[0])
        return f"settings: {wrong[1]} is {wrong[2]!r}, but must be {_allowed(hint)}."
    if "config" in message:
        for start in ("Problems parsing config: ", 'Parser key "config": '):
            message = message.removeprefix(start)
        return (
            f"settings: --config must be a YAML file of settings: {message.rstrip('.')}; allowed "
            f"are {names}."
        )
    if wrong := re.search(r"argument --([\w.]+): expected one argument", message):
        hint = hints.get(wrong[1].partition(".")[0])
        return f"settings: {wrong[1]} has no value, but must be {_allowed(hint)}."
    return f"settings: {message.rstrip('.')}."


# ------------------------------------------------------------------------------------------- both
def _wrong_value(message: str) -> re.Match[str] | None:
    """Return the key and the value that the parser refuses; None for another message."""
    pattern = r'Parser key "([\w.]+)"(?: element \d+)?: .*?(?:Got|Given) value: (.*)'
    return re.search(pattern, message)


def _allowed(hint: Any) -> str:
    """Describe the values that a type allows."""
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(repr(choice) for choice in typing.get_args(hint))
    described: dict[Any, str] = {
        int: "an integer",
        float: "a number",
        bool: "true or false",
        str: "a text",
        Path: "a path",
        list[int]: "a list of integers",
        list[str]: "a list of texts",
        list[float]: "a list of numbers",
        str | None: "a text or null",
        float | None: "a number or null",
        int | None: "an integer or null",
    }
    return described.get(hint, "a spec string such as 'topk:0.01' or a mapping with low and high")
