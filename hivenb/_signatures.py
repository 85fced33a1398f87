"""Signatures as people see them: Tab and Shift-Tab in a notebook, ``help`` and ``inspect.signature``.

What takes its keywords as ``**changes`` or ``**settings``, to say more of a wrong one than Python does, says here which
there are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from inspect import Parameter, Signature
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Unchanged:
    """The default of what stays as it is unless it is given."""

    def __repr__(self) -> str:
        return "unchanged"


#: The one of these.
UNCHANGED: Any = _Unchanged()


class OwnSignature:
    """As ``__signature__`` of a class: what it is called with. A class that is derived from it has one of its own.

    :param make: makes the signature, when somebody asks for it
    """

    def __init__(self, make: Callable[[], Signature]) -> None:
        self._make = make

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner = owner

    def __get__(self, instance: object, owner: type) -> Signature:
        if instance is not None or owner is not self._owner:
            raise AttributeError("__signature__")
        return self._make()


def keywords_of(
    function: Callable[..., Any], *, but: Collection[str] = (), defaults: Mapping[str, Any] | None = None
) -> list[Parameter]:
    """The parameters of a function, without ``self`` and what takes any number, as those that are given by name.

    :param but: names to leave out
    :param defaults: of some of them, in place of the function's own
    """
    found = [
        one.replace(kind=Parameter.KEYWORD_ONLY, default=(defaults or {}).get(one.name, one.default))
        for one in inspect.signature(function).parameters.values()
        if one.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    ]
    return [one for one in found if one.name != "self" and one.name not in but]


def unchanged(keywords: Iterable[Parameter]) -> list[Parameter]:
    """The same, of which each may be left out."""
    return [one.replace(default=UNCHANGED) for one in keywords]


def with_keywords(
    function: Callable[..., Any], keywords: Iterable[Parameter], *, is_method: bool = False, takes_more: bool = False
) -> Signature:
    """The signature of a function, with these keywords in place of any.

    :param keywords: those that it names itself are left out
    :param is_method: whether to leave out its first parameter, ``self`` or ``cls``
    :param takes_more: whether it takes others as well
    """
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[is_method:]
    own = [one for one in parameters if one.kind is not Parameter.VAR_KEYWORD]
    rest = [one for one in parameters if one.kind is Parameter.VAR_KEYWORD and takes_more]
    named = {one.name for one in own}
    return signature.replace(parameters=[*own, *(one for one in keywords if one.name not in named), *rest])


def shown_with(keywords: Callable[[], Iterable[Parameter]]) -> Callable[[_Function], _Function]:
    """Decorates a function that takes any keywords: it is shown with these.

    :param keywords: makes them, when the function is defined
    """

    def show(function: _Function) -> _Function:
        function.__signature__ = with_keywords(function, keywords())  # type: ignore[attr-defined]
        return function

    return show
