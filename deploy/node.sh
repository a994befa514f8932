#!/bin/sh
# Command of the containers in compose.yaml: deploy/node.sh head|node.
# Reads RUN, NODES, RANKS_PER_NODE, SCENARIO, BACKEND, TIER, EXPRESSION, DEADLINE (seconds per launch), COMPARE.
set -u
BACKEND=${BACKEND:-gloo}
fail() { echo "$1" >&2; exit 2; }
case "$RUN" in ''|.*|*[!A-Za-z0-9._-]*) fail "RUN='$RUN' is no name of a folder";; esac
number() { case "$2" in ''|0*|*[!0-9]*) fail "$1='$2' is no whole number from 1";; esac; }
number NODES "$NODES"
number RANKS_PER_NODE "$RANKS_PER_NODE"
number DEADLINE "$DEADLINE"
case "$BACKEND" in gloo|nccl) ;; *) fail "BACKEND='$BACKEND' is neither gloo nor nccl";; esac
case " $SCENARIO $TIER" in *' -'*) fail "SCENARIO and TIER are names, not options";; esac
results=${RESULTS:-/results}
run=$results/$RUN
worker() {  # worker RECORDS TORCHRUN_OPTION...
    records=$1; shift
    began=$(date +%s)
    timeout -k 5 "$DEADLINE" torchrun --nproc-per-node "$per_node" --max-restarts 0 "$@" \
        -m shardproof.cluster.torchrun $SCENARIO --backend "$BACKEND" \
        --tier "$TIER" -k "$EXPRESSION" --records "$records" --no-judge $more
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

image() { sed -n "s/.*\"$1\": \"\([^\"]*\)\".*/\1/p" image.json; }  # what the image tells of itself
if [ -e image.json ]; then
    commit=$(image commit) digest=$(image source)
    echo "image of commit ${commit:-unknown}${digest:+, source $digest}"
fi
why=$(mkdir -p "$run" 2>&1 && { [ -w "$run" ] || echo "Permission denied"; })
[ -z "$why" ] ||
    fail "user $(id -u) cannot write $run (${why##*: }): start it as who owns ./results, which is user $(stat -c %u "$results"): OWNER=\$(id -u) docker compose up ..."
# Where no rank comes to write a plan, that of an earlier run would be judged.
rm -f "$run/cluster/plan.json" "$run/local/plan.json"
worker "$run/cluster" $across || echo "the job across nodes ended with code $?"
undecided=
if [ "${COMPARE:-yes}" = yes ] && [ -e "$run/cluster/plan.json" ]; then
    # The same cases with as many processes, all in this container.
    per_node=$((NODES * RANKS_PER_NODE)) more=--digests-only
    worker "$run/local" --standalone || echo "the local job ended with code $?"
fi
set --
if [ -e "$run/local/plan.json" ]; then
    set -- --against "$run/local"
elif [ "$more" ]; then
    echo "the local job came to no case: nothing to compare digests with"
    undecided=yes
fi
python -m shardproof.cluster.judge "$run/cluster" "$@" --prune
code=$?
[ "$code" -ne 0 ] || [ -z "$undecided" ] || code=3
echo "$results is ./results beside compose.yaml, on the host"
exit "$code"
