"""Torch's random functions on the CPU, routed to a generator of the calling thread, whatever calls them.

All of them, from `torch.rand` to dropout and compiled code, call a few dozen operators of torch's dispatcher. These
operators take a generator. `install` registers a kernel of ours for each of them, under a
dispatch key that nothing else uses. All other operators skip the key. Only a thread that has called `enter` looks at
the key. There our kernel calls the operator again, without the key and with the thread's own generator.

So this replaces no function of torch. Operators that do not draw cost nothing more, and other threads run none of it.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fastload._kit.torch_private import (
    dispatch_modes,
    is_default_generator,
    is_faking,
    no_torch_function,
    overload,
    register_kernels,
    seed_in_threads,
    takes_generator,
)

IN_PLACE = """
bernoulli_.Tensor bernoulli_.float cauchy_ exponential_ geometric_ log_normal_ normal_ random_ random_.from random_.to
uniform_
"""
"""Torch's operators that draw into their first argument on the CPU: those that take a generator and have a kernel."""

OTHERS = """
_sample_dirichlet _standard_gamma bernoulli.out binomial multinomial multinomial.out normal.Tensor_Tensor
normal.Tensor_Tensor_out normal.Tensor_float normal.Tensor_float_out normal.float_Tensor normal.float_Tensor_out poisson
randperm.generator_out rrelu_with_noise rrelu_with_noise.out rrelu_with_noise_
"""
"""Torch's operators that draw in another way."""

FACTORIES = """
rand rand.generator rand.out randn randn.generator randint randint.generator randint.generator_out randint.low
randint.low_generator randint.low_generator_out randint.low_out randint.out randperm randperm.generator randperm.out
"""
"""Torch's operators that create a tensor, or fill `out`, by one of the above.

A `TorchDispatchMode`, or a tensor class with `__torch_dispatch__`, sees operators without our key. So a call must have
its generator before it gets there. That is why these operators, and the next ones, have kernels too.
"""

COMPOSED = """
bernoulli bernoulli.Tensor bernoulli.p cauchy exponential geometric log_normal normal.float_float normal.float_float_out
normal_functional rand_like randn_like randint_like randint_like.Tensor randint_like.low_dtype random random.from
random.to rrelu_with_noise_functional uniform
"""
"""Operators that create a tensor from another by one of the above, and those that replace them in a traced graph."""

Own = Callable[[], torch.Generator | None]


class _Thread(threading.local):
    own: Own | None = None


_thread = _Thread()
# Owns `_show`, `_failure` and the code of torch's seeding functions until they are decided.
_lock = threading.Lock()
_show: Callable[[bool], None] | None = None  # see `register_kernels`
_failure: str | None = None
_installed = False  # whether nothing is left to do, so that a batch needs no lock


def install(seeded: Own | None = None) -> None:
    """Route the operators, for good. If they cannot be routed here, `unusable` says why.

    With `seeded`, torch's seeding functions act on the generator that it returns; see `seed_in_threads`.
    """
    global _show, _failure, _installed
    if _installed:
        return
    with _lock:  # a thread that comes second must not return before the first has done all of it
        if seeded is not None:
            seed_in_threads(seeded)
        if _show is None and _failure is None:
            try:
                _show = register_kernels(kernels())
                _failure = None if _works() else "a test at the start drew other numbers than torch"
            except Exception as error:
                _failure = f"torch {torch.__version__} has no place for it ({error!r})"
            if _failure is not None:
                _show = None
        _installed = seeded is not None


def unusable() -> str | None:
    """Return a clause that says why torch's functions are not routed after `install`, or None if they are."""
    return _failure


def enter(own: Own | None) -> None:
    """From now on, let torch draw from the generator that `own()` returns, in this thread.

    `own` is called for every draw. If it is None or returns None, torch draws from its global generator.
    """
    _thread.own = own
    if _show is not None:
        _show(own is not None)


def kernels() -> dict[str, Callable[..., Any]]:
    """Return a kernel for each of the operators above that this version of torch has, by name."""
    draws = {}
    for name in f"{IN_PLACE} {OTHERS} {FACTORIES} {COMPOSED}".split():
        operator, base = overload(name), name.partition(".")[0]
        if operator is not None and takes_generator(operator):
            draws[name] = _drawn(operator)
        elif operator is not None and overload(f"{base}.generator") is not None:
            draws[name] = _drawn(getattr(torch, base))  # which takes one, unlike this overload
    draws["native_dropout"] = _dropout(overload("native_dropout"))
    return {name: _kernel(draw) for name, draw in draws.items()}


def _kernel(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel that calls `draw` without our key. Torch-function modes and subclasses do not see its calls."""

    @functools.wraps(draw)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        show = _show
        assert show is not None
        show(False)
        try:
            with no_torch_function():
                return draw(*args, **kwargs)
        finally:
            show(True)

    return kernel


def _drawn(operator: Callable[..., Any]) -> Callable[..., Any]:
    def draw(*args: Any, generator: torch.Generator | None = None, **kwargs: Any) -> Any:
        if type(args[-1]) is torch.Generator:  # some operators take it by position
            *args, generator = args  # type: ignore[assignment]
        if _on_cpu(args, kwargs):
            generator = _chosen(generator)
        if generator is not None:  # this operator may be missing on other devices
            kwargs["generator"] = generator
        return operator(*args, **kwargs)

    return draw


def _dropout(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that does what `native_dropout` does, but with a generator."""

    def draw(tensor: torch.Tensor, p: float, train: bool | None) -> Any:
        draws = tensor.is_cpu and tensor.numel() > 0 and train is not False
        generator = _chosen(None) if draws else None
        if generator is None:
            return operator(tensor, p, train)
        kept = 1.0 - p
        mask = torch.empty_like(tensor, dtype=torch.bool).bernoulli_(kept, generator=generator)
        return tensor.mul(mask).mul_(1.0 / kept if kept else 0.0), mask

    return draw


def _on_cpu(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    if device is not None:
        return bool(device.type == "cpu")
    tensors = (*args, kwargs.get("out"))
    return all(a.is_cpu for a in tensors if isinstance(a, torch.Tensor))


def _chosen(given: torch.Generator | None) -> torch.Generator | None:
    """Return the thread's generator, unless the call has its own, or torch traces it without values."""
    own = _thread.own
    if own is None or not (given is None or is_default_generator(given)):
        return given
    if dispatch_modes() and is_faking():
        return given
    return own() or given


def _works() -> bool:
    """Return whether the routing works, tested on generators of our own."""
    was, seeded = _thread.own, torch.Generator().manual_seed(1)
    with no_torch_function():
        enter(lambda: seeded)
        try:
            drawn = _draws(None)
        finally:
            enter(was)
        expected = _draws(torch.Generator().manual_seed(1))
        return bool(dispatch_modes()) or torch.equal(drawn, expected)


def _draws(given: torch.Generator | None) -> torch.Tensor:
    """Return draws by an operator of each of the lists above."""
    halves = torch.full((9,), 0.5)
    drawn = [torch.rand(9, generator=given), halves.clone().normal_(generator=given)]
    drawn += [torch.randperm(9, generator=given), torch.multinomial(halves, 5, generator=given)]
    return torch.cat([*drawn, torch.bernoulli(halves, generator=given)])


os.register_at_fork(
    before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
)
