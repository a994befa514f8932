"""The common part of adapters for torch's tensor parallelism: styles by module, shards as pieces.

    module                        style of torch                 under sequence parallelism
    token embedding               ``RowwiseParallel``            its output cut on the sequence
    qkv, up, head                 ``ColwiseParallel``            gathers its input first
    attention's out, down         ``RowwiseParallel``            reduces and scatters its output
    norms                         whole (:class:`Replicated`)    ``SequenceParallel``
    position embedding            whole                          whole; each rank its positions
    any other with parameters     plain tensors, no style        ``PrepareModuleInputOutput``: the
                                                                 whole sequence, cut again behind it

``ColwiseParallel`` gives rank r the r-th chunk of rows.  A fused QKV projection has all queries,
all keys, all values: its rows are put in another order first (:func:`rows_by_rank`), so that a
chunk is the queries, keys and values of the rank's own heads.  What a rank holds of it is therefore
three blocks of the true tensor.

torch gives every module new parameters, so a tied weight is two afterwards; they are tied again.
Not a strategy by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from shardproof.contract import Piece, Refused

#: Below a unit: what is split by rows of the weight, what by columns, and what stays whole.
COLUMNS = ("attention.qkv", "mlp.up", "up")
ROWS = ("attention.out", "mlp.down", "down")
NORMS = ("norm1", "norm2")
#: What has two arguments: the second one, a number a sample, is whole on every rank.
WITH_FLAGS = "front"
#: Batch first, then the sequence.
SEQUENCE = Shard(1)


class Replicated(ParallelStyle):
    """Parameters as DTensors that are whole on every rank; inputs and outputs are plain tensors.

    torch leaves this style to its users.  ``cut`` is the dimension of the input along which ranks
    share the work (``None``: every rank does all of it).  Gradients of the parameters are then
    sums that are still to be reduced.
    """

    def __init__(self, cut: int | None = None) -> None:
        super().__init__()
        self.layout = (Replicate() if cut is None else Shard(cut),)

    def enter(self, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> DTensor:
        """The input, equal on all ranks, in the layout that the module computes with."""
        whole = DTensor.from_local(inputs[0], mesh, (Replicate(),), run_check=False)
        return whole.redistribute(placements=self.layout)

    def leave(self, module: nn.Module, outputs: DTensor, mesh: DeviceMesh) -> Tensor:
        """This rank's part of the output."""
        return outputs.to_local()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        enter: Any = self.enter  # torch declares hooks that return nothing
        leave: Any = self.leave
        return distribute_module(module, device_mesh, None, enter, leave)


def plan_styles(
    module: nn.Module, units: Iterable[str], sequence: bool, split_outputs: bool
) -> dict[str, ParallelStyle]:
    """Dotted name -> style, for ``module`` or a part of one (a pipeline's stage).

    ``sequence``: between the split layers each rank has its positions only.  ``split_outputs``: the
    head's outputs stay a DTensor, cut on the classes.
    """
    hidden = SEQUENCE if sequence else Replicate()
    norm: Any = SequenceParallel if sequence else Replicated
    local = {"use_local_output": True} if sequence else {}
    styles: dict[str, ParallelStyle] = {
        "embed.token": RowwiseParallel(input_layouts=Replicate(), output_layouts=hidden),
        "embed.position": Replicated(0 if sequence else None),
        "norm": norm(**local),
        "head": ColwiseParallel(
            input_layouts=hidden,
            output_layouts=Shard(-1) if split_outputs else Replicate(),
            use_local_output=not split_outputs,
        ),
    }
    for unit in units:
        styles |= {f"{unit}.{name}": ColwiseParallel(input_layouts=hidden) for name in COLUMNS}
        styles |= {f"{unit}.{name}": RowwiseParallel(output_layouts=hidden) for name in ROWS}
        styles |= {f"{unit}.{name}": norm(**local) for name in NORMS}
    owners = {name for name, part in module.named_modules() if holds(part)}
    styles = {name: style for name, style in styles.items() if name in owners}
    if sequence:
        styles |= {name: _on_whole_sequence(name) for name in outsiders(module, styles)}
    return styles


