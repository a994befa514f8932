"""DeepSpeed ZeRO-1: an engine that owns backward and update, in fp32, with state in its modules.

What is new for the contract: processes only, float32 only; optimizer state lives in flat partitions
whose fragments of a parameter are ranges of its flattened elements; gradients are final on their
owner only; clipping and update are one call, group by group, so that the clipped gradients are
caught by a hook and ``after_clip`` is told when the last group's are known.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import deepspeed
import torch
from torch import Tensor

from impls.reference.parts.optimizer import build_optimizer, param_groups, set_learning_rate
from impls.reference.parts.state import load_state
from suite.comm import Mesh
from suite.contract import (
    Batch,
    Build,
    Capabilities,
    Implementation,
    Kind,
    Observe,
    OptimizerSpec,
    Piece,
    Refused,
    StepResult,
)

# Compiles a shared-memory extension at the first use of its backend, for half a minute.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None


class DeepSpeedZero1(Implementation):
    """Option ``bucket`` (elements) cuts the reduction into pieces."""

    strategy = "deepspeed_zero1"

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        """fp32 on process backends."""
        if set(options) - {"bucket"}:
            raise Refused(f"options are 'bucket', not {sorted(options)}")
        return Capabilities(
            dtypes=("float32",),
            backends=("gloo", "mpi"),
            features=frozenset({"clipping", "accumulation", "initial_broadcast"})
            | {"sharded_optimizer"},
            buffers="per_rank",
        )

    def setup(
        self,
        build: Build,
        state: Mapping[str, Tensor] | None,
        optimizer: OptimizerSpec,
        mesh: Mesh,
        options: Mapping[str, Any],
    ) -> None:
        """The engine over all ranks; it broadcasts rank 0's parameters itself."""
        self.build, self.spec, self.comm = build, optimizer, mesh.comm("replicate")
        module = build(mesh.device)
        if state is not None:
            load_state(module, state)
        self.names = {n: p for n, p in module.named_parameters() if p.requires_grad}
        groups = [
            {**group, "params": [parameter for _, parameter in group["params"]]}
            for group in param_groups(optimizer, self.names)
        ]
        self.optimizer = build_optimizer(optimizer, groups)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": optimizer.clip_norm or 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": 1,
                "reduce_bucket_size": int(options.get("bucket", 500_000_000)),
            },
        }
        os.environ.setdefault("LOCAL_RANK", "0")  # asked for, though there are no devices
        deepspeed.init_distributed(
            dist_backend="gloo", auto_mpi_discovery=False, dist_init_required=False, verbose=False
        )
        self.engine, *_ = deepspeed.initialize(
            model=module, optimizer=self.optimizer, config=config, dist_init_required=False
        )
        self.zero = self.engine.optimizer
        self.clipped: dict[int, Tensor] = {}
        self.observe: Observe | None = None
        self.optimizer.register_step_pre_hook(self._before_update)

    def step(self, batch: Batch, observe: Observe) -> StepResult:
        """Backward through the engine; its step clips and updates."""
        total = torch.zeros(())
        micro_batches = batch.micro_batches
        for number, micro in enumerate(micro_batches):
            self.engine.set_gradient_accumulation_boundary(number == len(micro_batches) - 1)
            loss = self.build.loss(self.engine(micro.inputs), micro)
            self.engine.backward(loss * self.comm.size)  # the engine divides by it
            total = total + loss.detach()
        self.clipped = {}
        self.stage = "final"
        observe("gradients_final")
        self.observe = observe if self.spec.clip_norm is not None else None
        set_learning_rate(self.optimizer, self.spec, batch.step)
        self.stage = "clipped"
        self.engine.step()
        observe("after_update")
        norm = self.zero._global_grad_norm if self.spec.clip_norm is not None else None
        return StepResult(total, norm if norm is None else torch.as_tensor(float(norm)))

    def _before_update(self, *_: Any) -> None:
        """Called once a parameter group; its flat gradient has been clipped by then."""
        flats = self.zero.single_partition_of_fp32_groups
        for number, flat in enumerate(flats):
            if flat.grad is not None:
                self.clipped[number] = flat.grad.detach().clone()
        if self.observe is not None and len(self.clipped) == len(flats):
            observe, self.observe = self.observe, None
            observe("after_clip")

    def local_state(self, kind: Kind) -> list[Piece]:
        """Whole parameters on every rank; fragments of gradients and optimizer state."""
        module, rank = self.engine.module, self.comm.rank
        if kind == "parameters":
            found = module.named_parameters()
            return [Piece.whole(n, p.detach(), replica=rank) for n, p in found]
        if kind == "buffers":
            return [Piece.whole(n, b.detach(), replica=rank) for n, b in module.named_buffers()]
        return list(self._gradients() if kind == "gradients" else self._slots())

    def _fragments(self) -> Iterator[tuple[int, str, Any]]:
        for name, parameter in self.names.items():
            if parameter._hp_mapping is not None:
                yield parameter._hp_mapping.param_group_index, name, parameter._hp_mapping

    def _piece(self, name: str, of: str, flat: Tensor, mapping: Any) -> Piece:
        """The fragment of parameter ``of`` that lies in this rank's flat partition."""
        here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
        return Piece(
            name,
            tuple(self.names[of].shape),
            flat.narrow(0, here.start, here.numel),
            flat_range=(there.start, there.start + there.numel),
        )

    def _gradients(self) -> Iterator[Piece]:
        for group, name, mapping in self._fragments():
            flat = self.clipped.get(group)
            if flat is None:
                parts = self.zero.averaged_gradients[group]
                flat = torch.cat([part.reshape(-1) for part in parts])
            yield self._piece(name, name, flat, mapping)

    def _slots(self) -> Iterator[Piece]:
        for group, name, mapping in self._fragments():
            flat = self.zero.single_partition_of_fp32_groups[group]
            for slot, value in self.optimizer.state[flat].items():
                if value.dim() == 0:
                    yield Piece.whole(f"{name}.{slot}", value, replica=self.comm.rank)
                else:
                    yield self._piece(f"{name}.{slot}", name, value, mapping)

    def close(self) -> None:
        """The engine's own end."""
        self.engine.destroy()
