"""The private names of torch that fastload depends on, each with its reason. No other file may use
one.

`tests/test_torch_private.py` checks that each still means what is thought here, on the oldest and
the newest torch.
"""

from __future__ import annotations

import dataclasses
import inspect
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import FunctionType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import profiler as torch_profiler
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils import pin_memory as torch_pin_memory
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.worker import WorkerInfo

_local = threading.local()


def current_worker_info() -> WorkerInfo | None:
    """The worker info of this thread, None outside of user code that a worker runs."""
    info: WorkerInfo | None = getattr(_local, "info", None)
    return info


def set_worker_info(info: WorkerInfo | None) -> None:
    """Set what `torch.utils.data.get_worker_info()` returns in this thread."""
    _local.info = info


def _get_worker_info() -> Any:
    # Runs with the globals of torch's worker module; see `show_worker_info_in_threads`.
    info = _fastload_worker_info()  # type: ignore[name-defined]  # noqa: F821
    return _worker_info if info is None else info  # type: ignore[name-defined]  # noqa: F821


def show_worker_info_in_threads() -> None:
    """Make `get_worker_info()` answer per thread, for whoever imported it, at any time.

    Torch keeps the info in a module global and user code holds the function object, so neither the
    global nor the name can be made to differ between threads: the function's code is exchanged. In
    a thread without an info of ours it returns what it always did.
    """
    if torch_worker.get_worker_info.__code__ is not _get_worker_info.__code__:
        torch_worker._fastload_worker_info = current_worker_info  # type: ignore[attr-defined]
        torch_worker.get_worker_info.__code__ = _get_worker_info.__code__


_RNG_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "manual_seed": lambda seed: (
        _fastload_manual_seed(seed)  # type: ignore[name-defined]  # noqa: F821
        if (generator := _fastload_generator()) is None  # type: ignore[name-defined]  # noqa: F821
        else generator.manual_seed(int(seed))
    ),
    "seed": lambda: (
        _fastload_seed()  # type: ignore[name-defined]  # noqa: F821
        if (generator := _fastload_generator()) is None  # type: ignore[name-defined]  # noqa: F821
        else generator.seed()
    ),
    "initial_seed": lambda: (
        _fastload_initial_seed()  # type: ignore[name-defined]  # noqa: F821
        if (generator := _fastload_generator()) is None  # type: ignore[name-defined]  # noqa: F821
        else generator.initial_seed()
    ),
    "get_rng_state": lambda: (
        _fastload_get_rng_state()  # type: ignore[name-defined]  # noqa: F821
        if (generator := _fastload_generator()) is None  # type: ignore[name-defined]  # noqa: F821
        else generator.get_state()
    ),
    "set_rng_state": lambda new_state: (
        _fastload_set_rng_state(new_state)  # type: ignore[name-defined]  # noqa: F821
        if (generator := _fastload_generator()) is None  # type: ignore[name-defined]  # noqa: F821
        else generator.set_state(new_state)
    ),
}
"""What torch's functions of the same names do in place of their own code; see `seed_in_threads`."""


def seed_in_threads(generator: Callable[[], torch.Generator | None]) -> None:
    """Make `torch.manual_seed()` and its kin act on what `generator()` gives in the calling thread, if it gives one.

    A sample that seeds (the usual way to crop a picture and its mask alike) would seed the loop's
    generator, of which there is one in the process. As `get_worker_info`, user code holds these
    functions, so their code is exchanged; where `generator()` is None they do what they always did.
    """
    module: Any = torch.random
    if getattr(module, "_fastload_generator", None) is generator:
        return
    module._fastload_generator = generator
    for name, ours in _RNG_FUNCTIONS.items():
        theirs: Any = inspect.unwrap(getattr(module, name))
        if theirs.__code__ is not ours.__code__:
            own = FunctionType(theirs.__code__, theirs.__globals__, name, theirs.__defaults__)
            setattr(module, f"_fastload_{name}", own)
            theirs.__code__ = ours.__code__


_KERNELS_KEY = "TESTING_ONLY_GenericMode"
"""A dispatch key under which torch itself has no kernels. A thread that looks at it does so before all others."""

_Library: Any = torch.library.Library  # Any: it has no types
_libraries: list[Any] = []  # what is registered lasts as long as they


