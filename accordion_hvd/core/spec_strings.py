"""The grammar of spec strings: "topk:0.01", "powersgd:rank=4", "Accordion(low=TopK(0.1), ...)"."""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

Names = Mapping[str, Callable[..., Any]]
_LONGEST = 2000
"""Characters of a spec string; longer ones could exhaust the stack of Python's parser."""


def table(*modules: ModuleType) -> dict[str, Any]:
    """Return the public objects of `modules`, by lower-case name."""
    return {name.lower(): getattr(module, name) for module in modules for name in module.__all__}


def parse(text: str, names: Names) -> Any:
    """Return the object that a spec string describes.

    A spec string is `name`, `name:argument,key=value,...`, or a call in Python's syntax whose
    arguments are literals, lists, dicts and further calls. `name:name:...` is a call within a
    call. Names are case-insensitive. The name of an argument whose default is False, on its own,
    sets it to True: `powersgd:4,alternate`. Nothing else is evaluated.

    Args:
        text: the spec string.
        names: the factories that the spec string may call, by lower-case name.

    Raises:
        ValueError: if the text has another form, a name is unknown, or arguments do not fit.
    """
    if len(text) > _LONGEST:
        raise ValueError(
            f"compression {text[:40]!r}... has {len(text)} characters, but may have {_LONGEST}."
        )
    try:
        tree = ast.parse(_as_call(text.strip()), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(
            f"compression {text!r} is not understood; write a spec string such as 'topk:0.01' or "
            "'Accordion(low=PowerSGD(4), high=PowerSGD(1))'."
        ) from None
    try:
        return _value(tree, text, names)
    except TypeError as error:  # such as a list as a dict's key
        raise ValueError(f"compression {text!r}: {error}.") from None
    except RecursionError:
        raise ValueError(f"compression {text!r} has too many calls within calls.") from None


def _as_call(text: str) -> str:
    name, colon, arguments = text.partition(":")
    if not name.isidentifier():
        return text
    name = name.lower()  # "None" would be a constant
    if not colon:
        return f"{name}()"
    return f"{name}({_as_call(arguments) if ':' in arguments else arguments})"


def _value(node: ast.expr, text: str, names: Names) -> Any:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return _call(node, node.func.id, text, names)
    if isinstance(node, ast.Name):
        if node.id == "inf":
            return float("inf")
        return _call(ast.Call(node, [], []), node.id, text, names)
    if isinstance(node, ast.Dict) and None not in node.keys:
        keys = [_value(key, text, names) for key in node.keys if key is not None]
        return dict(zip(keys, [_value(v, text, names) for v in node.values], strict=True))
    if isinstance(node, ast.List):
        return [_value(item, text, names) for item in node.elts]
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ValueError(f"compression {text!r}: {ast.unparse(node)} is not understood.") from None


def _call(node: ast.Call, name: str, text: str, names: Names) -> Any:
    factory = names.get(name.lower())
    if factory is None:
        close = difflib.get_close_matches(name.lower(), names, 1)
        meant = f"did you mean {close[0]!r}? " if close else ""
        allowed = ", ".join(x for x in sorted(names) if not _needs_arguments(names[x]))
        raise ValueError(
            f"compression {text!r}: {name!r} is not known; {meant}allowed are {allowed}."
        )
    flags = [x.id for x in node.args if isinstance(x, ast.Name) and _is_flag(factory, x.id)]
    values = [x for x in node.args if not (isinstance(x, ast.Name) and x.id in flags)]
    arguments = [_value(argument, text, names) for argument in values]
    options = dict.fromkeys(flags, True)
    for key in node.keywords:
        if key.arg is None:
            raise ValueError(f"compression {text!r}: ** is not understood.")
        options[key.arg] = _value(key.value, text, names)
    try:
        return factory(*arguments, **options)
    except TypeError as error:
        raise ValueError(f"compression {text!r}: {error}.") from None


def _needs_arguments(factory: Callable[..., Any]) -> bool:
    """Return whether `factory` needs arguments, such as another compressor."""
    return any(x.default is x.empty for x in inspect.signature(factory).parameters.values())


def _is_flag(factory: Callable[..., Any], name: str) -> bool:
    """Return whether `factory` has an argument of this name whose default is False."""
    argument = inspect.signature(factory).parameters.get(name)
    return argument is not None and argument.default is False
