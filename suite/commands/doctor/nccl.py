"""What NCCL would find here: GPUs, the driver, its own version, and variables that nobody reads.

Of the environment only names are looked at that begin with ``NCCL_`` or ``TORCH_NCCL_``, and only
names are told, never a value.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator

from shardproof.backends.gloo_cuda import GlooCuda
from shardproof.commands.doctor.finding import Finding

#: What NCCL reads after ``NCCL_``: its source, 2.30, names of older versions, and torch's
#: own old ones.
NAMES = """
    ALGO ALLGATHERV_ENABLE ALLOC_P2P_NET_LL_BUFFERS ASYNC_ERROR_HANDLING BLOCKING_WAIT BUFFSIZE
    CGA_CLUSTER_SIZE CHECKS_DISABLE CHECK_MODE CHECK_POINTERS CHUNK_SIZE COLLNET_ENABLE
    COLLNET_NODE_THRESHOLD COMM_BLOCKING COMM_ID COMM_SHRINK_SHARE_RESOURCES
    COMM_SPLIT_SHARE_RESOURCES CONF_FILE CONNECT_ROUND_MAX_PEERS CROSS_NIC CTA_POLICY
    CUMEM_ENABLE CUMEM_HOST_ENABLE DEBUG DEBUG_FILE DEBUG_SUBSYS DEBUG_TIMESTAMP_FORMAT
    DEBUG_TIMESTAMP_LEVELS DESYNC_DEBUG DEV_API_JIT DISABLE_MEM_MANAGER DMABUF_ENABLE
    ELASTIC_BUFFER_REGISTER ENABLE_TIMING ENABLE_VERSION_CHECK ENV_PLUGIN GDAKI_USE_RELIABLE_DB
    GDRCOPY_ENABLE GDRCOPY_FIFO_ENABLE GDRCOPY_FLUSH_ENABLE GDRCOPY_SYNC_ENABLE
    GDR_FLUSH_DISABLE GIN_ENABLE GIN_ERROR_QUERY_SEC GIN_GDAKI_MAX_DEST_RD_ATOMIC
    GIN_GDAKI_MAX_QP_RD_ATOMIC GIN_GDAKI_NIC_HANDLER GIN_GDAKI_QP_DEPTH GIN_IB_TC
    GIN_NCONNECTIONS GIN_PLUGIN GIN_PLUGIN_REF_COUNT GIN_PROXY_QUEUE_SIZE GIN_TYPE
    GRAPH_DUMP_FILE GRAPH_DUMP_FILE_RANK GRAPH_FILE GRAPH_HELPER_DISABLE GRAPH_MIXING_SUPPORT
    GRAPH_REGISTER GRAPH_STREAM_ORDERING GROUP_CUDA_STREAM HIGH_PRIORITY HOSTID IBVERBS_LIB
    IB_ADAPTIVE_ROUTING IB_ADDR_FAMILY IB_ADDR_RANGE IB_AR_THRESHOLD IB_CUDA_SUPPORT
    IB_DATA_DIRECT IB_DEVICE_PCI_ORDER IB_DISABLE IB_ECE_ENABLE IB_FIFO_TC IB_GID_INDEX IB_HCA
    IB_MERGE_NICS IB_MERGE_VFS IB_MQP_RETRY_ALL IB_MQP_RETRY_CNT IB_MQP_RETRY_SLEEP_MSEC
    IB_OOO_RQ IB_PCI_RELAXED_ORDERING IB_PKEY IB_PREPOST_RECEIVE_WORK_REQUESTS
    IB_QPS_PER_CONNECTION IB_QUERY_PORT_SPEED IB_RECEIVER_SIDE_MATCHING_SCHEME
    IB_RESILIENCY_PORT_FAILOVER IB_RESILIENCY_PORT_FAILOVER_MAX_ATTEMPTS
    IB_RESILIENCY_PORT_FAILOVER_PROBE_DELAY IB_RESILIENCY_PORT_RECOVERY
    IB_RESILIENCY_PORT_RECOVERY_ACK_TIMEOUT IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_BATCH_INTERVAL
    IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_BATCH_SIZE
    IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_SEQUENCE_SIZE
    IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_TIMEOUT IB_RESILIENCY_PORT_RECOVERY_ATTEMPTS_MAX
    IB_RESILIENCY_PORT_RECOVERY_START_DELAY IB_RETRY_CNT IB_RETURN_ASYNC_EVENTS
    IB_ROCE_VERSION_NUM IB_ROUTABLE_FLID_GID_INDEX IB_SL IB_SPLIT_DATA_ON_QPS
    IB_SUBNET_AWARE_ROUTING IB_SUBNET_PREFIX_LEN IB_TC IB_TIMEOUT IB_USE_INLINE
    IB_WARN_RAIL_LOCAL IGNORE_COLLNET_MISMATCH IGNORE_CPU_AFFINITY IGNORE_DISABLED_P2P
    IGNORE_NET_MISMATCH IPC_USE_ABSTRACT_SOCKET L1_SHARED_MEMORY_CARVEOUT LAUNCH_MODE
    LAUNCH_ORDER_IMPLICIT LAUNCH_RACE_FATAL LEGACY_CUDA_REGISTER LL128_BUFFSIZE LL128_C2C
    LL128_NTHREADS LL_BUFFSIZE LOCAL_REGISTER LSA_TEAM_SIZE MAX_CTAS MAX_NCHANNELS MAX_NRINGS
    MAX_P2P_NCHANNELS MEM_SYNC_DOMAIN MIN_CTAS MIN_NCHANNELS MIN_NRINGS MIN_P2P_NCHANNELS
    MLOPART_RDMA_ENABLE MNNVL_CLIQUE_ID MNNVL_CROSS_CLIQUE MNNVL_ENABLE MNNVL_RAIL_PER_HOST
    MNNVL_SCATTER_NETS_ENABLE MNNVL_UUID MULTI_RANK_GPU_ENABLE MULTI_SEGMENT_REGISTER
    NCHANNELS_PER_NET_PEER NET NETDEVS_POLICY NET_DISABLE_INTRA NET_FORCE_FLUSH NET_FORCE_MERGE
    NET_GDR_C2C NET_GDR_LEVEL NET_GDR_MLOPART NET_GDR_READ NET_MERGE_LEVEL NET_MERGE_POLICY
    NET_OPTIONAL_RECV_COMPLETION NET_OVERHEAD NET_PLUGIN NET_PLUGIN_REF_COUNT NET_SHARED_BUFFERS
    NET_SHARED_COMMS NO_CACHE NSOCKS_PERTHREAD NTHREADS NUM_RMA_CTX NVB_DISABLE NVB_PRECONNECT
    NVLINK_UTIL_CENTRIC_SCHED_ENABLE NVLSTREE_MAX_CHUNKSIZE NVLS_CHUNKSIZE NVLS_ENABLE
    NVLS_NCHANNELS NVTX_DISABLE OOB_NET_ENABLE OOB_NET_IFNAME P2P_DIRECT_DISABLE P2P_DISABLE
    P2P_EPOCH_ENABLE P2P_LEVEL P2P_LL_THRESHOLD P2P_MAX_PEERS P2P_NET_CHUNKSIZE
    P2P_NVL_CHUNKSIZE P2P_PCI_CHUNKSIZE P2P_PER_CHANNEL_NET_BW P2P_PXN_LEVEL P2P_READ_ENABLE
    P2P_SCHEDULE_GROUP_SIZE P2P_USE_CUDA_MEMCPY PAT_ENABLE PROFILER_PLUGIN
    PROGRESS_APPENDOP_FREQ PROTO PROXY_APPEND_BATCH_SIZE PROXY_CPUSET PROXY_DUMP_SIGNAL PXN_C2C
    PXN_DISABLE RAS_ADDR RAS_ENABLE RAS_TIMEOUT_FACTOR REPORT_CONNECT_PROGRESS RINGS RMA_DISABLE
    RMA_PLUGIN RMA_PLUGIN_REF_COUNT RMA_PROXY_DUMP_SIGNAL RMA_PROXY_QUEUE_SIZE RUNTIME_CONNECT
    SET_CPU_STACK_SIZE SET_STACK_SIZE SET_THREAD_NAME SHADOW_MEMPOOL_MAX_SIZE SHM_DISABLE
    SHM_LOCALITY SINGLE_PROC_MEM_REG_ENABLE SINGLE_RING_THRESHOLD SOCKET_FAMILY SOCKET_IFNAME
    SOCKET_INLINE SOCKET_MAGIC SOCKET_MIN_TASKSIZE SOCKET_NTHREADS SOCKET_POLL_TIMEOUT_MSEC
    SOCKET_RCVBUF SOCKET_RETRY_CNT SOCKET_RETRY_SLEEP_MSEC SOCKET_SNDBUF STACK_SIZE
    SYM_CE_THRESHOLD SYM_CTAS SYM_GIN_KERNELS_ENABLE SYM_KERNEL SYM_NOWIN_ENABLE
    SYM_REUSE_SYSMEM_HANDLES SYM_RS_GIN_CHUNK_SIZE SYM_TMA_ENABLE THREAD_THRESHOLDS
    TOPO_DUMP_FILE TOPO_DUMP_FILE_RANK TOPO_FILE TOPO_SPLIT_MLOPART TREE_THRESHOLD TUNER_PLUGIN
    UID_STAGGER_RATE UID_STAGGER_THRESHOLD UNPACK_DOUBLE_NCHANNELS WARN_ENABLE_DEBUG_INFO
    WIN_ENABLE WIN_STRIDE WORK_ARGS_BYTES WORK_FIFO_BYTES
