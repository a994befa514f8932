"""What images are made of: locked packages, what makes an image old, and which one cases need.

Tests that need a container engine are skipped with the reason where there is none; in CI
(``CI=true``) that is a failure.
"""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import docker
import pytest
from commands import here, shardproof
from made_case import made_case
from real_engine import real_engine

from shardproof.cluster.containers import cluster, image_inputs
from shardproof.cluster.containers import engine as engine_room
from shardproof.cluster.containers.image_inputs import EVERYTHING, LEAN
from shardproof.cluster.containers.needs import Needs
from shardproof.errors import SelectionError

ROOT = Path(__file__).resolve().parents[2]
LOCKS = {name: ROOT / "deploy" / "locks" / f"{name}.txt" for name in ("rank", "judge", "all")}


def entries(lock: Path) -> dict[str, tuple[str, int]]:
    """Package -> its version, and how many hashes it has."""
    found = {}
    for block in re.split(r"^(?=[a-z])", lock.read_text(), flags=re.MULTILINE)[1:]:
        name, version = re.split(r"==| ", block)[:2]
        found[name.lower()] = version, len(re.findall(r"--hash=sha256:[0-9a-f]{64}\b", block))
    return found


def test_every_package_of_the_images_is_locked_by_a_hash() -> None:
    locked = {name: entries(lock) for name, lock in LOCKS.items()}
    pins = (ROOT / "constraints.txt").read_text().lower().replace("_", "-").splitlines()
    pinned = dict(line.split("==") for line in pins if "==" in line)
    together: dict[str, tuple[str, int]] = {}
    for packages in locked.values():
        assert packages and not together.keys() & packages.keys(), "each stands in one lock"
        together |= packages
    for name, (version, hashes) in together.items():
        assert hashes, name
        assert pinned.get(name, version) == version, f"{name}: `make lock` was not run"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for wanted in (*project["dependencies"], *extras["deepspeed"], *extras["mpi"]):
        name = re.split(r"[<>=;]", wanted)[0].lower()
        assert name in together or name == "torch", f"{name}: `make lock` was not run"
    assert {"numpy", "pydantic", "pyyaml", "psutil"} <= locked["rank"].keys()
    assert {"deepspeed", "mpi4py", "openmpi"} <= locked["all"].keys()


def test_the_torch_of_make_setup_is_the_one_that_is_locked() -> None:
    torch = image_inputs.default_argument("TORCH")
    assert f"\nTORCH ?= {torch}\n" in (ROOT / "Makefile").read_text()
    assert image_inputs.is_locked(torch) and not image_inputs.is_locked("torch==2.14.0")
    (hashes,) = [count for _, count in entries(LOCKS["rank"].with_name("torch.txt")).values()]
    assert hashes == 2, "of two architectures"


