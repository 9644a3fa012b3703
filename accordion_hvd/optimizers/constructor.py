"""The signature of a compressed optimizer, from its framework's arguments and its update rule's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from inspect import Parameter, Signature, signature
from typing import Any


def constructor(
    common: Callable[..., Any], own: Iterable[Parameter], optional: Sequence[str] = ()
) -> Signature:
    """Return the signature of an optimizer of a framework.

    Args:
        common: constructor of all optimizers of the framework. Its `**` argument stands for `own`.
        own: arguments of the update rule; keywords in the result.
        optional: arguments of `common` that only some rules have. Their defaults are the rule's.
    """
    rule = {parameter.name: parameter for parameter in own}
    positional, keywords = [], []
    lacking = False
    for parameter in list(signature(common).parameters.values())[1:]:  # without self
        if parameter.kind is Parameter.VAR_KEYWORD:
            continue
        if parameter.name in optional and parameter.name not in rule:
            lacking = True  # the arguments that follow have other positions in `common`
            continue
        parameter = rule.pop(parameter.name, parameter).replace(kind=parameter.kind)
        if lacking or parameter.kind is Parameter.KEYWORD_ONLY:
            keywords.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))
        else:
            positional.append(parameter)
    named = [parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in rule.values()]
    return Signature([*positional, *named, *keywords])
