#!/bin/bash
# A Slurm of two nodes on this machine, in a folder of its own: deploy/slurm/try.sh COMMAND... runs COMMAND on it,
# then ends it.  As root; needs slurmctld, slurmd and munged (Debian: slurm-wlm), and touches neither /etc/slurm nor
# /etc/munge: its munged has a key and a socket of its own.  Who may use it is what munge says: any user of this
# machine, as that user.
set -euo pipefail
for program in slurmctld slurmd sbatch munged; do
    command -v "$program" >/dev/null || { echo "$program is not here: apt-get install slurm-wlm"; exit 3; }
done
folder=$(mktemp -d /tmp/shardproof-slurm-XXXXXX)
mkdir -p "$folder"/{state,log,spool/n1,spool/n2,key,munge}
# Users reach munge's socket, slurm.conf and their jobs, no key.
chmod 711 "$folder" "$folder"/{munge,spool}
chmod 700 "$folder"/{state,log,key}
(umask 077 && head -c 1024 /dev/urandom >"$folder/key/munge.key")
export SLURM_CONF=$folder/slurm.conf
read -r controller first second < <("${PYTHON:-python3}" - <<'PORTS'
# Below the range from which the kernel gives other programs ports until the daemons bind these.
import random, socket
lowest = int(open("/proc/sys/net/ipv4/ip_local_port_range").read().split()[0])
held = []
for port in random.sample(range(lowest // 2, lowest), 100):
    try:
        held += [socket.create_server(("127.0.0.1", port))]
    except OSError:
        continue
print(*(each.getsockname()[1] for each in held[:3]))
PORTS
)
node="NodeHostname=$(hostname) NodeAddr=127.0.0.1 CPUs=2 RealMemory=1000 State=UNKNOWN"
cat >"$SLURM_CONF" <<CONF
ClusterName=shardproof
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmctldPort=$controller
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge/socket
CredType=cred/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool/%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.%n.pid
SlurmctldLogFile=$folder/log/slurmctld.log
SlurmdLogFile=$folder/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=2
NodeName=n1 $node Port=$first
NodeName=n2 $node Port=$second
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE OverSubscribe=YES State=UP
CONF

daemons=()
end() {
    # Jobs first: the process that holds a step outlives its slurmd.
    scancel --user="$(id -un)" 2>/dev/null && sleep 3
    kill "${daemons[@]}" 2>/dev/null
    wait "${daemons[@]}" 2>/dev/null
    rm -rf "$folder"
}
trap 'code=$?; set +e; end; exit $code' EXIT
munged --foreground --key-file="$folder/key/munge.key" --socket="$folder/munge/socket" \
    --pid-file="$folder/munge/pid" --seed-file="$folder/key/seed" 2>"$folder/log/munged.log" &
daemons+=($!)
for _ in $(seq 60); do
    [ -S "$folder/munge/socket" ] && break
    sleep 0.5
done
slurmctld -D >/dev/null 2>&1 & daemons+=($!)
for name in n1 n2; do slurmd -D -N "$name" >/dev/null 2>&1 & daemons+=($!); done
for _ in $(seq 60); do
    [ "$(sinfo --noheader --Node --states=idle 2>/dev/null | wc -l)" -eq 2 ] && break
    sleep 0.5
done
[ "$(sinfo --noheader --Node --states=idle | wc -l)" -eq 2 ] || { tail -n 5 "$folder"/log/*.log; exit 1; }
# All nodes are this machine.
export MASTER_ADDR=127.0.0.1 GLOO_SOCKET_IFNAME=lo
"$@"