def require_split_layers(module: nn.Module, styles: Mapping[str, ParallelStyle]) -> None:
    """:class:`Refused` for a model without the layers whose names :func:`plan_styles` knows."""
    if lacking := {"embed.token", "embed.position", "head"} - set(styles):
        raise Refused(
            "tensor parallelism splits only layers with fixed names, but this "
            f"{type(module).__name__} has no {', '.join(sorted(lacking))}; for layers with other "
            "names choose pytorch/tensor_plan with a plan, or reference/tensor with "
            "roles={NAME: 'column', ...}"
        )


def _on_whole_sequence(name: str) -> ParallelStyle:
    more: tuple[None, ...] = (None,) if name == WITH_FLAGS else ()
    return PrepareModuleInputOutput(
        input_layouts=(SEQUENCE, *more),
        desired_input_layouts=(Replicate(), *more),
        use_local_input=True,
        output_layouts=Replicate(),
        desired_output_layouts=SEQUENCE,
    )


def holds(module: nn.Module) -> bool:
    """Whether ``module`` contains any parameter or buffer."""
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())


def outsiders(module: nn.Module, named: Iterable[str]) -> list[str]:
    """The outermost modules with parameters or buffers that neither are nor contain one in
    ``named``.
    """
    inside = set(named)
    around = {name[:at] for name in inside for at, sign in enumerate(name) if sign == "."} | {""}
    return [
        name
        for name, part in module.named_modules()
        if name not in around | inside and name.rpartition(".")[0] in around and holds(part)
    ]


# ------------------------------------------------------------------------------------ application


def apply_styles(
    module: nn.Module, styles: Mapping[str, ParallelStyle], mesh: DeviceMesh
) -> dict[str, list[int]]:
    """Put ``module`` under ``styles`` over the 1-D ``mesh``; keep ties and frozen parameters.

    Gives, by name, the order of rows in which fused projections are kept.
    Raises :class:`Refused` for sizes that torch would cut in the wrong place.
    """
    check_sizes(module, styles, mesh.size())
    orders = reorder_fused(module, styles, mesh.size())
    parallelize(module, styles, mesh)
    return orders


def parallelize(module: nn.Module, plan: Mapping[str, ParallelStyle], mesh: DeviceMesh) -> None:
    """``parallelize_module`` that keeps ties and frozen parameters."""
    tied = _ties(module)
    frozen = {name for name, p in module.named_parameters() if not p.requires_grad}
    parallelize_module(module, mesh, dict(plan))
    for first, others in tied.items():
        for other in others:
            path, _, leaf = other.rpartition(".")
            module.get_submodule(path).register_parameter(leaf, module.get_parameter(first))
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in frozen)


