"""``prove`` of what a script itself defines: one file is enough."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest
from commands import here, module, pytest_here, python, script

from shardproof import prove
from shardproof.errors import SelectionError

pytestmark = pytest.mark.launches

HEAD = """\
import torch.distributed as dist
from torch import nn, randn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import beside
from shardproof import OwnWorkload, prove
from shardproof.impls.reference.zero1 import ReferenceZero1


class Mine(ReferenceZero1):
    pass


class Order(ScheduleGPipe):
    pass


def mean(group, bucket):
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0] / beside.size(group))


def sharded(groups, settings):
    return ZeroRedundancyOptimizer(groups, settings.kind, **settings.arguments)


def batch(size, generator):
    inputs = randn(size, 6, generator=generator)
    return inputs, inputs.sum(1).gt(0).long()


LOSS = nn.CrossEntropyLoss(reduction="none")
NET = OwnWorkload(lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)), LOSS, batch)
PLAN = {"blocks.*.mlp.up": ColwiseParallel(), "blocks.*.mlp.down": RowwiseParallel()}
"""
BESIDE = "import torch.distributed as dist\ndef size(group): return dist.get_world_size(group)\n"
GUARD = 'if __name__ == "__main__":\n    '
SHOW = "for row in {}.to_dict('records'): print(row['case'], row['verdict'], row['reason'])\n"


def program(folder: Path, *calls: str, name: str = "mine.py", guard: str = GUARD) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "beside.py").write_text(BESIDE)
    text = "".join(guard + SHOW.format(call) for call in calls)
    (folder / name).write_text(HEAD + text)
    return folder / name


@pytest.mark.parametrize(
    "call",
    [
        "prove(Mine, worlds=2)",
        "prove(hook=mean, worlds=2)",
        "prove(optimizer=sharded, worlds=2)",
        "prove(schedule=Order, worlds=2)",
        "prove(tensor_plan=PLAN, worlds=2)",
        "prove(Mine, workload=NET, worlds=2)",
    ],
)
def test_a_script_judges_what_it_defines(tmp_path: Path, call: str) -> None:
    file = program(tmp_path, call)
    done = script(file, cwd=tmp_path)
    assert done.stdout.split()[1:2] == ["pass"], done.stdout + done.stderr


def test_a_wrong_one_in_a_script_fails(tmp_path: Path) -> None:
    file = program(tmp_path, "prove(hook=mean, worlds=2)")
    file.write_text(file.read_text().replace(" / beside.size(group)", ""))
    done = script(file, cwd=tmp_path)
    assert " fail " in done.stdout and "times too large" in done.stdout, done.stdout


def test_it_is_named_by_its_file_and_the_command_takes_that(tmp_path: Path) -> None:
    program(tmp_path / "of mine", "prove(Mine, worlds=2)", name="a-script.py")
    done = script(Path("of mine/a-script.py"), cwd=tmp_path)
    name = "of mine/a-script.py:Mine"
    assert done.stdout.startswith(f"prove::{name}::in_memory::shard2::"), done.stdout + done.stderr
    done = here("run", "ddp-gpt", "--impl", name, "--dry-run", cwd=tmp_path)
    assert done.returncode == 0 and name in done.stdout, done.stderr
    done = here("run", "ddp-gpt", "--impl", "of mine/none.py:Mine", "--dry-run", cwd=tmp_path)
    assert done.returncode == 2 and "no file 'of mine/none.py' here" in done.stderr, done.stderr


def test_a_module_of_a_package_is_a_program_too(tmp_path: Path) -> None:
    file = program(tmp_path / "package", "prove(Mine, worlds=2)")
    file.write_text(file.read_text().replace("import beside", "from package import beside"))
    done = module("package.mine", cwd=tmp_path)
    assert done.stdout.startswith("prove::package.mine:Mine::"), done.stdout + done.stderr


def test_children_of_multiprocessing_judge_what_the_script_defines(tmp_path: Path) -> None:
    file = program(tmp_path, "prove(Mine, worlds=2)")
    text = file.read_text().replace(GUARD, "def body():\n    ")
    start = "import multiprocessing as m; p = m.get_context('spawn').Process(target=body)"
    file.write_text(f"{text}{GUARD}{start}; p.start(); p.join()\n")
    done = python(file.name, cwd=tmp_path)
    assert done.stdout.startswith("prove::mine.py:Mine::"), done.stdout + done.stderr
    assert "pass" in done.stdout


def test_without_a_guard_ranks_stop_where_the_program_begins(tmp_path: Path) -> None:
    file = program(tmp_path, "prove(hook=mean, worlds=2)", guard="")
    line = len(file.read_text().splitlines())
    file.write_text(file.read_text() + "def later(group, bucket): ...\nprove(hook=later)\n")
    done = python(file.name, cwd=tmp_path)
    assert done.stdout.split()[1:2] == ["pass"], done.stdout + done.stderr
    assert f"has no 'later' in mine.py before its call of prove() in line {line}" in done.stderr
    assert 'put such calls under `if __name__ == "__main__":`' in done.stderr


def test_a_module_that_calls_prove_when_it_is_imported_is_told_so(tmp_path: Path) -> None:
    program(tmp_path / "package", "prove(Mine, worlds=2)", guard="", name="mine.py")
    file = tmp_path / "package" / "mine.py"
    file.write_text(file.read_text().replace("import beside", "from package import beside"))
    with pytest.raises(SelectionError) as refused:
        module("package.mine", cwd=tmp_path)
    told = str(refused.value)
    assert "'package.mine:Mine' calls prove() while ranks import it" in told
    assert 'put the call under `if __name__ == "__main__":`' in told


@pytest.mark.parametrize("way", ["text", "no .py"])
def test_what_no_file_holds_is_refused_with_a_remedy(tmp_path: Path, way: str) -> None:
    text = "from shardproof import prove\ndef mean(group, bucket): ...\nprove(hook=mean)"
    (tmp_path / "piped").write_text(f"exec({text!r})")
    words = ["-c", text] if way == "text" else ["piped"]
    done = python(*words, cwd=tmp_path)
    told = done.stderr.splitlines()[-1]
    assert "ranks cannot import this hook from a notebook, console or pipe (mean)" in told
    assert "%%writefile" in told


def test_what_a_function_defines_is_refused_by_its_place(tmp_path: Path) -> None:
    def inner(group: object, bucket: object) -> None: ...

    with pytest.raises(SelectionError) as refused:
        prove(hook=inner)
    line = inner.__code__.co_firstlineno
    assert str(refused.value).startswith(f"{__file__}:{line}: ranks cannot import this hook (")
    assert "define it with a name at the top level of a module or script" in str(refused.value)
    with pytest.raises(SelectionError, match=r"ranks cannot import this hook \(3\)"):
        prove(hook=3)


@pytest.mark.parametrize("given", [{"implementation": "none"}, {"hook": "nowhere:mine"}])
def test_wrong_input_shows_no_frame_of_the_suite_but_its_own(given: dict[str, str]) -> None:
    with pytest.raises(SelectionError) as refused:
        prove(**given)  # type: ignore[arg-type]
    assert refused.value.__suppress_context__
    own, told = traceback.extract_tb(refused.value.__traceback__)
    assert own.filename == __file__ and told.filename.endswith("prove.py")


def test_pytest_shows_a_user_their_own_line_alone(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        "def test_mine(shardproof):\n    shardproof('reference/dpd')\n"
    )
    done = pytest_here("-q", cwd=tmp_path)
    assert "did you mean reference/ddp?" in done.stdout and done.returncode == 1, done.stdout
    assert "prove.py" not in done.stdout and "registry/" not in done.stdout, done.stdout


def test_what_is_loaded_by_its_file_is_called_by_the_file(tmp_path: Path) -> None:
    """As ``prove`` names it: no name that nobody has written, in messages and in paths."""
    text = "class Odd(Exception): ...\ndef mean(group, bucket): raise TypeError(f'an {Odd}')\n"
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "hooks.py").write_text(text)
    code = "from shardproof import prove; print(*prove(hook='sub/hooks.py:mean', worlds=2).loc[0])"
    (tmp_path / "judge.py").write_text(code)
    done = script(tmp_path / "judge.py", cwd=tmp_path)
    assert "an <class 'sub/hooks.py.Odd'>" in done.stdout, done.stdout
    assert "file_of_a_program" not in done.stdout
