"""Kernels: functions that Numba compiles at their first call, each with a NumPy reference.

This is the only module that imports Numba, at the first call of a kernel. A kernel is a
module-level function under `kernel`; its reference does the same work::

    @helper                      # a part of kernels; no reference, no use of its own
    def _square(x): return x * x

    def _squares_reference(values, out): out[...] = values * values

    @kernel(_squares_reference)
    def squares(values, out):
        for i in range(values.size):
            out[i] = _square(values[i])      # kernels and helpers call each other by name

The first call in a process decides for all kernels: compiled, or references everywhere if Numba is
not wanted (`mpistrat.config`) or cannot be imported. `is_compiling` returns the decision; ranks
that must agree on the bits of a result have to agree on it.

Kernels are written at module level only, as Numba's cache never finds a closure again. A loop that
is to run with several kernels in it is a `driver`.

Numba keeps machine code beside the source, or in a directory of the user's home, or where
``NUMBA_CACHE_DIR`` says. This module adds:

- Where none of these can be written, code goes to a directory of the node (`node_directory`).
- Code beside the source is found even where nothing can be written there, as in an installation for
  all users; ``mpistrat warm`` puts it there.
- One process of a node compiles; the others wait for it and load its machine code.
- Each signature has files of its own, and so has each version of the code, which includes all
  functions that a kernel names, whatever their file. No damaged file is fatal.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib
import os
import stat
import threading
import time
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar, final

from mpistrat import config

_MAX_WAIT_SECONDS = 20.0  # seconds to wait for a process that compiles; then this one does it, too
_PAUSE_SECONDS = 0.02

# The locks of this process: one for each kernel that it is compiling.
_held_locks: dict[Path, int] = {}


def node_directory() -> Path | None:
    """Return a directory of this user on this node, made if need be; None if there cannot be one.

    It is in ``TMPDIR``, or ``/tmp``. Python runs what is read from it, so it is refused unless it
    belongs to this user and nobody else can write or read it.
    """
    import tempfile

    path = Path(tempfile.gettempdir(), f"mpistrat-{os.geteuid()}")
    try:
        path.mkdir(0o700, exist_ok=True)
        status = path.lstat()
    except OSError:
        return None
    is_private = (
        stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o77
    )
    return path if is_private and os.access(path, os.W_OK) else None


def compile_cached(compiler: Callable[[bool], Any], config: Any) -> Any:
    """Return a function of Numba with a place on disk, if there is one at all.

    Args:
      compiler: Makes it, with a cache or without.
      config: Numba's own settings.
    """
    try:
        return compiler(True)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
    # A read-only installation of a user without a writable home.
    configured_directory, config.CACHE_DIR = config.CACHE_DIR, str(node_directory() or "")
    try:
        return compiler(bool(config.CACHE_DIR))
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        return compiler(False)  # each process compiles
    finally:
        config.CACHE_DIR = configured_directory


def attach_cache_files(cache: Any, source_path: str, code: list[str], config: Any) -> None:
    """Put `_CacheFiles` in place of the files of a function.

    Args:
      cache: Numba's cache of the function; None, and others without files, are left alone.
      source_path: The file that the function is from.
      code: The code of all functions that it is compiled from.
      config: Numba's own settings; a directory that they name is the only one.
    """
    if hasattr(cache, "_cache_file"):
        source_cache = (
            cache.cache_path if config.CACHE_DIR else f"{Path(source_path).parent}/__pycache__"
        )
        cache._cache_file = _CacheFiles(cache._cache_file, source_cache, code)


@final
class _CacheFiles:
    """Numba's cache files of one function, kept apart by signature, and never fatal.

    Numba keeps one index per function and numbers the code files. Two ranks that compile different
    signatures at once both take number 1, and afterwards the index of one names the code of the
    other. With an index per signature they can only write the same thing. The code of the function
    is part of the key like the signature. A file that is torn, or cannot be read or written, costs
    a compilation and nothing else.
    """

    def __init__(self, cache_files: Any, source_cache: str, code: list[str]):
        self._numba_files = cache_files
        self._source_directory = source_cache
        self._code = code

    def _file_name(self, key: tuple[Any, ...]) -> str:
        # The key holds types, processor and bytecode; their text is the same in every process.
        digest = hashlib.sha256(repr((key, self._code)).encode()).hexdigest()[:16]
        return f"{self._numba_files._index_name.removesuffix('.nbi')}-{digest}"

    def _files_of(self, key: tuple[Any, ...], directory: str | None = None) -> Any:
        cache_files = self._numba_files
        return type(cache_files)(
            directory or cache_files._cache_path, self._file_name(key), cache_files._source_stamp
        )

    def load(self, key: tuple[Any, ...]) -> Any:
        """Return the code, or None if this process has to compile it."""
        compiled_code = self._read(key)
        if compiled_code is None and _acquire(self._file_name(key)):
            compiled_code = self._read(key)  # another process may have made it meanwhile
            if compiled_code is not None:
                _release(self._file_name(key))
        return compiled_code

    def _read(self, key: tuple[Any, ...]) -> Any:
        file = self._files_of(key)
        try:
            compiled_code = file.load(key)
        except Exception:  # torn bytes make the reader raise almost anything
            with contextlib.suppress(OSError):
                file.flush()
            compiled_code = None
        if compiled_code is None and self._source_directory != self._numba_files._cache_path:
            with contextlib.suppress(Exception):
                return self._files_of(key, self._source_directory).load(key)
        return compiled_code

    def save(self, key: tuple[Any, ...], compiled_code: object) -> None:
        """Write the code, and let those continue who wait for it."""
        # Disk full, read-only, or a torn index that could not be replaced: the code still runs.
        with contextlib.suppress(Exception):
            self._files_of(key).save(key, compiled_code)
        _release(self._file_name(key))

    def flush(self) -> None:
        """Do nothing: whoever recompiles overwrites the file of that signature."""


def _acquire(name: str) -> bool:
    """Take the lock of a kernel on this node, and wait for its holder; return whether it was taken.

    A process that ends gives its locks back, whatever it ends by.
    """
    directory = node_directory()
    if directory is None or directory / name in _held_locks:
        return False
    deadline = time.monotonic() + _MAX_WAIT_SECONDS
    with contextlib.suppress(OSError):
        lock = os.open(directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW)
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(_PAUSE_SECONDS)
                    continue
                os.close(lock)
                return False
            _held_locks[directory / name] = lock
            return True
    return False


def _release(name: str) -> None:
    for path in [path for path in _held_locks if path.name == name]:
        with contextlib.suppress(OSError):
            path.unlink()  # before others get it: one who opens it now finds the code
        with contextlib.suppress(OSError):
            os.close(_held_locks.pop(path))


# Division by zero gives infinity or NaN, as in the references, and does not raise.
_NUMPY_SEMANTICS = {"nogil": True, "error_model": "numpy"}

P = ParamSpec("P")
R = TypeVar("R")


@final
class Kernel(Generic[P, R]):
    """A function that runs compiled, or as its NumPy reference.

    Attributes:
      reference: The NumPy function of the same arguments and the same meaning.
    """

    def __init__(
        self,
        function: Callable[P, R],
        reference: Callable[P, R] | None = None,
        compiler: Callable[[Callable[P, R]], Callable[P, R]] | None = None,
    ):
        """Create a kernel; nothing is compiled, and Numba is not imported."""
        self._compiler = compiler or _compile
        functools.update_wrapper(self, function)
        self._is_driver = reference is None
        self.reference: Callable[P, R] = reference or (
            lambda *args, **kwargs: self.resolve_reference()(*args, **kwargs)
        )
        self._function = function
        self._run: Callable[P, R] = self._first_run
        self._compiled: Callable[P, R] | None = None
        self._lock = threading.Lock()

    def resolve_reference(self) -> Callable[P, R]:
        """Return the reference; a driver's is its body around the references of its kernels."""
        if self._is_driver:
            with self._lock:
                if self._is_driver:  # and no other thread has made it meanwhile
                    function = self._function
                    globals_by_name = {
                        name: function.__globals__.get(name) for name in function.__code__.co_names
                    }
                    references = {
                        n: v.resolve_reference()
                        for n, v in globals_by_name.items()
                        if isinstance(v, Kernel)
                    }
                    self.reference = _copy_with_globals(function, references)
                    self._is_driver = False
        return self.reference

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the form that this process uses."""
        return self._run(*args, **kwargs)

    def _first_run(self, *args: P.args, **kwargs: P.kwargs) -> R:
        # From here on a call costs no decision any more.
        self._run = self.compiled() if is_compiling() else self.resolve_reference()
        return self._run(*args, **kwargs)

    def compiled(self) -> Callable[P, R]:
        """Return Numba's form of the function, whatever the options say.

        Machine code is made, or loaded from Numba's cache on disk, when the result is first called
        with arguments of new types.

        Raises:
          ImportError: Numba cannot be imported.

        Cost: About a second for the first call in a process, which imports Numba.
        """
        with self._lock:
            if self._compiled is None:
                self._compiled = self._compiler(self._function)
            return self._compiled


def kernel(reference: Callable[P, R]) -> Callable[[Callable[P, R]], Kernel[P, R]]:
    """Make a decorator that turns a module-level function into a kernel.

    Args:
      reference: Does the same in NumPy, with the same arguments: the fallback and the oracle.

    Returns:
      A decorator that returns a `Kernel`, to be called like the function.

    Example:
      >>> import numpy as np
      >>> def reference(values):
      ...     return values.sum()
      >>> def loop(values):
      ...     total = 0.0
      ...     for value in values:
      ...         total += value
      ...     return total
      >>> total = kernel(reference)(loop)
      >>> float(total.reference(np.ones(3)))
      3.0
    """

    def decorate(function: Callable[P, R]) -> Kernel[P, R]:
        return Kernel(function, reference)

    return decorate


def helper(function: Callable[P, R]) -> Kernel[P, R]:
    """Turn a module-level function into a part that kernels of its module call by name.

    It has no reference of its own, as only compiled kernels reach it: without Numba the reference
    of the kernel runs in the kernel's place. Python runs the function itself. Its compiled form is
    for kernels alone: code through which Python could call it would be a quarter of the machine
    code.

    Example:
      >>> def twice(x):
      ...     return x + x
      >>> helper(twice).reference(4)
      8
    """
    helper_kernel = Kernel(function, function, _compile_part)
    helper_kernel._run = function
    return helper_kernel


def driver(function: Callable[P, R], **kernels: Kernel[..., Any]) -> Kernel[P, R]:
    """Turn a module-level loop around kernels into a kernel that needs no reference of its own.

    Its reference is its own body, with the references of all kernels that it names in their place;
    so everything else in the body has to mean the same in Python. Machine code is kept apart in the
    cache on disk for each choice of `kernels`.

    Args:
      function: The loop. It names kernels of its module, and those given here.
      kernels: Kernels for further names in it.

    Returns:
      A `Kernel`, to be called like the function; a new one for each call.

    Example:
      >>> def loop(x):
      ...     return part(x) + 1
      >>> driver(loop, part=helper(lambda x: 10 * x)).reference(4)
      41
    """
    renamed_function = _copy_with_globals(function, kernels)
    return Kernel(renamed_function)


# The types of argument and result of each conversion, as Numba names them.
_CASTS = {
    "float_of_bits": ("uint32", "float32"),
    "bits_of_float": ("float32", "uint32"),
    "float_of_half": ("uint16", "float32"),
    "half_of_float": ("float32", "uint16"),
}


def cast(function: Callable[[Any], Any]) -> Kernel[[Any], Any]:
    """Turn a function that is named in `_CASTS` into one instruction of the processor in kernels.

    A half is passed as its 16 bits: Numba has no such type. LLVM rounds to the nearest, ties to
    even.

    Args:
      function: Does the same in NumPy.
    """
    return Kernel(function, function, _compile_cast)


def _compile_cast(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    numba, name = _numba(), function.__name__
    ir, types = importlib.import_module("llvmlite.ir"), numba.types
    source, target = (getattr(types, kind) for kind in _CASTS[name])

    def convert(builder: Any, value: Any) -> Any:
        if name == "float_of_half":
            return builder.fpext(builder.bitcast(value, ir.HalfType()), ir.FloatType())
        if name == "half_of_float":
            return builder.bitcast(builder.fptrunc(value, ir.HalfType()), ir.IntType(16))
        return builder.bitcast(value, ir.FloatType() if target == types.float32 else ir.IntType(32))

    def instruction(context: object, value: object) -> Any:
        return target(source), lambda _, builder, __, values: convert(builder, values[0])

    intrinsic = importlib.import_module("numba.extending").intrinsic(instruction)
    call: Any = lambda value: intrinsic(value)  # noqa: E731
    call.__qualname__ = name  # see `_compile`
    return numba.njit(**_NUMPY_SEMANTICS)(call)  # type: ignore[no-any-return]  # untyped import


def stream(function: Callable[[int, int, int], None]) -> Kernel[[int, int, int], None]:
    """Turn a function into stores that go past the caches, for kernels to call.

    Args:
      function: Does the same in Python: it copies to the first address, from the second, so many
        bytes; the first address and the number are multiples of 64.
    """
    return Kernel(function, function, _compile_stream)


def _compile_stream(function: Callable[[int, int, int], None]) -> Callable[[int, int, int], None]:
    numba = _numba()
    ir, types = importlib.import_module("llvmlite.ir"), numba.types
    tools = importlib.import_module("numba.core.cgutils")

    def emit(context: Any, builder: Any, _: object, values: Any) -> Any:
        to, value, nbytes = values
        vector_pointer, integer = ir.VectorType(ir.IntType(64), 4).as_pointer(), nbytes.type
        nontemporal_mark = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        steps = ir.Constant(integer, 0), nbytes, ir.Constant(integer, 32)
        with tools.for_range_slice(builder, *steps) as (at, _):
            vector = builder.load(builder.inttoptr(builder.add(value, at), vector_pointer), align=1)
            pointer = builder.inttoptr(builder.add(to, at), vector_pointer)
            builder.store(vector, pointer, align=32).set_metadata("nontemporal", nontemporal_mark)
        if _is_x86():  # whose other fences need not order such stores
            fence = ir.FunctionType(ir.VoidType(), [])
            builder.call(builder.module.declare_intrinsic("llvm.x86.sse.sfence", (), fence), [])
        else:
            builder.fence("seq_cst")
        return context.get_dummy_value()

    def instructions(context: object, to: object, value: object, nbytes: object) -> Any:
        return types.void(types.intp, types.intp, types.intp), emit

    intrinsic = importlib.import_module("numba.extending").intrinsic(instructions)
    call: Any = lambda to, value, nbytes: intrinsic(to, value, nbytes)  # noqa: E731
    call.__qualname__ = function.__name__  # see `_compile`
    return numba.njit(**_NUMPY_SEMANTICS)(call)  # type: ignore[no-any-return]  # untyped import


def _is_x86() -> bool:
    triple: str = importlib.import_module("llvmlite.binding").get_process_triple()
    return triple.startswith(("x86", "i386", "i686"))


@functools.cache
def converts_halves() -> bool:
    """Tell whether this processor converts between float16 and float32 by itself.

    One without (x86 before F16C, of 2012) would call a function for each number, which takes longer
    than NumPy's own.
    """
    binding = importlib.import_module("llvmlite.binding")
    if not _is_x86():
        return binding.get_process_triple().startswith(("aarch64", "arm64"))  # type: ignore[no-any-return]
    return bool(binding.get_host_cpu_features().get("f16c", False))


def _copy_with_globals(original: Callable[..., Any], new_globals: dict[str, Any]) -> Any:
    renamed_function = types.FunctionType(
        original.__code__, {**original.__globals__, **new_globals}
    )
    renamed_function.__defaults__ = original.__defaults__
    renamed_function.__qualname__ = original.__qualname__
    renamed_function.__doc__ = original.__doc__
    return renamed_function


def _describe_code(described_function: Callable[..., Any], visited_ids: set[int]) -> list[str]:
    """Describe the code of a function and of all that it names.

    Numba's own key does not contain it: an edit of a helper in another file would go unnoticed.
    """
    if id(described_function) in visited_ids:
        return []
    visited_ids.add(id(described_function))
    code = described_function.__code__
    texts = [code.co_code.hex(), repr(code.co_consts)]
    for name in code.co_names:
        value = described_function.__globals__.get(name)
        if isinstance(value, Kernel):
            texts += [name, *_describe_code(value._function, visited_ids)]
        elif isinstance(value, int | float | str | tuple):
            texts.append(f"{name}={value!r}")
    return texts


@functools.cache
def is_compiling() -> bool:
    """Return whether this process runs compiled kernels; decided once, then kept.

    Warns:
      RuntimeWarning: Numba is wanted but cannot be imported; said once.

    Cost: The first call imports Numba, if the options want it.
    """
    if not config.read_options().numba:
        return False
    try:
        _numba()
    except Exception as error:  # a broken Numba may also raise OSError, SystemError and others
        warnings.warn(
            f"Numba cannot be imported ({type(error).__name__}: {error}); mpistrat uses "
            "NumPy instead, which is slower. Install numba, or set MPISTRAT_NUMBA=0 to "
            "silence this warning.",
            RuntimeWarning,
            stacklevel=3,
        )
        return False
    return True


@functools.cache
def _numba() -> Any:
    # import_module: Numba's annotations are partial, and mypy must pass where it is not installed.
    numba = importlib.import_module("numba")
    # Compiled code that names a Kernel means its compiled form.
    typeof = importlib.import_module("numba.extending").typeof_impl
    typeof.register(Kernel)(lambda value, _: numba.typeof(value.compiled()))
    return numba


def _compile_part(function: Callable[P, R]) -> Callable[P, R]:
    # In the machine code of each kernel that calls it, so it needs no file of its own in the cache.
    wrapper_options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return _numba().njit(**wrapper_options, **_NUMPY_SEMANTICS)(function)  # type: ignore[no-any-return]


def _compile(function: Callable[P, R]) -> Callable[P, R]:
    numba, code = _numba(), _describe_code(function, set())
    # Numba's names of machine code have the qualified name, the arguments, and a number that each
    # process counts again. A third process would mix up two forms of one loop that two processes
    # have put in the cache, so the name contains the form, too.
    named_function = _copy_with_globals(function, {})
    named_function.__qualname__ += (
        f"_{hashlib.blake2b(repr(code).encode(), digest_size=6).hexdigest()}"
    )
    compiled = compile_cached(
        lambda keep: numba.njit(cache=keep, **_NUMPY_SEMANTICS)(named_function), numba.config
    )
    cache, file = getattr(compiled, "_cache", None), function.__code__.co_filename
    attach_cache_files(cache, file, code, numba.config)
    return compiled  # type: ignore[no-any-return]  # untyped import
