"""Functions named by a configuration: registered ones, or a path to the user's own."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from regress.errors import ConfigError, TaskError
from regress.import_trust import require_allowed
from regress.tasks.name_suggestions import nearest


def named_function(key: str, kind: str, name: str, registry: Mapping[str, Callable[..., Any]]) -> Any:
    """Return the function `name` of the registry, or of a path "package.module:function".

    `key` is the configuration key of the name, and `kind` the kind of function, such as "reward". Raises
    TaskError for an unknown name, and for a path that must not (see `regress.import_trust`) or cannot be imported,
    or that leads to no function.
    """
    if name in registry:
        return registry[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise TaskError(
            f"{key}: there is no {kind} {name!r}; {nearest(name, registry)} "
            '(your own is named by its path, "package.module:function")'
        )
    try:
        require_allowed(module, f"{key}: {name!r}")
    except ConfigError as error:
        raise TaskError(str(error)) from error
    try:
        function = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        raise TaskError(
            f"{key}: cannot import {name!r} ({type(error).__name__}: {error}); "
            'the form is "package.module:function" and the package must be importable from here'
        ) from error
    if not callable(function):
        raise TaskError(f"{key}: {name!r} is not a function but {function!r}")
    return function
