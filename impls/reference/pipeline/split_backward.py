"""Backward in two parts: the gradient of a stage's input now, those of its weights later.

Problem.  The stage before waits for the gradient of its output; only the optimizer waits for those
of the weights.  Computed apart, the second can fill what would be a bubble (Qi et al., arXiv
2401.10241, section 2).

    forward    a module that owns weights runs on its input, cut from the graph: a small graph of
               its own, and one link in the large graph that remains
    B          backward through the large graph; a link asks its small graph for the gradient of
               its input only, and queues it with the gradient of its output
    W          one backward through all queued small graphs, for the gradients of weights only

Forwards are wrapped, not modules: names, parameters and hooks stay.  All small graphs of a
micro-batch go backward together, so a weight that is used twice gets one sum, and its hooks run
once, as in an ordinary backward.

Numbers: the same operations on the same values, hence the same bits as one backward; a module that
owns weights and uses its input several times adds up these uses first.
Cost: what the small graphs have saved, and the gradients of their outputs, are held from B to W; no
operation runs twice in a module that is one operation.
Left out: modules with weights of their own that return anything but one tensor, or get tensors in
containers.  Weights that another module than their owner uses get that gradient in B.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge


class Deferred:
    """The small graphs of one micro-batch, created by its B and freed by its W."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.weights = weights
        self.outputs: list[GradientEdge] = []
        self.gradients: list[Tensor] = []
        #: Makes what is cut part of a graph even where no input needs a gradient.
        self.anchor = torch.zeros((), requires_grad=True)

    def backward(self) -> None:
        """W: accumulate the gradients of the weights and free the small graphs."""
        # Taken out first: a graph lives as long as somebody holds an edge of it.
        outputs, gradients = self.outputs, self.gradients
        self.outputs, self.gradients = [], []
        if outputs:
            torch.autograd.backward(outputs, gradients, inputs=list(self.weights))


class SplitBackward:
    """Wrap the modules of ``module`` that own weights; see :meth:`deferring`."""

    def __init__(self, module: nn.Module) -> None:
        self.owners = list(dict.fromkeys(_owners(module)))
        parts = [part for owner in self.owners for part in owner.modules()]
        weights = [w for part in parts for w in own_weights(part) if w.requires_grad]
        self.weights = list({id(weight): weight for weight in weights}.values())
        self.deferred: Deferred | None = None
        #: Per owner the forward that was set on the module itself, if it was not its class's.
        self.own: list[Callable[..., Any] | None] = []
        for owner in self.owners:
            self.own.append(vars(owner).get("forward"))
            owner.forward = partial(self.forward, type(owner).__name__, owner.forward)

    @contextmanager
    def deferring(self) -> Iterator[Deferred]:
        """Run a forward whose backward comes in two parts."""
        deferred = self.deferred = Deferred(self.weights)
        try:
            yield deferred
        finally:
            self.deferred = None

    def forward(self, kind: str, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Forward of an owner of class ``kind``, whose original forward is ``compute``."""
        if self.deferred is None or not torch.is_grad_enabled():
            return compute(*args, **kwargs)
        # By identity: an input that is given twice must be cut once, for its gradients add up.
        given = {id(v): v for v in (*args, *kwargs.values()) if _differentiable(v)}
        anchor = self.deferred.anchor
        inner = {key: _Cut.apply(None, tensor.detach(), anchor) for key, tensor in given.items()}
        output = compute(
            *(inner.get(id(value), value) for value in args),
            **{name: inner.get(id(value), value) for name, value in kwargs.items()},
        )
        if not isinstance(output, Tensor):
            raise TypeError(
                f"module {kind} has weights and returns {type(output).__name__}, but a split "
                "backward needs such modules to return a tensor; choose a schedule that does not "
                "split the backward (gpipe, 1f1b, interleaved)"
            )
        if not output.requires_grad:
            return output
        inputs = [get_gradient_edge(tensor) for tensor in inner.values()]
        link = _Link(self.deferred, get_gradient_edge(output), inputs)
        return _Cut.apply(link, output.detach(), anchor, *given.values())

    def close(self) -> None:
        """Restore the forwards of the owners."""
        while self.own:
            own, owner = self.own.pop(), self.owners[len(self.own)]
            if own is None:
                del owner.forward
            else:
                owner.forward = own


class _Link:
    """Both ends of a small graph. Their values are not kept, because they may not be needed."""

    def __init__(
        self, deferred: Deferred, output: GradientEdge, inputs: list[GradientEdge]
    ) -> None:
        self.deferred, self.output, self.inputs = deferred, output, inputs

    def input_gradients(self, gradient: Tensor) -> Sequence[Tensor | None]:
        """B: gradients of the inputs; those of the weights come later."""
        self.deferred.outputs.append(self.output)
        self.deferred.gradients.append(gradient)
        if not self.inputs:
            return ()
        # Retained: W goes through the same small graph, for the weights.
        return torch.autograd.grad(
            (self.output,), self.inputs, (gradient,), retain_graph=True, allow_unused=True
        )


class _Cut(torch.autograd.Function):
    """Values of one graph that enter another: the large one (``link``: its backward runs the small
    one), or a small one, where backward ends (``None``).
    """

    @staticmethod
    def forward(ctx: Any, link: _Link | None, values: Tensor, *inputs: Tensor) -> Tensor:
        ctx.link = link
        return values.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.link is None:
            return None, None, None
        return None, None, None, *ctx.link.input_gradients(gradient)


def own_weights(module: nn.Module) -> list[nn.Parameter]:
    """Parameters that ``module`` owns directly, including unregistered ones."""
    bound = [value for value in vars(module).values() if isinstance(value, nn.Parameter)]
    return [*module.parameters(recurse=False), *bound]


def _owners(module: nn.Module) -> list[nn.Module]:
    """The outermost modules that own trained weights."""
    if any(weight.requires_grad for weight in own_weights(module)):
        return [module]
    return [owner for child in module.children() for owner in _owners(child)]


def _differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
