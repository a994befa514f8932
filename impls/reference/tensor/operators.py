"""The conjugate operators of tensor and sequence parallelism: a collective and its adjoint.

A collective inside of autograd must say what its gradient is.  Each operator here pairs one with
what the other direction needs; two operators are conjugate if one's forward is the other's
backward.

    operator         forward                           backward
    f                nothing                           all-reduce (sum)
    f_bar            all-reduce (sum)                  nothing
    g                all-gather along the sequence     reduce-scatter along the sequence
    g_bar            reduce-scatter, same              all-gather, same
    gather_classes   all-gather along the last dim.    this rank's part

``f`` stands where a replicated tensor enters layers that are split: each rank computes one part of
its gradient.  ``f_bar`` stands where they end: each rank has one term of a sum.  Megatron-LM, arXiv
1909.08053, section 3 (there ``f_bar`` is called ``g``); the names are those of arXiv 2205.05198,
section 4.2.2, whose sequence parallelism replaces them by ``g`` and ``g_bar``: between split layers
each rank keeps some positions only.  ``gather_classes`` ends in a tensor of which all ranks compute
the same loss, so that every rank has its whole gradient already.

Sequences lie in dimension 1 (samples, positions, ...), padded with zeros so that all ranks have as
many positions: ``g`` gives the padding back, and nothing that counts may depend on it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardproof.comm import Comm


def share(size: int, ranks: int) -> int:
    """The largest of ``ranks`` contiguous parts of ``size``: each has this many, the last ones
    fewer or none.
    """
    return -(-size // ranks)


def all_reduce(tensor: Tensor, comm: Comm) -> Tensor:
    """A new tensor: the sum of ``tensor`` over the ranks."""
    # Not in place: autograd may have saved `tensor`, or hand the same gradient to another node.
    total = tensor.clone(memory_format=torch.contiguous_format)
    comm.all_reduce(total)
    return total


def all_gather(tensor: Tensor, comm: Comm, dim: int) -> Tensor:
    """The ranks' tensors of one shape, concatenated along ``dim``."""
    first = tensor.movedim(dim, 0).contiguous()
    whole = first.new_empty(comm.size * first.shape[0], *first.shape[1:])
    comm.all_gather(whole, first)
    return whole.movedim(0, dim)


def reduce_scatter(tensor: Tensor, comm: Comm, dim: int) -> Tensor:
    """This rank's part along ``dim`` of the sum over ranks, padded with zeros to equal parts."""
    first = tensor.movedim(dim, 0)
    size = share(first.shape[0], comm.size)
    missing = size * comm.size - first.shape[0]
    # Collectives send equal parts.
    if missing:
        first = torch.cat([first, first.new_zeros(missing, *first.shape[1:])])
    part = first.new_empty(size, *first.shape[1:])
    comm.reduce_scatter(part, first.contiguous())
    return part.movedim(0, dim)


class _F(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, comm: Comm) -> Tensor:
        ctx.comm = comm
        # A view, for autograd takes an input that is returned as it is for no operation at all.
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradients[0], ctx.comm), None


class _FBar(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, comm: Comm) -> Tensor:
        return all_reduce(tensor, comm)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _G(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, comm: Comm) -> Tensor:
        ctx.comm = comm
        # A linear layer rounds twice where its input is strided: product and bias by themselves.
        return all_gather(tensor, comm, dim=1).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(gradients[0], ctx.comm, dim=1), None


class _GBar(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, comm: Comm) -> Tensor:
        # The length as it was: the padding that is gathered in backward has no gradient.
        ctx.comm, ctx.length = comm, tensor.shape[1]
        return reduce_scatter(tensor, comm, dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return all_gather(gradients[0], ctx.comm, dim=1).narrow(1, 0, ctx.length), None


class _GatherClasses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, comm: Comm, classes: int) -> Tensor:
        ctx.start, ctx.own = comm.rank * share(classes, comm.size), tensor.shape[-1]
        equal = F.pad(tensor, (0, share(classes, comm.size) - ctx.own))
        return all_gather(equal, comm, dim=-1)[..., :classes].contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0].narrow(-1, ctx.start, ctx.own), None, None


def f(tensor: Tensor, comm: Comm) -> Tensor:
    """``tensor`` unchanged; its gradient is summed over the ranks."""
    result: Tensor = _F.apply(tensor, comm)
    return result


def f_bar(tensor: Tensor, comm: Comm) -> Tensor:
    """The sum of ``tensor`` over the ranks; its gradient, equal on all ranks, goes to every
    term.
    """
    result: Tensor = _FBar.apply(tensor, comm)
    return result


def g(tensor: Tensor, comm: Comm) -> Tensor:
    """``(samples, share, ...)`` of each rank -> ``(samples, ranks * share, ...)``, the whole
    sequence; the parts of its gradient are summed and scattered.
    """
    result: Tensor = _G.apply(tensor, comm)
    return result


def g_bar(tensor: Tensor, comm: Comm) -> Tensor:
    """Terms ``(samples, positions, ...)`` -> this rank's positions ``(samples, share, ...)`` of
    their sum; the gradient of the whole sequence goes to every term.
    """
    result: Tensor = _GBar.apply(tensor, comm)
    return result


def gather_classes(tensor: Tensor, comm: Comm, classes: int) -> Tensor:
    """``(..., own classes)`` -> ``(..., classes)``; uneven parts are padded in transit."""
    result: Tensor = _GatherClasses.apply(tensor, comm, classes)
    return result
