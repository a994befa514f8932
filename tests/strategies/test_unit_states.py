"""Parameters and gradients of a sharded unit: which states follow which, and what each holds."""

from __future__ import annotations

import pytest
import torch
from local_ranks import succeed
from torch import nn

from shardproof.comm import Comm, Mesh
from shardproof.impls.reference.engine.precision import Precision
from shardproof.impls.reference.parts.reducers import Reducer
from shardproof.impls.reference.units.gradients import Gradients, GradientState
from shardproof.impls.reference.units.parameters import Parameters, ParameterState
from shardproof.impls.reference.units.shard import FlatShard
from shardproof.impls.reference.units.states import IllegalTransition


def flat(comm: Comm | None) -> FlatShard:
    """Five elements in two tensors: over two ranks, shards of three with one of padding."""
    named = {"a": nn.Parameter(torch.arange(3.0)), "b": nn.Parameter(torch.arange(3.0, 5.0))}
    return FlatShard(named, comm, Precision())


def memory(parameters: Parameters) -> int:
    return parameters.whole.untyped_storage().nbytes()


def test_parameters_have_memory_only_between_gather_and_free() -> None:
    def body(rank: int, size: int) -> None:
        comm = Mesh({"shard": size}).comm("shard")
        held = flat(comm).parameters
        assert held.state is ParameterState.SHARDED and memory(held) == 0
        held.gather()
        assert held.state is ParameterState.GATHERING and held.is_whole
        held.gather()  # under way already: nothing more is sent
        held.wait()
        assert held.state is ParameterState.WHOLE
        assert held.whole.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 0.0]
        held.free(within=comm)
        assert held.state is ParameterState.CHUNKED and memory(held) == 0
        assert held.chunk is not None and held.chunk.tolist() == held.shard.tolist()
        held.gather(within=comm)
        held.free()  # waits for what is under way
        assert held.state is ParameterState.SHARDED and held.chunk is None
        held.free()
        assert held.state is ParameterState.SHARDED

    succeed(body, 2)


def test_a_chunk_is_dropped_by_a_free_that_keeps_none() -> None:
    def body(rank: int, size: int) -> None:
        comm = Mesh({"shard": size}).comm("shard")
        held = flat(comm).parameters
        held.gather()
        held.free(within=comm)
        held.free()
        assert held.state is ParameterState.SHARDED and held.chunk is None

    succeed(body, 2)


def test_parameters_refuse_what_their_state_does_not_allow() -> None:
    def body(rank: int, size: int) -> None:
        comm = Mesh({"shard": size}).comm("shard")
        held = flat(comm).parameters
        with pytest.raises(IllegalTransition, match=r"parameters are sharded.* become whole"):
            held.wait()
        with pytest.raises(IllegalTransition, match="must be chunked for a gather from chunks"):
            held.gather(within=comm)
        with pytest.raises(IllegalTransition, match="valid next states: gathering"):
            held.enter(ParameterState.CHUNKED)
        assert held.state is ParameterState.SHARDED

    succeed(body, 2)


def test_one_rank_keeps_its_parameters_whole() -> None:
    held = flat(None).parameters
    for act in (held.gather, held.wait, held.free):
        act()
        assert held.state is ParameterState.WHOLE and memory(held) == 5 * 4
    assert held.shard.data_ptr() == held.whole.data_ptr()


def test_gradients_of_two_rounds_on_two_ranks_and_of_a_rank_without_the_second() -> None:
    """Rank 1 has no second micro-batch: it reduces zeros, from *accumulated* on."""

    def body(rank: int, size: int) -> list[float]:
        held = flat(Mesh({"shard": size}).comm("shard"))
        gradients = held.gradients
        for number in range(2):
            if number == 0 or rank == 0:
                gradients.arrive("a", torch.ones(3))
                assert gradients.state is GradientState.ARRIVING
                gradients.arrive("b", torch.full((2,), 10.0))
                gradients.pack()
                assert gradients.state is GradientState.PACKED and not gradients.arrived
                assert gradients.filled == {"a", "b"}
            gradients.reduce(Reducer(), 0)
            assert gradients.state is GradientState.REDUCING and not gradients.filled
            gradients.wait_and_accumulate()
            assert gradients.state is GradientState.ACCUMULATED
            assert gradients.sending is None and gradients.packed is None
        gradients.finalize()
        assert gradients.total is not None
        total: list[float] = gradients.total.tolist()
        held.publish_gradients({"a": True, "b": False})
        assert [name for name, t in held.targets.items() if t.grad is not None] == ["a"] * (
            not rank
        )
        held.clear_gradients()
        assert gradients.state is GradientState.ABSENT and gradients.total is None
        assert all(target.grad is None for target in held.targets.values())
        return total

    assert succeed(body, 2) == [[3.0, 3.0, 3.0], [30.0, 30.0, 0.0]]


