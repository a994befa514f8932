"""A tiny Qwen3 mixture of experts from transformers, for the adapters around its parallelism.

Two layers of four experts, of which each token takes two.  Norms and router are transformers' own
without their rounding to float32: the last digits of a vectorized float32 function depend on the
shape of a batch, so no cut of a batch would have the numbers of the whole in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardproof import OwnWorkload

VOCABULARY, LENGTH, LAYERS = 48, 8, 2


def model() -> nn.Module:
    """The model, which returns logits; imported late, because few environments have the package."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.models.qwen3_moe import modeling_qwen3_moe as own

    class Router(own.Qwen3MoeTopKRouter):
        """Logits, weights and experts of each token."""

        def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            """The same in the dtype of ``hidden``."""
            logits = F.linear(hidden, self.weight)
            weights, experts = logits.softmax(-1).topk(self.top_k, -1)
            return logits, weights / weights.sum(-1, keepdim=True), experts

    class Logits(Qwen3MoeForCausalLM):
        """The causal model; the contract wants one tensor."""

        def forward(self, inputs: Tensor) -> Tensor:
            """The logits of ``inputs``."""
            logits: Tensor = super().forward(input_ids=inputs, use_cache=False).logits
            return logits

    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        hidden_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        moe_intermediate_size=12,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        attn_implementation="sdpa",
        # The default, grouped_mm, takes no float64.
        experts_implementation="eager",
    )
    whole = Logits(config)
    for name, part in [*whole.named_modules()]:
        if isinstance(part, own.Qwen3MoeRMSNorm):
            norm = nn.RMSNorm(part.weight.shape, eps=part.variance_epsilon)
            whole.set_submodule(name, norm)
        elif isinstance(part, own.Qwen3MoeTopKRouter):
            part.__class__ = Router
    return whole


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The cross-entropy of each target."""
    flat = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none")
    return flat.view(targets.shape)


def batch(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random tokens, each with the next as its target."""
    tokens = torch.randint(VOCABULARY, (size, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


tiny_moe = OwnWorkload(
    model,
    loss,
    batch,
    roles={f"model.layers.{n}.mlp.experts": "expert" for n in range(LAYERS)},
    about="a tiny Qwen3 mixture of experts",
)
