"""What commands are told: files to write, functions to call."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def check_writable(path: Path | None) -> None:
    """Raises before the work rather than after it."""
    if path is None:
        return
    folder = next(parent for parent in path.parents if parent.exists())
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"{path}: expected a file that can be written")


def find_function(spec: str, what: str) -> tuple[Any, Callable[..., Any]]:
    """The user's module and function, also where they lie in the folder at hand."""
    name, _, function = spec.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(name)
        return module, getattr(module, function)
    except Exception as error:  # whatever the user's module raises
        raise ValueError(f"{what} {spec}: expected MODULE:FUNCTION, cannot find it: {error}") from error