def register_kernels(kernels: dict[str, Callable[..., Any]]) -> Callable[[bool], None]:
    """Register kernels for torch's own operators, for good; 5 ms.

    Torch calls them in a thread that looks at their key. For all other operators it passes the key over, at no cost.

    Args:
        kernels: by the name of the operator and its overload: `random_.from`.

    Returns:
        What makes the calling thread look at the key (True), or not (False); 0.2 us.
    """
    key = torch._C._dispatch_key_parse(_KERNELS_KEY)
    others, ours = libraries = _Library("_", "IMPL"), _Library("aten", "IMPL")
    try:
        others.fallback(torch.library.fallthrough_kernel, _KERNELS_KEY)
        for name, kernel in kernels.items():
            ours.impl(name, kernel, _KERNELS_KEY)
    except BaseException:  # Ctrl-C: half of them would stand in the way of the next attempt
        for library in libraries:
            library._destroy()
        raise
    _libraries.extend(libraries)
    return partial(torch._C._dispatch_tls_set_dispatch_key_included, key)


def overload(name: str) -> Any:
    """Torch's operator of a name such as `random_.from`; None if this torch has none."""
    base, _, of_it = name.partition(".")
    return getattr(getattr(torch.ops.aten, base, None), of_it or "default", None)


def takes_generator(operator: Any) -> bool:
    """Return whether an operator, as `overload` returns it, has an argument of that name."""
    return any(argument.name == "generator" for argument in operator._schema.arguments)


_default_generator: Any = torch.default_generator  # Any: the stubs do not know all of it


def is_default_generator(generator: Any) -> bool:
    """Return whether it is torch's default generator. Kernels get another object of Python's for it at each call."""
    return bool(generator._cdata == _default_generator._cdata)


dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""How many `TorchDispatchMode`s this thread is in; 0.1 us."""


def is_faking() -> bool:
    """Return whether this thread computes without values, as torch does while it traces a graph."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def make_worker_info(worker_id: int, num_workers: int, seed: int, dataset: Any) -> WorkerInfo:
    """A WorkerInfo for a thread, with the `worker_method` that torch >= 2.13 has in it."""
    fields: dict[str, Any] = {
        "id": worker_id,
        "num_workers": num_workers,
        "seed": seed,
        "dataset": dataset,
    }
    if dataclasses.is_dataclass(WorkerInfo):
        fields["worker_method"] = "thread"
    return WorkerInfo(**fields)


def pin(data: Any) -> Any:
    """Copy every tensor of a batch into pinned memory, as torch's own loader does, containers included."""
    return torch_pin_memory.pin_memory(data)  # type: ignore[no-untyped-call]


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in shared memory. Public, but without types."""
    return bool(tensor.is_shared())  # type: ignore[no-untyped-call]


def collate_handler(kind: type) -> Callable[..., Any] | None:
    """The function that torch's `default_collate` applies to samples of type `kind`, those of users
    included.

    None where it looks into the sample as a container, or refuses it.
    """
    table = torch_collate.default_collate_fn_map
    if kind in table:
        return table[kind]
    return next((handler for key, handler in table.items() if issubclass(kind, key)), None)


collate_tensors: Callable[..., Any] = torch_collate.collate_tensor_fn
"""Torch's own handler of tensors: where a user registered another, the user's is called."""

collate_arrays: Callable[..., Any] = torch_collate.collate_numpy_array_fn
"""Torch's own handler of NumPy arrays."""

collate_numbers: tuple[Callable[..., Any], ...] = (
    torch_collate.collate_int_fn,
    torch_collate.collate_float_fn,
)
"""Torch's own handlers of Python's numbers."""


def profiler_is_on() -> bool:
    """Whether any of torch's profilers runs, whichever thread started it; 50 ns.

    The flag that torch keeps for such checks. Its functions tell of the calling thread alone.
    """
    return torch_profiler._is_profiler_enabled


def all_threads_profiler_config() -> _ExperimentalConfig:
    """An `experimental_config` by which a profiler sees the threads that run already, too."""
    return _ExperimentalConfig(profile_all_threads=True)


no_torch_function: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunction
"""`with no_torch_function():` no torch function in the block passes through a mode or a subclass; 0.2 us.

What torch's own modes use (`torch.overrides` has no public name for it)."""


def resize_antialiased(
    pixels: NDArray[np.uint8], size: tuple[int, int], *, out: NDArray[np.uint8] | None = None
) -> NDArray[np.uint8]:
    """uint8[h, w, 3] to uint8[*size, 3], into `out` where it is given: bilinear, antialiased. All are contiguous.

    The kernel under `torch.nn.functional.interpolate`, without 20 us of Python around it.
    """
    # As [1, h, w, 3] permuted: of a permuted [h, w, 3] with a new dimension the strides are not those of
    # channels-last memory, and the kernel makes planes of its input and its output, in twice the time.
    image = torch.from_numpy(pixels.reshape(1, *pixels.shape).transpose(0, 3, 1, 2))
    if out is None:
        out = np.empty((*size, 3), np.uint8)
    into = torch.from_numpy(out.reshape(1, *out.shape).transpose(0, 3, 1, 2))
    torch._C._nn._upsample_bilinear2d_aa(image, size, False, out=into)  # type: ignore[call-arg]
    return out