def test_the_public_base_is_named_by_its_digest() -> None:
    assert re.search(r"@sha256:[0-9a-f]{64}$", image_inputs.default_argument("BASE_IMAGE"))
    compose = (ROOT / "compose.yaml").read_text()
    for name in ("BASE_IMAGE", "TORCH"):
        assert f'"${{{name}:-{image_inputs.default_argument(name)}}}"' in compose


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Files of every kind that images are made of."""
    for name in image_inputs.SOURCES:
        if (ROOT / name).is_dir():
            (tmp_path / name).mkdir()
            (tmp_path / name / "file").write_text("before")
        else:
            shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "deploy" / "locks").mkdir()
    for lock in (ROOT / "deploy" / "locks").iterdir():
        shutil.copy(lock, tmp_path / "deploy" / "locks")
    (tmp_path / "wheels").mkdir()
    return tmp_path


def test_each_input_makes_an_image_old(checkout: Path) -> None:
    inputs = {"TORCH": "torch==2.13.0", "BASE_IMAGE": "sha256:1"}

    def digest(build: dict[str, str] = inputs) -> str:
        return image_inputs.source_digest(image_inputs.input_digests(build, checkout))

    digests = [digest()]

    def is_new(build: dict[str, str] = inputs) -> bool:
        digests.append(digest(build))
        return digests[-1] not in digests[:-1]

    assert not is_new()
    for name in (*image_inputs.SOURCES, "deploy/locks/rank.txt"):
        file = checkout / name / "file" if (checkout / name).is_dir() else checkout / name
        file.write_text(file.read_text() + "\n")
        assert is_new(), name
    (checkout / "suite" / "file").rename(checkout / "suite" / "another")
    assert is_new()
    assert is_new(inputs | {"BASE_IMAGE": "sha256:2"})
    (checkout / "wheels" / "torch.whl").write_text("1")
    digests[-1] = digest()
    assert digests[-1] in digests[:-1], "the lock says which wheel"
    other = inputs | {"TORCH": "torch==2.14.0"}
    assert is_new(other)
    (checkout / "wheels" / "torch.whl").write_text("2")
    assert is_new(other)
    places = {"TORCH_INDEX": "http://a", "PIP_INDEX_URL": "http://b", "PIP_NO_INDEX": "1"}
    digests.append(digest())
    assert not is_new(inputs | places), "hashes say which files"
    for name, value in places.items():
        assert is_new(other | {name: value}), "without a hash the place decides"


def test_an_image_tells_why_it_is_old(checkout: Path) -> None:
    build = {"TORCH": "torch==2.14.0", "BASE_IMAGE": "sha256:1", "PIP_INDEX_URL": "http://a"}

    def inputs(**other: str) -> dict[str, str]:
        return image_inputs.input_digests(build | other, checkout)

    label = image_inputs.label_of_inputs(inputs(), checkout)
    assert image_inputs.why_old("", inputs(), checkout) == "old", "it was built before labels"
    moved = inputs(PIP_INDEX_URL="http://user:secret@b")
    assert image_inputs.why_old(label, moved, checkout) == "old: other places of packages"
    assert moved["PIP_INDEX_URL"][:12] not in image_inputs.label_of_inputs(moved, checkout)
    (checkout / "suite" / "file").write_text("after")
    changed = inputs(TORCH="torch==2.14.1")
    assert image_inputs.why_old(label, changed, checkout) == "old: other suite, TORCH"
    elsewhere = image_inputs.why_old(label, inputs(), checkout.parent)
    assert elsewhere.endswith(
        "suite; it is of another checkout: IMAGE=NAME gives each its own image"
    )


class Images:
    """An engine that has images, and notes which are built."""

    def __init__(self, *names: str) -> None:
        self.there = {name: made_image(f"sha256:{name}", name) for name in names}
        self.built: list[dict[str, Any]] = []
        self.says: list[str] = []
        self.in_use: set[str] = set()
        self.images = SimpleNamespace(get=self._get, remove=self._remove)
        self.api = SimpleNamespace(build=self._build)

    def _get(self, name: str) -> Any:
        for key, image in self.there.items():
            if name in (key, image.id):
                return image
        raise docker.errors.ImageNotFound(name)

    def _remove(self, name: str) -> None:
        if name in self.in_use:
            raise docker.errors.APIError("a container is made of it")
        del self.there[name]

    def _build(self, **asked: Any) -> Iterator[dict[str, str]]:
        self.built.append(asked)
        if (replaced := self.there.pop(asked["tag"], None)) is not None:
            replaced.tags.remove(asked["tag"])
            self.there[replaced.id] = replaced
        made = made_image(f"sha256:{len(self.built)}", asked["tag"], asked["labels"])
        self.there[asked["tag"]] = made
        return iter([{"stream": text} for text in self.says])


def made_image(name: str, tag: str, labels: dict[str, str] | None = None) -> Any:
    return SimpleNamespace(id=name, tags=[tag], labels=labels or {})


def test_a_build_tells_its_steps_and_leaves_no_predecessor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = Images("shardproof-base", "shardproof-rank")
    free = ["Step 1/3 : FROM base", "\n", " ---> 1\n", "Step 2/3 : RUN id", " ---> Using cache\n"]
    engine.says = [*free, "Step 3/3 : RUN pip\n  more", "\n", " ---> Running in 1\n", "said\n"]
    engine_room.build(engine)
    assert "sha256:shardproof-rank" in engine.there, "it was none of ours"
    said = capsys.readouterr().out
    assert said.count("Step") == 2 and "(old)" in said and "(missing)" in said, "of two images"
    engine.in_use = {"sha256:2"}
    engine_room.build(engine, force=True)
    told = (
        "building shardproof-rank on shardproof-base (--force) ...\n  Step 3/3 : RUN pip\nbuilding"
    )
    assert told in capsys.readouterr().out
    assert {image.id for image in engine.there.values()} == {
        *("sha256:shardproof-base", "sha256:shardproof-rank"),
        *("sha256:2", "sha256:3", "sha256:4"),
    }, "what a container is made of stays"


def test_only_what_is_old_is_built_and_all_of_it_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (*image_inputs.ARGUMENTS, "BASE_IMAGE", "IMAGE"):
        monkeypatch.delenv(name, raising=False)
    engine = Images("shardproof-base")
    told = engine_room.build(engine)
    assert [asked["tag"] for asked in engine.built] == ["shardproof-rank", "shardproof-judge"]
    assert {asked["buildargs"]["BASE_IMAGE"] for asked in engine.built} == {"shardproof-base"}
    assert told["base"] == "shardproof-base" and told["base_id"] == "sha256:shardproof-base"
    assert told["torch"] == "torch==2.13.0" and told["torch_is_locked"]
    assert (told["rank"], told["judge"]) == ("sha256:1", "sha256:2")
    assert told["targets"] == ["rank", "judge"] and len(told["source"]) == 32
    assert engine_room.build(engine) == told and len(engine.built) == 2
    everything = engine_room.build(engine, targets=EVERYTHING)
    assert (everything["rank"], everything["judge"]) == ("sha256:3", "sha256:4")
    assert everything["targets"] == [asked["target"] for asked in engine.built[2:]]
    engine.there["shardproof-base"].id = "sha256:another"
    assert engine_room.build(engine)["base_id"] == "sha256:another" and len(engine.built) == 6
    monkeypatch.setenv("TORCH", "torch==2.14.0")
    monkeypatch.setenv("PIP_INDEX_URL", "https://user:secret@mirror/simple")
    told = engine_room.build(engine)
    assert len(engine.built) == 8 and not told["torch_is_locked"]
    assert "secret" in engine.built[-1]["buildargs"]["PIP_INDEX_URL"]
    assert "secret" not in json.dumps(told), "run.json is passed on"
    monkeypatch.setenv("IMAGE", "registry.example/mine")
    engine_room.build(engine)
    assert engine.built[-1]["tag"] == "registry.example/mine-judge"
    assert "secret" not in capsys.readouterr().out


def test_images_that_are_not_old_are_told_to_be_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("IMAGE", raising=False)
    engine = Images("shardproof-base")
    monkeypatch.setattr(engine_room, "client", lambda: engine)
    first, second = (here("cluster", "build").stdout for _ in range(2))
    assert "up to date" not in first
    assert second == "shardproof-rank is up to date\nshardproof-judge is up to date\n"


def test_the_base_of_the_dockerfile_goes_before_one_that_was_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("BASE_IMAGE", raising=False)
    public = image_inputs.default_argument("BASE_IMAGE")
    assert engine_room._base_image(Images("shardproof-base", public)) == public
    assert engine_room._base_image(Images("shardproof-base")) == "shardproof-base"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("IMAGE", "Upper"),
        ("IMAGE", "a b"),
        ("IMAGE", "../a"),
        ("BASE_IMAGE", "--privileged"),
        ("BASE_IMAGE", "python:3.11 AS x\nRUN id"),
        ("BASE_IMAGE", "python@sha256:1"),
        ("TORCH", "--index-url=http://x"),
        ("TORCH", "torch==2.13.0 evil"),
        ("TORCH", 'torch"; id; "'),
        ("TORCH_INDEX", "-r /etc/passwd"),
        ("PIP_INDEX_URL", "ftp://x"),
        ("PIP_NO_INDEX", "maybe"),
    ],
)
def test_names_that_are_none_are_bad_input(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SelectionError, match=rf"is not .*\({name}\)"):
        engine_room.build(Images("shardproof-base"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("BASE_IMAGE", "registry.example:5000/a/python:3.11-slim@sha256:" + "0" * 64),
        ("TORCH", "torch==2.14.0+cu130"),
        ("TORCH", "torch>=2.11,<2.14"),
        ("TORCH", "torch @ https://host/torch-2.14.0.whl#sha256=00"),
    ],
)
def test_names_that_are_some_are_taken(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    engine = Images("shardproof-base")
    engine_room.build(engine)
    assert engine.built[0]["buildargs"][name] == value


def test_cases_choose_the_image() -> None:
    lean = made_case("reference/ddp", {"replicate": 2}, backend="gloo")
    assert Needs.of_cases([lean], 1).targets == LEAN
    over_mpi = made_case("reference/ddp", {"replicate": 2}, backend="mpi")
    assert Needs.of_cases([lean, over_mpi], 1).targets == EVERYTHING
    deepspeed = made_case("deepspeed/zero1", {"shard": 2}, backend="gloo")
    assert Needs.of_cases([deepspeed], 1).targets == EVERYTHING
    relation = {"relation": {"same_as": {"implementation": "deepspeed/zero1"}}}
    beside = made_case("reference/zero1", {"shard": 2}, backend="gloo", expect=relation)
    assert Needs.of_cases([beside], 1).targets == EVERYTHING


# ----------------------------------------------------------------------------------- containers


@pytest.fixture(scope="module")
def engine() -> Any:
    """A container engine with all images."""
    found = real_engine()
    engine_room.build(found, targets=EVERYTHING)
    return found


def inside(engine: Any, target: str, program: str) -> str:
    """What a program of Python prints in an image."""
    command = ["python", "-c", program]
    how = {"remove": True, "labels": {"shardproof": "test"}, "network_mode": "none"}
    return str(engine.containers.run(engine_room.image_name(target), command, **how).decode())


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_images_are_slim_and_without_rights(engine: Any) -> None:
    sizes = {"rank": 1.4e9, "rank-all": 1.7e9}
    for target, most in sizes.items():
        assert engine.images.get(engine_room.image_name(target)).attrs["Size"] <= most
    probe = (
        "import os, importlib.util as u, shardproof.cluster.torchrun\n"
        "from shardproof.workloads import data\n"
        "print(os.getuid(), len(data.digits()[0]), *[n for n in\n"
        "      ('typer', 'sklearn', 'scipy', 'pandas', 'deepspeed', 'mpi4py') if u.find_spec(n)])"
    )
    lean, judge = "10001 1797", "typer sklearn scipy pandas"
    assert inside(engine, "rank", probe).strip() == lean
    assert inside(engine, "rank-all", probe).strip() == f"{lean} deepspeed mpi4py"
    assert inside(engine, "judge", probe).strip() == f"{lean} {judge}"
    assert inside(engine, "judge-all", probe).strip() == f"{lean} {judge} deepspeed mpi4py"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_mpi_and_deepspeed_run_over_nodes(engine: Any, tmp_path: Path) -> None:
    """What holds on one machine holds there; a rank that is killed is named."""
    tmp_path.chmod(0o755)
    (tmp_path / "mine.py").write_text(
        "import os, signal\n"
        "from shardproof import registry\n"
        "class Mine(registry.load('reference/zero2')):\n"
        "    def step(self, batch, observe):\n"
        "        import torch.distributed as dist\n"
        "        if dist.get_rank() == 3: os.kill(os.getpid(), signal.SIGKILL)\n"
        "        return super().step(batch, observe)\n"
    )
    (tmp_path / "s.yaml").write_text(
        "name: over\nabout: MPI and DeepSpeed over nodes\nsees: crashes\n"
        "workload: {name: charnames_gpt}\n"
        "matrix: {implementation: ['mine:Mine', reference/zero2], backend: mpi,\n"
        "  mesh: {shard: 4}, optimizer: sgd, lane: bitwise}\n"
        "include: [{implementation: deepspeed/zero2, backend: gloo, mesh: {shard: 4},\n"
        "  optimizer: sgd, lane: working_precision, reason: it has no mesh of MPI}]\n"
        "checks: equivalence\n"
    )

    done = shardproof("cluster", "run", "s.yaml", "--results", "there", cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    told = {}
    for line in (tmp_path / "there" / "cases.jsonl").read_text().splitlines():
        told[json.loads(line)["case"]["implementation"]] = json.loads(line)
    assert told["reference/zero2"]["verdict"].startswith("pass")
    assert told["deepspeed/zero2"]["verdict"].startswith("pass")
    assert told["mine:Mine"]["verdict"] == "crash"
    assert "rank 3 killed" in told["mine:Mine"]["reason"]
    invocation = json.loads((tmp_path / "there" / "run.json").read_text())["invocations"][-1]
    assert invocation["cluster"]["images"]["targets"] == [*EVERYTHING]
    assert not cluster.parts(engine, invocation["cluster"]["name"])
