"""The strategies of PyTorch's own systems: the textbook strategy of each, and the differences.

Cost models lie in ``costs/``; the path of one is imported when its bytes are first compared.
"""

from shardproof.strategies import SHARDED, TEXTBOOK

_COSTS = "shardproof.impls.pytorch.costs"
_OF_DDP = ("accumulation_without_communication", "buffer_broadcast", "overlap")

_fsdp = TEXTBOOK["fsdp"]

STRATEGIES = (
    TEXTBOOK["local_sgd"].by_system("post_local_sgd", f"{_COSTS}.replicated:PostLocalSGD"),
    # Calls of PyTorch's FSDP are made one after the other, on streams: in program order nothing
    # overlaps.
    _fsdp.by_system("fsdp1", f"{_COSTS}.sharded:FSDP1", less=("overlap",)),
    _fsdp.by_system("fsdp2", f"{_COSTS}.sharded:FSDP2", less=("overlap",)),
    TEXTBOOK["zero1"].by_system(
        "zero_redundancy_optimizer", f"{_COSTS}.replicated:ZeroRedundancyOptimizer", more=_OF_DDP
    ),
    # Stages of upstream systems have nothing in common that could be broadcast.
    TEXTBOOK["pipeline"].by_system(
        "torch_pipelining", f"{_COSTS}.pipelining:TorchPipelining", less=("initial_broadcast",)
    ),
    TEXTBOOK["tensor"].by_system("torch_tensor_parallel", f"{_COSTS}.tensor:TorchTensorParallel"),
    TEXTBOOK["context"].by_system("torch_context", f"{_COSTS}.context:TorchContext"),
    TEXTBOOK["hybrid"].by_system("torch_hybrid", f"{_COSTS}.hybrid:TorchHybrid", more=SHARDED),
)