"""
#: What torch 2.13 reads after ``TORCH_NCCL_``.
TORCH_NAMES = """
    ASYNC_ERROR_HANDLING AVOID_RECORD_STREAMS BCAST_UNIQUEID BLOCKING_WAIT COORD_CHECK_MILSEC
    CUDA_EVENT_CACHE DEBUG_INFO_PIPE_FILE DEBUG_INFO_TEMP_FILE DESYNC_DEBUG DUMP_ON_TIMEOUT
    ENABLE_MONITORING ENABLE_TIMING EXTRA_DUMP_ON_EXEC HEARTBEAT_TIMEOUT_SEC HIGH_PRIORITY
    LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN NAN_CHECK NONBLOCKING_TIMEOUT PROPAGATE_ERROR
    RANKS_PER_ROOT RETHROW_CUDA_ERRORS SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING
    TRACE_BUFFER_SIZE TRACE_CPP_STACK USE_COMM_NONBLOCKING USE_TENSOR_REGISTER_ALLOCATOR_HOOK
    WAIT_TIMEOUT_DUMP_MILSEC
"""
#: Where a name is nearer than this to a known one, it is that one misspelt.
_NEAR = 0.8


def examine() -> Iterator[Finding]:
    """GPUs and versions, then the variables."""
    yield _gpus()
    yield _versions()
    yield _variables()


def _gpus() -> Finding:
    """The GPUs that torch can use, or why it can use none: no fault, cases there are skipped."""
    import torch

    from shardproof.runs.machine import gpus

    reason, listed = GlooCuda().available(), gpus()
    if reason is None:
        return Finding("GPUs", "good", ", ".join(gpu.name for gpu in listed) or "usable by torch")
    if not listed:
        return Finding("GPUs", "note", reason, "cases on nccl and gloo_cuda are skipped here")
    built = torch.version.cuda
    if built is None:
        found = f"{len(listed)} in this machine, but this torch is built without CUDA"
        return Finding("GPUs", "bad", found, "install a build of torch with CUDA")
    found = f"{len(listed)} in this machine, but torch (CUDA {built}) can use none"
    hidden = " or unset CUDA_VISIBLE_DEVICES," if "CUDA_VISIBLE_DEVICES" in os.environ else ""
    remedy = f"take a driver for CUDA {built} (nvidia-smi names what it supports),{hidden}"
    return Finding("GPUs", "bad", found, f"{remedy} or a torch for an older CUDA")


def _versions() -> Finding:
    """Driver and NCCL; two releases of one NCCL in one job do not meet, so both are told."""
    import torch

    from shardproof.runs.machine import gpus

    drivers = sorted({gpu.driver for gpu in gpus()})
    driver = f"driver {', '.join(drivers)}" if drivers else "no driver"
    if torch.version.cuda is None or not torch.distributed.is_nccl_available():
        remedy = "for cases on nccl install a build of torch with CUDA"
        return Finding("NCCL", "note", f"{driver}; this torch is built without NCCL", remedy)
    version = ".".join(map(str, torch.cuda.nccl.version()))
    text = f"{driver}; NCCL {version}, CUDA {torch.version.cuda}"
    if not drivers:
        return Finding("NCCL", "note", text, "install the driver: cases on nccl are skipped here")
    return Finding("NCCL", "good", text)


def _variables() -> Finding:
    """Names that are set and nobody reads: a misspelt one is silently without effect."""
    known = {f"NCCL_{name}" for name in NAMES.split()}
    known |= {f"TORCH_NCCL_{name}" for name in TORCH_NAMES.split()}
    given = sorted(name for name in os.environ if name.startswith(("NCCL_", "TORCH_NCCL_")))
    unknown = [name for name in given if name not in known]
    if not unknown:
        return Finding("NCCL variables", "good", ", ".join(given) or "none set")
    nearest = {name: difflib.get_close_matches(name, known, 1, _NEAR) for name in unknown}
    meant = [f"{name}: did you mean {near[0]}?" for name, near in nearest.items() if near]
    others = [name for name, near in nearest.items() if not near]
    if others:
        meant.append(f"{', '.join(others)}: unset, unless a plugin of NCCL reads it")
    found = f"neither NCCL nor torch knows {', '.join(unknown)}"
    return Finding("NCCL variables", "note", found, "; ".join(meant))
