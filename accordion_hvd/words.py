"""A compression in a word: "topk:0.01", "powersgd:rank=4", "Accordion(low=PowerSGD(4), ...)"."""

from __future__ import annotations

import ast
from typing import Any


def parse(text: str) -> Any:
    """The compressor or policy that `text` names.

    Either `name`, `name:argument,key=value,...`, or a call as in Python, whose arguments may be
    literals, dicts and further calls of known names. `name:name:...` is a call within a call.
    Names are those importable from `accordion_hvd`, in any case. Nothing else is evaluated.

    Raises:
        ValueError: an unknown name, arguments that it does not take, or no such form.
    """
    word = _as_call(text.strip())
    try:
        tree = ast.parse(word, mode="eval").body
    except SyntaxError:
        raise ValueError(
            f"compression {text!r} is not understood; write a word such as 'topk:0.01' or a call "
            "such as 'Accordion(low=PowerSGD(4), high=PowerSGD(1))'."
        ) from None
    return _value(tree, text)


def _as_call(word: str) -> str:
    head, colon, rest = word.partition(":")
    if not head.isidentifier():
        return word
    return f"{head}({_as_call(rest) if ':' in rest else rest})" if colon else f"{head}()"


def known() -> dict[str, Any]:
    """What a word may name: lower-case name to class."""
    from accordion_hvd import averaging, compressors, policy
    from accordion_hvd.privacy import PrivacyBudget

    names = {name.lower(): getattr(compressors, name) for name in compressors.__all__}
    names |= {name.lower(): getattr(averaging, name) for name in averaging.__all__}
    own = (policy.Accordion, policy.AdaQS, policy.Fixed, policy.Gate, policy.StepSchedule)
    return names | {kind.__name__.lower(): kind for kind in (*own, PrivacyBudget)}


def _value(node: ast.expr, text: str) -> Any:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return _call(node, node.func.id, text)
    if isinstance(node, ast.Name):
        if node.id == "inf":
            return float("inf")
        return _call(ast.Call(node, [], []), node.id, text)
    if isinstance(node, ast.Dict):
        keys = [_value(key, text) for key in node.keys if key is not None]
        return dict(zip(keys, [_value(value, text) for value in node.values], strict=True))
    if isinstance(node, ast.List):
        return [_value(item, text) for item in node.elts]
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ValueError(f"compression {text!r}: {ast.unparse(node)} is not understood.") from None


def _call(node: ast.Call, name: str, text: str) -> Any:
    factory = known().get(name.lower())
    if factory is None:
        allowed = ", ".join(sorted(known()))
        raise ValueError(f"compression {text!r}: {name!r} is not known; allowed are {allowed}.")
    arguments = [_value(argument, text) for argument in node.args]
    options = {word.arg: _value(word.value, text) for word in node.keywords if word.arg}
    try:
        return factory(*arguments, **options)
    except TypeError as error:
        raise ValueError(f"compression {text!r}: {error}.") from None
