#!/bin/bash
# On-start script of vast.ai: installs the suite into the image's Python, and starts one rank for each GPU.
set -euo pipefail
: "${REPOSITORY:?set REPOSITORY to the checkout to install}"
checkout=${CHECKOUT:-/workspace/shardproof}
[ -d "$checkout" ] || git clone --depth 1 "$REPOSITORY" "$checkout"
cd "$checkout"
python -m pip install --quiet --editable .
gpus=${RANKS_PER_NODE:-$(python -c 'import torch; print(max(1, torch.cuda.device_count()))')}
if [ "${NNODES:-1}" -gt 1 ]; then
    : "${MASTER_ADDR:?set MASTER_ADDR to the address of instance 0}"
    nodes=(--nnodes "$NNODES" --node-rank "${NODE_RANK:?set NODE_RANK, from 0}"
        --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}")
else
    nodes=(--standalone)
fi
# Each launch has a new run folder in there: an instance that is started again launches again.
results=${RESULTS:-results}
exec python -m shardproof.cluster.judge "$results/records" --node "${NODE_RANK:-0}" -- \
    torchrun "${nodes[@]}" --nproc-per-node "$gpus" --max-restarts 0 -m shardproof.cluster.torchrun ${SCENARIO:-ddp-gpt} \
    --tier "${TIER:-quick}" --backend "${BACKEND:-nccl}"
