#!/bin/sh
# Command of the containers in compose.yaml: deploy/node.sh head|node.
# Reads RUN, NODES, RANKS_PER_NODE, SCENARIO, TIER, EXPRESSION, DEADLINE (seconds per launch), COMPARE.
set -u
run=/results/$RUN
mkdir -p "$run" || exit 2
worker() {  # worker RECORDS TORCHRUN_OPTION...
    records=$1; shift
    began=$(date +%s)
    timeout -k 5 "$DEADLINE" torchrun --nproc-per-node "$per_node" --max-restarts 0 "$@" \
        -m shardproof.multinode.torchrun $SCENARIO --tier "$TIER" -k "$EXPRESSION" --records "$records" --no-judge $more
    code=$?
    # What the clock ends is left out, not judged.
    [ $(($(date +%s) - began)) -lt "$DEADLINE" ] || touch "$records/out_of_time"
    return "$code"
}
across="--nnodes $NODES --rdzv-backend c10d --rdzv-endpoint head:29500 --rdzv-id shardproof
    --rdzv-conf join_timeout=60,last_call_timeout=1"
per_node=$RANKS_PER_NODE more=

if [ "$1" = node ]; then
    worker "$run/cluster" $across
    # Compose stops all containers when one ends, so outlive the head, which judges.
    trap 'exit 0' TERM INT
    sleep "$((DEADLINE * 3))" &
    wait
    exit 0
fi

worker "$run/cluster" $across || echo "the job across nodes ended with code $?"
if [ "${COMPARE:-yes}" = yes ] && [ -e "$run/cluster"/plan.json ]; then
    # The same cases with as many processes, all in this container.
    per_node=$((NODES * RANKS_PER_NODE)) more=--digests-only
    worker "$run/local" --standalone || echo "the local job ended with code $?"
    set -- --against "$run/local"
else
    set --
fi
exec python -m shardproof.multinode.torchrun --judge "$run/cluster" "$@" --results "$run" --prune