def test_replicas_are_summed_once_after_the_last_round() -> None:
    def body(rank: int, size: int) -> list[float]:
        gradients = flat(None).gradients
        replicas = Mesh({"replicate": size}).comm("replicate")
        for _ in range(2):
            gradients.arrive("a", torch.full((3,), rank + 1.0))
            gradients.pack()
            gradients.reduce(Reducer(), 0)
            gradients.wait_and_accumulate()
        gradients.reduce_over_replicas(replicas, Reducer(), 0)
        assert gradients.state is GradientState.OVER_REPLICAS
        with pytest.raises(IllegalTransition, match=r"summed over replicas.* become arriving"):
            gradients.arrive("a", torch.ones(3))
        with pytest.raises(IllegalTransition, match="valid next states: final"):
            gradients.reduce_over_replicas(replicas, Reducer(), 0)
        gradients.finalize()
        assert gradients.state is GradientState.FINAL and gradients.total is not None
        total: list[float] = gradients.total.tolist()
        return total

    assert succeed(body, 2) == [[6.0, 6.0, 6.0, 0.0, 0.0]] * 2


def test_a_second_gradient_of_one_parameter_is_added_to_the_first() -> None:
    gradients = flat(None).gradients
    for value in (1.0, 2.0, 4.0):
        gradients.arrive("a", torch.full((3,), value))
    gradients.pack()
    assert gradients.packed is not None and gradients.packed[:3].tolist() == [7.0] * 3


def test_a_unit_that_no_rank_has_called_ends_without_a_gradient() -> None:
    held = flat(None)
    held.gradients.finalize()
    held.publish_gradients({"a": False, "b": False})
    assert all(target.grad is None for target in held.targets.values())
    held.clear_gradients()
    held.clear_gradients()  # nothing left to clear


def arriving() -> Gradients:
    gradients = flat(None).gradients
    gradients.arrive("a", torch.ones(3))
    return gradients


def reducing() -> Gradients:
    gradients = arriving()
    gradients.pack()
    gradients.reduce(Reducer(), 0)
    return gradients


def test_gradients_refuse_what_their_state_does_not_allow() -> None:
    with pytest.raises(
        IllegalTransition, match=r"arriving.* become reducing; valid next states: arriv"
    ):
        arriving().reduce(Reducer(), 0)  # what has arrived would be lost
    with pytest.raises(IllegalTransition, match=r"reducing.* become arriving"):
        reducing().arrive("b", torch.ones(2))  # the reduce-scatter may not have read it yet
    with pytest.raises(IllegalTransition, match=r"reducing.* become final"):
        reducing().finalize()  # the last round would be missing
    with pytest.raises(IllegalTransition, match=r"absent.* become accumulated"):
        flat(None).gradients.wait_and_accumulate()
    with pytest.raises(IllegalTransition, match=r"reducing.* become absent"):
        reducing().clear()
    done = flat(None).gradients
    done.finalize()
    with pytest.raises(
        IllegalTransition, match=r"final.* become arriving; valid next states: absent"
    ):
        done.arrive("a", torch.ones(3))  # of a step before that was not cleared


@pytest.mark.parametrize("machine", [Parameters, Gradients])
def test_every_state_can_be_reached_and_left(machine: type[Parameters] | type[Gradients]) -> None:
    states: set[object] = set(ParameterState if machine is Parameters else GradientState)
    assert set(machine.following) == states
    assert {after for follow in machine.following.values() for after in follow} == states
