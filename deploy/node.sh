#!/bin/sh
# Command of the containers in compose.yaml: deploy/node.sh head|node.
# Reads HEAD (name of its node), RUN, NODES, RANKS_PER_NODE, SCENARIO, BACKEND, TIER, EXPRESSION, DEADLINE (seconds per launch), COMPARE.
set -u
BACKEND=${BACKEND:-gloo}
HEAD=${HEAD:-head}
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
records=$run/cluster
ranks() {
    began=$(date +%s)
    timeout -k 5 "$DEADLINE" torchrun --nproc-per-node "$RANKS_PER_NODE" --max-restarts 0 \
        --nnodes "$NODES" --rdzv-backend c10d --rdzv-endpoint "$HEAD:29500" --rdzv-id shardproof \
        --rdzv-conf join_timeout=60,last_call_timeout=1 \
        -m shardproof.cluster.torchrun $SCENARIO --backend "$BACKEND" \
        --tier "$TIER" -k "$EXPRESSION" --records "$records" --no-judge
    code=$?
    # What the clock ends is left out, not judged.
    [ $(($(date +%s) - began)) -lt "$DEADLINE" ] || { mkdir -p "$records" && touch "$records/out_of_time"; }
    return "$code"
}

if [ "$1" = node ]; then
    ranks
    # Compose stops all containers when one ends, so outlive the head, which judges: its name is known while it runs.
    trap 'exit 0' TERM INT
    misses=0  # in a row: on a busy machine a look-up may fail
    while [ "$misses" -lt 5 ]; do
        if getent hosts "$HEAD" > /dev/null; then misses=0; else misses=$((misses + 1)); fi
        sleep 1 & wait $!
    done
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
rm -f "$records/plan.json" "$records/out_of_time"
ranks || echo "the job across nodes ended with code $?"
if [ ! -e "$records/plan.json" ]; then
    if [ -e "$records/out_of_time" ]; then
        echo "DEADLINE=$DEADLINE: no case began in so many seconds, so nothing was judged: give more" >&2
        exit 3
    fi
    # The reason stands above, among the lines of torchrun: no case has so many ranks, or no node came.
    fail "nothing was judged: no case began on NODES=$NODES x RANKS_PER_NODE=$RANKS_PER_NODE = $((NODES * RANKS_PER_NODE)) ranks. by-hand has cases of 2, 3, 4, 6 and 8; shardproof list cases SCENARIO --world N --backend $BACKEND lists those of others; --scale node= is NODES - 1"
fi
python -m shardproof.cluster.judge "$records" --prune
code=$?
judged=$(ls -d "$run"/*/run.json 2>/dev/null | tail -n 1)
if [ "${COMPARE:-yes}" = yes ] && [ "$code" -eq 0 ] && [ -n "$judged" ]; then
    # The same cases with as many processes, all in this container: equal bits.
    timeout -k 5 "$DEADLINE" python -m shardproof reproduce "${judged%/run.json}" --results "${judged%/run.json}-local"
    code=$?
    [ "$code" -le 3 ] || code=3
fi
echo "$results is ./results beside compose.yaml, on the host"
exit "$code"
