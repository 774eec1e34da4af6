"""Finds and loads liblogitless, turns its statuses into exceptions, and keeps its contexts.

One library a process: LOGITLESS_LIBRARY names another than the one in this package. A context is made once per
backend, thread count and device, and lives as long as the process; its threads sleep between calls and are made anew
by the library after a fork.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import pathlib
import threading
from typing import Any

from . import _abi


class Error(RuntimeError):
    """A failure that has no closer exception of Python; `status` is the C name, such as LL_ERROR_SYSTEM."""

    def __init__(self, message: str, status: str = "") -> None:
        super().__init__(message)
        self.status = status


_EXCEPTIONS: dict[int, type[Exception]] = {
    _abi.ERROR_INVALID_ARGUMENT: ValueError,
    _abi.ERROR_TARGET_RANGE: IndexError,
    _abi.ERROR_EMPTY: ValueError,
    _abi.ERROR_BUDGET: ValueError,
    _abi.ERROR_UNSUPPORTED: NotImplementedError,
    _abi.ERROR_OUT_OF_MEMORY: MemoryError,
}


@functools.lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """The loaded library. ImportError says where it was looked for."""
    path = os.environ.get("LOGITLESS_LIBRARY") or str(pathlib.Path(__file__).parent / "lib" / "liblogitless.so")
    try:
        loaded = _abi.bind(ctypes.CDLL(path))
    except (OSError, AttributeError) as error:
        raise ImportError(
            f"logitless: {path} is missing or is not the library of this package ({error}); install the package "
            f"(pip install .), or let LOGITLESS_LIBRARY name liblogitless.so"
        ) from error
    version = tuple(int(part) for part in loaded.ll_version().decode().split(".")[:2])
    if version[0] != _abi.VERSION[0] or version < _abi.VERSION:
        raise ImportError(
            f"logitless: {path} is version {'.'.join(map(str, version))}; this package needs "
            f"{'.'.join(map(str, _abi.VERSION))} or a later one of the same major version"
        )
    return loaded


def check(status: int) -> None:
    """Raises what a status other than LL_OK means, with the library's own line."""
    if status == _abi.OK:
        return
    loaded = library()
    text = loaded.ll_last_error().decode()
    kind = _EXCEPTIONS.get(status)
    if kind is not None:
        raise kind(text)
    raise Error(text, loaded.ll_status_name(status).decode())


_contexts: dict[tuple[int, int, int], int] = {}
_making = threading.Lock()


def context(backend: int, threads: int, device: int = 0) -> int:
    """The handle of the context of this backend, thread count (0: the library's own choice) and CUDA device."""
    key = (backend, threads, device)
    handle = _contexts.get(key)
    if handle is not None:
        return handle
    with _making:
        if key not in _contexts:
            loaded = library()
            options = _abi.ContextOptions()
            loaded.ll_context_options_init_sized(ctypes.byref(options), ctypes.sizeof(options))
            options.backend = backend
            options.threads = threads
            options.device = device
            made = ctypes.c_void_p()
            check(loaded.ll_context_create(ctypes.byref(options), ctypes.byref(made)))
            assert made.value is not None
            _contexts[key] = made.value
    return _contexts[key]


def described(function: Any, handle: int, form: int) -> str:
    """The text of ll_context_describe or ll_plan_describe."""
    length = ctypes.c_size_t()
    check(function(handle, form, None, 0, ctypes.byref(length)))
    buffer = ctypes.create_string_buffer(length.value + 1)
    check(function(handle, form, buffer, len(buffer), ctypes.byref(length)))
    return buffer.value.decode()


def place_of(device: str) -> tuple[int, int]:
    """Backend and device number of 'cpu', 'cuda' or 'cuda:1' (a torch.device will do); ValueError for others."""
    name, _, number = str(device).partition(":")
    if name not in ("cpu", "cuda") or (number and not number.isdigit()):
        raise ValueError(f"device: {str(device)!r}; must be 'cpu', 'cuda' or 'cuda:N'")
    return (_abi.BACKEND_CUDA if name == "cuda" else _abi.BACKEND_CPU), int(number or 0) if name == "cuda" else 0


def info(device: str = "cpu") -> dict[str, Any]:
    """Machine, instruction sets found and chosen, backends, threads, version: what `logitless info --json` prints.

    device: 'cuda' or 'cuda:N' for what is found there. Raises NotImplementedError naming what is missing for it.
    """
    backend, number = place_of(device)
    result: dict[str, Any] = json.loads(
        described(library().ll_context_describe, context(backend, 0, number), _abi.JSON)
    )
    return result


def check_status(device: str = "cuda", stream: int | None = None) -> None:
    """Raises the first thing on a CUDA device, since the last time, that a call could not refuse: waits for `stream` (a
    cudaStream_t; None is the default stream, which waits for all others but those that are non-blocking).

    Calls there only enqueue, so a target out of range or an empty mean with on_empty="error" becomes NaN and is told
    here. Raises IndexError naming row and value, or ValueError. On the CPU calls refuse at once, and this does nothing.
    """
    backend, number = place_of(device)
    check(library().ll_check_status(context(backend, 0, number), stream))


def version() -> str:
    """The package's version, which is the library's; read from the package so that no library is loaded for it."""
    import importlib.metadata

    try:
        return importlib.metadata.version("logitless")
    except importlib.metadata.PackageNotFoundError:  # from a source tree
        return ".".join(map(str, _abi.VERSION)) + ".0"
