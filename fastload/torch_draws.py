"""Which functions of torch draw random numbers, and how each draws from a stream instead of the global generator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional


class KeyedStream(Protocol):
    """What a function draws from: see `randomness.Stream`."""

    def generator(self) -> torch.Generator:
        """Return torch's generator for the sample."""

    def called_unkeyed(self, func: Any, *, drew: bool) -> None:
        """Notice a call of a function that takes no generator, and whether it drew from the global one."""


def _keyed(stream: KeyedStream, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a function that takes a generator with the stream's, unless it has one or acts on another device."""
    for a in args:
        if type(a) is torch.Generator or (isinstance(a, torch.Tensor) and not a.is_cpu):
            return func(*args, **kwargs)
    if kwargs and not (_takes_ours(kwargs) and _on_cpu((), kwargs)):
        return func(*args, **kwargs)
    return func(*args, **{**kwargs, "generator": stream.generator()})


def _takes_ours(kwargs: dict[str, Any]) -> bool:
    """Return whether a call is given no generator, or torch's default one, which the stream's replaces."""
    given = kwargs.get("generator")
    return given is None or given is torch.default_generator


def _like(fill: str) -> Callable[..., Any]:
    """Return how to call `rand_like` and its kin: only the latest torch gives them a `generator` argument."""

    def draw(stream: KeyedStream, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if not _takes_ours(kwargs) or not _on_cpu(args, kwargs):
            return func(*args, **kwargs)
        bounds = [kwargs[name] for name in ("low", "high") if name in kwargs]
        options = {
            k: v for k, v in kwargs.items() if k not in ("generator", "input", "low", "high")
        }
        given: list[Any] = [*args, kwargs["input"]] if "input" in kwargs else [*args]
        like, *rest = given
        out = torch.empty_like(like, **options).detach()
        limits = [*rest, *bounds]
        if fill == "random_" and len(limits) == 1:
            limits.insert(0, 0)
        getattr(out, fill)(*limits, generator=stream.generator())
        return out.requires_grad_(bool(kwargs.get("requires_grad")))

    return draw


def _unkeyed(stream: KeyedStream, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a function that takes no generator, and tell the stream if it drew from the global one."""
    before = torch.default_generator.get_state()
    out = func(*args, **kwargs)
    drew = not torch.equal(before, torch.default_generator.get_state())
    stream.called_unkeyed(func, drew=drew)
    return out


def _on_cpu(args: Any, kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    if device is not None:
        return torch.device(device).type == "cpu"
    return all(a.is_cpu for a in args if isinstance(a, torch.Tensor))


def _named(owner: Any, names: str) -> list[Any]:
    return [getattr(owner, name) for name in names.split()]


KEYED = [
    *_named(torch, "bernoulli binomial multinomial normal poisson rand randint randn randperm"),
    *_named(torch, "rrelu rrelu_ _sample_dirichlet _standard_gamma"),
    *_named(torch.Tensor, "bernoulli bernoulli_ cauchy_ exponential_ geometric_ log_normal_"),
    *_named(torch.Tensor, "multinomial normal_ random_ uniform_"),
    *_named(nn.init, "kaiming_normal_ kaiming_uniform_ normal_ orthogonal_ sparse_ trunc_normal_"),
    *_named(nn.init, "uniform_ xavier_normal_ xavier_uniform_"),
]
"""Functions of torch that draw and take a generator."""

LIKE = {torch.rand_like: "uniform_", torch.randn_like: "normal_", torch.randint_like: "random_"}
"""Functions that draw as the method named here does, on a tensor like their argument."""

UNKEYED = [
    *_named(torch, "alpha_dropout alpha_dropout_ dropout dropout_ feature_alpha_dropout"),
    *_named(torch, "feature_alpha_dropout_ feature_dropout feature_dropout_ native_dropout"),
    *_named(functional, "alpha_dropout dropout dropout1d dropout2d dropout3d"),
    *_named(functional, "feature_alpha_dropout fractional_max_pool2d fractional_max_pool3d"),
    *_named(functional, "fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices"),
    *_named(functional, "gumbel_softmax multi_head_attention_forward rrelu"),
    *_named(functional, "scaled_dot_product_attention"),
]
"""Functions of torch that may draw and take no generator: noticed when they do."""

DRAWS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(KEYED, _keyed),
    **{func: _like(fill) for func, fill in LIKE.items()},
    **dict.fromkeys(UNKEYED, _unkeyed),
}
"""How to call each of these in a stream: `draw(stream, func, args, kwargs)`."""