def _ties(module: nn.Module) -> dict[str, list[str]]:
    """First name -> further names of every parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {first: others for first, *others in names.values() if others}


def check_sizes(module: nn.Module, styles: Mapping[str, ParallelStyle], ranks: int) -> None:
    """Raise :class:`Refused` if heads or hidden rows do not divide by ``ranks``.

    Between a split by rows and one by columns torch hands on plain tensors, of which
    ``DTensor.from_local`` takes all ranks' for equally long.
    """
    for name, style in styles.items():
        layer = module.get_submodule(name)
        if not isinstance(layer, nn.Linear) or name == "head":
            continue
        by_rows = isinstance(style, ColwiseParallel)
        count = layer.out_features if by_rows else layer.in_features
        what = "rows" if by_rows else "columns"
        attention = module.get_submodule(name.rpartition(".")[0])
        if hasattr(attention, "head_size") and by_rows:
            count, what = kv_heads(attention), "heads of keys and values"
        if count % ranks:
            raise Refused(
                f"{name!r} has {count} {what}, which cannot be divided among the {ranks} ranks of "
                "the axis 'tensor': ColwiseParallel and RowwiseParallel need equal parts; choose "
                f"a size of the axis that divides {count}"
            )


def kv_heads(attention: Any) -> int:
    """The number of heads of keys and values, from the rows of the fused projection."""
    return int(attention.qkv.out_features // attention.head_size // (attention.group + 2))


def rows_by_rank(attention: Any, ranks: int) -> list[int]:
    """Numbers of the rows of ``qkv`` in an order in which equal chunks contain whole heads."""
    keys = kv_heads(attention) * attention.head_size
    parts = torch.arange(attention.qkv.out_features).split([keys * attention.group, keys, keys])
    chunks = [part.chunk(ranks) for part in parts]
    return torch.cat([chunk[rank] for rank in range(ranks) for chunk in chunks]).tolist()


@torch.no_grad()
def reorder_fused(module: nn.Module, styles: Iterable[str], ranks: int) -> dict[str, list[int]]:
    """Reorder the rows of fused projections among ``styles``; return the order by parameter."""
    orders = {}
    for name in styles:
        path = name.rpartition(".")[0]
        if hasattr(module.get_submodule(path), "head_size") and name.endswith(".qkv"):
            order = rows_by_rank(module.get_submodule(path), ranks)
            for leaf, parameter in module.get_submodule(name).named_parameters():
                parameter.copy_(parameter[order])
                orders[f"{name}.{leaf}"] = order
    return orders


# ----------------------------------------------------------------------------------------- pieces


def settle_gradient(parameter: Tensor) -> None:
    """Lay the gradient of ``parameter`` out like the parameter: reduce partial sums, cut whole
    ones.

    torch leaves sums over positions that a rank did not see (norms under ``SequenceParallel``) as
    ``Partial`` and, of an embedding split by rows, gives every rank the whole gradient.
    """
    gradient = parameter.grad
    if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
        return
    if gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(placements=parameter.placements)


def dtensor_pieces(
    name: str, tensor: DTensor, order: Sequence[int] | None, replica: int
) -> list[Piece]:
    """This rank's part of ``tensor``: one block, or the runs of a fused projection's rows.

    ``order``: the rows of the true tensor in the order in which they are kept.
    Tensors of pieces are views.
    """
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise ValueError(
            f"{name!r} is a partial sum ({tensor.placements}); redistribute it before you save it"
        )
    local = tensor.to_local().detach()
    return block_pieces(name, tuple(tensor.shape), local, held_spans(tensor), order, replica)


def block_pieces(
    name: str,
    shape: tuple[int, ...],
    local: Tensor,
    spans: Sequence[tuple[int, int]],
    order: Sequence[int] | None,
    replica: int,
) -> list[Piece]:
    """``local``, the block ``spans`` of a tensor of ``shape``, whose rows are stored in
    ``order``.
    """
    if order is None:
        return [Piece(name, shape, local, slices=tuple(spans), replica=replica)]
    (first, last), *rest = spans
    return [
        Piece(name, shape, local[at : at + n], slices=((row, row + n), *rest), replica=replica)
        for at, row, n in runs(order[first:last])
    ]


def chunk_pieces(
    name: str, local: Tensor, dim: int, rank: int, ranks: int, order: Sequence[int] | None
) -> list[Piece]:
    """``local``, the ``rank``-th of equal chunks along ``dim``; ``order`` as in
    :func:`block_pieces`.
    """
    shape, spans = list(local.shape), [(0, size) for size in local.shape]
    spans[dim] = (shape[dim] * rank, shape[dim] * (rank + 1))
    shape[dim] *= ranks
    return block_pieces(name, tuple(shape), local, spans, order, replica=0)


def held_spans(tensor: DTensor) -> tuple[tuple[int, int], ...]:
    """``(start, stop)`` of this rank's block along every dimension of ``tensor``.

    A split factor means that the axes to the right were cut first: FSDP cuts what tensor
    parallelism left.  torch's own figures undo that order, and are a row off where neither divides.
    """
    mesh, spans = tensor.device_mesh, [(0, size) for size in tensor.shape]
    cuts = [(axis, p) for axis, p in enumerate(tensor.placements) if hasattr(p, "dim")]
    for axis, placement in sorted(cuts, key=lambda cut: getattr(cut[1], "split_factor", 1)):
        start, stop = spans[placement.dim]
        chunk = -(-(stop - start) // mesh.size(axis))
        first = min(start + chunk * mesh.get_local_rank(axis), stop)
        spans[placement.dim] = (first, min(first + chunk, stop))
    return tuple(spans)


def runs(rows: Sequence[int]) -> list[tuple[int, int, int]]:
    """``(place, first row, rows)`` of every stretch of consecutive numbers in ``rows``."""
    starts = [at for at, row in enumerate(rows) if not at or row != rows[at - 1] + 1]
    ends = [*starts[1:], len(rows)]
    return [(at, rows[at], end - at) for at, end in zip(starts, ends, strict=False)]


def copy_number(tensor: DTensor) -> int:
    """The number of this rank's copy, over the axes along which ranks hold the same part."""
    number, mesh = 0, tensor.device_mesh
    for dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            number = number * mesh.size(dim) + mesh.get_local_rank(dim)
    return number
