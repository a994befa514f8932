"""Communication backends: each is a ``torch.distributed`` one, so upstream systems run unchanged.

:data:`BACKENDS` has their properties.  Nothing here imports torch: ``joined.py`` does, for ranks.
"""

from __future__ import annotations

from shardproof.backends.backend import Backend as Backend
from shardproof.backends.backend import Joining as Joining
from shardproof.backends.backend import Takes as Takes
from shardproof.backends.gloo import Gloo
from shardproof.backends.gloo_cuda import GlooCuda
from shardproof.backends.in_memory import InMemory
from shardproof.backends.mpi import Mpi
from shardproof.backends.nccl import Nccl
from shardproof.backends.plugins import Backends
from shardproof.backends.torch_backend import TorchBackend as TorchBackend

BACKENDS = Backends(InMemory(), Gloo(), GlooCuda(), Nccl(), Mpi())
#: Where a case runs that names no backend, and where it runs if its ranks must be processes.
USUAL, USUAL_PROCESSES = InMemory.name, Gloo.name
