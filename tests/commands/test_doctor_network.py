"""``shardproof doctor`` reads what connects GPUs and nodes, and the settings in force.

Nothing here is from this machine: the texts are SAMPLES in the form that ``nvidia-smi`` and the
kernel print, made for these tests.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from shardproof.doctor import findings, network, settings

#: SAMPLE: eight GPUs with a switch, as a terminal gets it (underlined heading), cut to four GPUs.
SWITCHED = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tNV18\tNV18\tPIX\t0-55\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tNV18\tNV18\tNODE\t0-55\t0\t\tN/A\n"
    "GPU2\tNV18\tNV18\t X \tNV18\tSYS\t56-111\t1\t\tN/A\n"
    "GPU3\tNV18\tNV18\tNV18\t X \tSYS\t56-111\t1\t\tN/A\n"
    "NIC0\tPIX\tNODE\tSYS\tSYS\t X \n"
    "\nLegend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n"
    "\nNIC Legend:\n\n  NIC0: mlx5_0\n"
)
#: SAMPLE: two bridges, each between two GPUs, on two sockets.
BRIDGED = """\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV4\tNODE\tSYS\t0-15\t0
GPU1\tNV4\t X \tNODE\tSYS\t0-15\t0
GPU2\tNODE\tNODE\t X \tNV4\t16-31\t1
GPU3\tSYS\tSYS\tNV4\t X \t16-31\t1
"""
#: SAMPLE: two GPUs without NVLink.
PLAIN = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tPHB\t0-15\nGPU1\tPHB\t X \t0-15\n"
#: SAMPLE: one GPU; as a GPU without links has it.
ALONE = "\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t0-15\t0\n"
#: SAMPLE: a link of the second GPU is down.
LINKS = """GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-00000000-0000-0000-0000-000000000000)
\t Link 0: 25 GB/s
\t Link 1: 25 GB/s
GPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-00000000-0000-0000-0000-000000000001)
\t Link 0: 25 GB/s
\t Link 1: <inactive>
"""


def test_a_topology_is_read_with_its_network_cards_left_out() -> None:
    paths = network.topology(SWITCHED)
    assert len(paths) == 6 and {*paths.values()} == {"NV18"}
    finding = network.of_topology(paths)
    assert (finding.state, finding.found) == ("good", "6 pairs of GPUs: 6 x NV18")


def test_nvlink_between_some_gpus_only_names_the_groups_that_it_joins() -> None:
    paths = network.topology(BRIDGED)
    assert paths["GPU0", "GPU1"] == "NV4" and paths["GPU1", "GPU3"] == "SYS"
    finding = network.of_topology(paths)
    assert finding.state == "note" and finding.found.endswith("2 x NODE, 2 x NV4, 2 x SYS")
    assert finding.remedy.endswith("GPU0,GPU1; GPU2,GPU3")


def test_gpus_without_nvlink_are_reported_with_the_longest_path() -> None:
    finding = network.of_topology(network.topology(PLAIN))
    assert finding.state == "note" and "no NVLink" in finding.found
    assert "host bridge of a CPU" in finding.found and "tensor parallelism" in finding.remedy


@pytest.mark.parametrize("text", [ALONE, "", "No devices were found", "Failed to initialize NVML"])
def test_a_single_gpu_or_none_needs_no_links(text: str) -> None:
    assert network.topology(text) == {}
    assert network.of_topology({}).state == "good"


def test_a_link_that_is_down_is_named_with_its_gpu() -> None:
    found = network.links(LINKS)
    assert found == {"GPU0": (2, 2), "GPU1": (1, 2)}
    finding = network.of_links(found)
    assert finding and finding.state == "note" and finding.found == "GPU1 1 of 2 up"
    assert "fabricmanager" in finding.remedy
    finding = network.of_links(network.links(LINKS.replace("<inactive>", "25 GB/s")))
    assert finding and finding.found == "all up: 2 GPUs with 2 links each"
    assert network.of_links(network.links("")) is None


def cards(folder: Path, **states: str) -> list[network.Port]:
    """Ports of a SAMPLE in the form of ``/sys/class/infiniband``: card -> state of its port."""
    for name, state in states.items():
        port = folder / name / "ports" / "1"
        port.mkdir(parents=True)
        physical = "5: LinkUp" if "DOWN" not in state else "3: Disabled"
        files = {"state": state, "phys_state": physical, "link_layer": "InfiniBand"}
        for file, text in {**files, "rate": "200 Gb/sec (4X HDR)"}.items():
            (port / file).write_text(f"{text}\n")
    return network.ports(folder)


def test_an_active_card_is_good_and_one_that_is_switched_off_is_not(tmp_path: Path) -> None:
    found = cards(tmp_path, mlx5_0="4: ACTIVE")
    assert [port.name for port in found] == ["mlx5_0:1"]
    (good,) = network.infiniband(found, {}, tmp_path)
    assert good.state == "good" and "mlx5_0:1 ACTIVE, 200 Gb/sec (4X HDR), InfiniBand" in good.found
    (zero,) = network.infiniband(found, {"NCCL_IB_DISABLE": "0"}, tmp_path)
    assert zero.state == "good"
    (off,) = network.infiniband(found, {"NCCL_IB_DISABLE": "1"}, tmp_path)
    assert off.state == "note" and "unset NCCL_IB_DISABLE" in off.remedy


@pytest.mark.parametrize(
    ("state", "says"), [("1: DOWN", "check cable"), ("2: INIT", "opensm"), ("3: ARMED", "opensm")]
)
def test_a_port_that_is_not_up_has_the_remedy_of_its_state(
    state: str, says: str, tmp_path: Path
) -> None:
    found = cards(tmp_path, mlx5_0="4: ACTIVE", mlx5_1=state)
    (finding,) = network.infiniband(found, {}, tmp_path)
    assert finding.state == "note" and says in finding.remedy
    (finding,) = network.infiniband([found[1]], {}, tmp_path)
    assert finding.state == "note" and says in finding.remedy


def test_containers_need_the_device_and_memory_that_may_be_locked(tmp_path: Path) -> None:
    found = cards(tmp_path / "sys", mlx5_0="4: ACTIVE")
    _, device, locked = network.infiniband(found, {}, tmp_path / "absent", locked=64 << 10)
    assert "--device=/dev/infiniband" in device.remedy
    assert locked.found == "64 KiB" and "memlock" in locked.remedy
    (none,) = network.infiniband([], {"NCCL_IB_DISABLE": "1"}, tmp_path / "absent", locked=0)
    assert none.state == "good" and "changes nothing" in none.found


def test_a_choice_of_cards_that_selects_none_is_seen(tmp_path: Path) -> None:
    found = cards(tmp_path, mlx5_0="4: ACTIVE", mlx5_1="1: DOWN")
    *_, finding = network.infiniband(found, {"NCCL_IB_HCA": "mlx5_1"}, tmp_path)
    assert finding.what == "NCCL_IB_HCA" and "mlx5_0" in finding.remedy
    assert len([*network.infiniband(found, {"NCCL_IB_HCA": "mlx5"}, tmp_path)]) == 1


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("eth", ["eth0", "eth01"]),
        ("=eth0", ["eth0"]),
        ("^eth", ["lo", "mlx5_0:1"]),
        ("^=eth0", ["eth01", "lo", "mlx5_0:1"]),
        ("mlx5_0:1", ["mlx5_0:1"]),
        ("=mlx5_0", ["mlx5_0:1"]),
        ("ib,lo", ["lo"]),
    ],
)
def test_a_choice_reads_as_nccl_reads_it(pattern: str, names: list[str]) -> None:
    assert network.chosen(["eth0", "eth01", "lo", "mlx5_0:1"], pattern) == names


# --------------------------------------------------------------------------------------- settings


def test_timeouts_in_force_are_stated() -> None:
    finding = settings.timeouts({}, timedelta(minutes=30))
    assert finding.state == "good"
    assert "30 min" in finding.found and "on NCCL 10 min" in finding.found
    raised = settings.timeouts({settings.HEARTBEAT: "1200"}, timedelta(minutes=30))
    assert raised.found.endswith("watchdog 20 min") and raised.state == "good"
    odd = settings.timeouts({settings.HEARTBEAT: "hidden"}, timedelta(minutes=30))
    assert odd.state == "note" and "hidden" not in str(odd)


@pytest.mark.parametrize("name", settings.NO_TIMEOUTS)
def test_a_timeout_that_no_library_reads_is_seen(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = settings.timeouts({name: "300000"}, timedelta(minutes=30))
    assert finding.state == "note" and f"no library reads {name}" in finding.found
    assert "timeout=" in finding.remedy and "300000" not in str(finding)
    assert name not in findings.known_variables()
    monkeypatch.setenv(name, "300000")
    assert "timeout=" in findings._variables().remedy


def test_torch_has_the_timeouts_that_are_stated() -> None:
    include = Path(str(torch.__file__)).parent / "include/torch/csrc/distributed/c10d"
    header = (include / "ProcessGroupNCCL.hpp").read_text()
    assert (
        "kProcessGroupNCCLDefaultTimeout =\n    std::chrono::milliseconds(10 * 60 * 1000)" in header
    )
    assert settings.HEARTBEAT in header


def test_settings_that_hinder_have_an_effect_and_a_remedy() -> None:
    given = {name: value.lower() for name, value in settings.HINDRANCES}
    found = [*settings.hindrances(given)]
    assert [f.what for f in found] == [name for name, _ in settings.HINDRANCES]
    assert all(f.state == "note" and f.found and f.remedy for f in found)
    assert not [*settings.hindrances({"NCCL_P2P_DISABLE": "0", "NCCL_DEBUG": "INFO"})]
    known = {n for n, _ in settings.HINDRANCES if n.startswith(("NCCL_", "TORCH_NCCL_"))}
    assert known <= findings.known_variables()


def test_the_interface_of_nccl_must_exist() -> None:
    def of(pattern: str, has_gpus: bool = True) -> list[str]:
        given = {"NCCL_SOCKET_IFNAME": pattern} if pattern else {}
        return [f.state for f in settings.interfaces(given, ["lo", "eth0"], has_gpus)]

    assert of("") == [] and of("eth") == ["good"] and of("ib0") == ["bad"]
    assert of("ib0", has_gpus=False) == ["note"]


def test_a_port_that_is_taken_is_seen() -> None:
    with socket.create_server(("", 0)) as taken:
        number = str(taken.getsockname()[1])
        finding = settings.port({"MASTER_PORT": number})
        assert finding.state == "note" and number in finding.found and finding.remedy
    assert settings.port({"MASTER_PORT": number}).state == "good"
    assert "hidden" not in str(settings.port({"MASTER_PORT": "hidden"}))


def test_files_of_nccl_count_and_show_names_only(tmp_path: Path) -> None:
    (tmp_path / "nccl.conf").write_text(
        "# NCCL_ALGO=Ring\nNCCL_IB_DISABLE=1\nNCCL_DEBUG = hidden\n"
    )
    (finding,) = settings.files([tmp_path / "nccl.conf", tmp_path / "absent"])
    assert finding.found == "NCCL_IB_DISABLE, NCCL_DEBUG" and "hidden" not in str(finding)
