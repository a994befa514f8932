"""Each command of README.md and docs/ is run as the page has it, or is listed with who runs it.

``shardproof run`` and ``bench`` are run with ``--dry-run`` here, and with a small ``--budget`` in
``make slow``; commands about a run read one that is made here.  Any other command needs an entry in
``ELSEWHERE``: a page with a new one fails until it has one.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import pytest
from commands import here

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "results/README.md")),
    # Tutorials are followed by tests/docs/test_tutorials.py.
    *sorted(
        path
        for path in (ROOT / "docs").glob("*.md")
        if path.stem != "first-verdict" and not path.stem.startswith("tutorial-")
    ),
    *sorted((ROOT / "deploy").rglob("*.md")),
]
#: Words that begin a command; variables may stand before them.
_BEGINS = re.compile(
    r"(?:\w+=(?:\$\([^)]*\)|\S)+ )*"
    r"(?:shardproof|make|python3?|pip|pytest|torchrun|mpirun|srun|sbatch|docker|kubectl|source|git"
    r"|deploy/\S+\.sh) "
)
#: Languages of fenced blocks that are typed; a block that is only indented is, too.
_TYPED = ("sh", "bash", "shell", "console")
#: Pattern of a command -> the marker of the tests that run it (``make`` has a target of that
#: name), and which they are, or why none can.
ELSEWHERE = {
    "make *": ("ci", ".ci/run makes them; here only that the target exists"),
    "pip install *": ("slow", "tests/commands/test_installed.py, tests/plugins"),
    "shardproof cluster *": ("clusters", "tests/cluster: needs a container engine"),
    "shardproof reproduce * --cluster *": ("clusters", "tests/cluster/test_cluster_reruns.py"),
    "*docker compose *": ("clusters", "tests/cluster/test_cluster.py"),
    "kubectl *": ("clusters", "tests/cluster/deploy/test_kubernetes.py: needs a cluster"),
    "sbatch *": ("clusters", "tests/cluster/deploy/test_slurm.py: needs a Slurm"),
    "deploy/slurm/try.sh *": ("clusters", "tests/cluster/deploy/test_slurm.py"),
    "python deploy/clouds/*": ("none", "needs an account; tests/cluster/deploy/test_clouds.py"),
    "python3 deploy/gpu.py *": ("gpu", "tests/backends/test_gpu.py: needs a GPU"),
    "* --on ray*": ("slow", "tests/cluster/test_on_ray.py: needs the extra ray"),
    "shardproof watch *": ("launches", "tests/watch: needs a script of the reader's"),
    "*torchrun *": ("launches", "tests/cluster/test_launch_ways.py, tests/watch"),
    "mpirun *": ("launches", "tests/cluster/test_launch_ways.py"),
    "python -m shardproof.cluster.*": ("launches", "tests/cluster/test_judged.py"),
    "shardproof init *": ("launches", "tests/commands/test_init.py"),
    "shardproof checkpoint *": ("launches", "tests/commands/test_checkpoint_command.py"),
    "shardproof estimate *": ("test", "tests/estimate: formulas only"),
    "shardproof locate *": ("test", "tests/locate: planted faults, and a clean case"),
    "shardproof simulate *": ("test", "tests/simulate: one rank of a small shape"),
    "shardproof plan *": ("test", "tests/simulate/test_plan.py: of a small shape"),
    "python docs/make_choice.py": ("slow", "tests/simulate/test_choice.py: minutes of CPU"),
    "python docs/make_published.py": ("slow", "tests/simulate/test_published.py: minutes of CPU"),
    "shardproof merge *": ("test", "tests/runs/test_shards.py: needs the parts of four machines"),
    "shardproof compare results/here results/there": ("clusters", "tests/cluster/test_cluster.py"),
    "shardproof run --rerun-failed *": ("test", "tests/commands/test_rerun.py: needs failures"),
    "shardproof site *": ("test", "tests/site: a site takes seconds, and writes a folder"),
    "shardproof history *": ("test", "tests/site/test_series.py: a series of several runs"),
    "shardproof shrink *": ("test", "tests/shrink: needs failures"),
    "shardproof run * --shrink": ("test", "tests/shrink: needs failures"),
    "shardproof reproduce RUN -k *": ("test", "tests/reproduce/test_reproduced.py"),
    "python -m tools.*": ("slow", "tests/studies, tests/coverage: hours"),
    "python settings.py": ("test", "tests/docs/test_tutorials.py: has that script"),
    "python examples/*": ("launches", "tests/docs/test_examples.py"),
    "python docs/findings/*": ("slow", "tests/docs/test_findings.py"),
    "* --backend acme*": ("test", "tests/plugins/test_backend_plugin.py: has that package"),
    "* --impl flat/*": ("test", "tests/plugins/test_strategy_plugin.py: has that package"),
    "*<*>*": ("none", "a name of the reader's stands in the brackets"),
    "* my.yaml *": ("none", "a scenario of the reader's"),
    "shardproof list coverage --campaign 200 --impl mine:Class": ("none", "a class of theirs"),
    "shardproof mutants --impl ddp_reports_infinite_loss": (
        "launches",
        "tests/docs/test_add_a_check.py: has that fault",
    ),
    "shardproof bench checkpoint --parameters 200M*": ("slow", "tests/bench: takes 10 GB of disk"),
    "*your_package.module:YourZero1*": ("none", "a class of the reader's"),
}
#: A run of this is what the pages call RUN.
CASE = "ddp-gpt::reference/ddp+small_buckets::in_memory::replicate2::sgd::noclip::fp64::quick"
#: Names of the reader's -> what stands for them here.
STANDS_FOR = {"your_package.module:YourClass": "my_ddp:MyDDP", "RUN": "results/RUN"}
#: Seconds of a minute that a command may run cases in ``make slow``.
BUDGET = "0.1"


class Command(NamedTuple):
    """A command, with the first place that has it."""

    text: str
    page: str
    line: int


def typed(text: str) -> Iterator[tuple[int, str]]:
    """Lines that a reader types, with their numbers: of fenced blocks, or indented; no output."""
    fence: str | None = None
    before = ""
    for number, line in enumerate(text.splitlines(), 1):
        if mark := re.match(r" *```(\w*)", line):
            fence = mark[1] if fence is None else None
        elif fence in _TYPED or (fence is None and line.startswith("    ")):
            whole = before + line.strip()
            if whole.endswith("\\"):
                before = whole[:-1]
                continue
            yield number, whole.removeprefix("$ ")
        before = ""


def commands() -> list[Command]:
    found: dict[str, Command] = {}
    for page in PAGES:
        for number, line in typed(page.read_text(encoding="utf-8")):
            for part in re.split(r" ; |; (?=docker)|(?<!')\s+#\s.*$", line):
                text = " ".join((part or "").split())
                if _BEGINS.match(f"{text} "):
                    found.setdefault(text, Command(text, str(page.relative_to(ROOT)), number))
    return list(found.values())


ALL = commands()


def entry(command: Command) -> tuple[str, str] | None:
    """Who runs it, if it stands in the list."""
    return next((how for pattern, how in ELSEWHERE.items() if fits(command, pattern)), None)


def fits(command: Command, pattern: str) -> bool:
    return fnmatchcase(f"{command.text} ", pattern if pattern.endswith("*") else f"{pattern} ")


def words(command: Command) -> list[str]:
    """What is typed behind ``shardproof``, with what stands for the names of the reader's."""
    text = command.text.replace(" [RUN...]", "")
    for name, here_it_is in STANDS_FOR.items():
        text = re.sub(rf"(?<![\w/]){re.escape(name)}(?![\w-])", here_it_is, text)
    split = shlex.split(text.split(" > ")[0])[1:]
    # Patterns of files are the shell's to fill in; those of systems have no such files.
    found = ((sorted(Path().glob(word)) if "*" in word else []) or [word] for word in split)
    return [str(path) for paths in found for path in paths]


def verb(command: Command) -> str:
    first, *rest = command.text.split()
    return rest[0] if first == "shardproof" and rest else first


OWN = [one for one in ALL if entry(one) is None]
CASES = [one for one in OWN if verb(one) in ("run", "bench")]
FAULTS = [one for one in OWN if verb(one) == "mutants"]


def kind(command: Command) -> tuple[object, ...]:
    """The path of a command through the code: its verb, its options, and what reads its words."""
    known = ("collectives", "checkpoint", "peers", "scaling")
    first = next((word for word in known if verb(command) == "bench" and word in command.text), "")
    options = frozenset(re.findall(r"(?<=\s)--?[a-z][\w-]*", command.text))
    return verb(command), first, options, "claims" in command.text, ":" in command.text


#: One command of each kind: those that only choose other cases take the same path.
KINDS = [*{kind(one): one for one in reversed([*CASES, *FAULTS])}.values()]
#: Verbs of commands that read what is there, and the exit codes that they may end with: what a gate
#: says of one case hangs on the baseline.
READ = {
    **dict.fromkeys(
        ("--help", "explain", "list", "schema", "verify", "bundle", "report", "badges", "estimate"),
        (0,),
    ),
    "compare": (0, 3),
    "gate": (0, 1, 3),
    "doctor": (0, 3),
    "reproduce": (0,),
    "estimate": (0,),
}
READING = [one for one in OWN if verb(one) in READ]


def name(command: Command) -> str:
    return command.text


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, its bundle, and the files that the pages have the reader write."""
    folder = tmp_path_factory.mktemp("reader")
    # A page that names files of a checkout says so; scenarios are found without one.
    (folder / "deploy").symlink_to(ROOT / "deploy")
    shutil.copytree(ROOT / "results", folder / "results", ignore=shutil.ignore_patterns("2*"))
    pages = {
        "mine.py": "own-class",
        "my_ddp.py": "add-an-implementation",
        "mine.yaml": "own-schedule",
    }
    for file, name in pages.items():
        page = (ROOT / f"docs/{name}.md").read_text(encoding="utf-8")
        found = re.search(rf"```\w+\n# {re.escape(file)}\n(.*?)```", page, re.DOTALL)
        assert found, f"{name} lost its {file}"
        (folder / file).write_text(found[1])
    done = here("run", CASE, "--results", "results/RUN", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    done = here("bundle", "results/RUN", "--output", "evidence.tar.gz", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_command_is_run_or_listed() -> None:
    assert len(ALL) > 150
    left = [one for one in OWN if one not in (*CASES, *FAULTS, *READING)]
    assert not left, f"give each an entry in ELSEWHERE: {left}"


#: What no wheel brings along.
_OF_A_CHECKOUT = re.compile(
    r"\bresults/baselines/|(?<![\w/])deploy/|\bpython3? (-m tools\b|docs/|deploy/)|^make "
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_whose_commands_need_a_checkout_says_so(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    needs = [line for _, line in typed(text) if _BEGINS.match(line) and _OF_A_CHECKOUT.search(line)]
    assert not needs or re.search(r"\b(checkout|git clone|this repository)\b", text), needs


def test_every_entry_of_the_list_is_of_a_command() -> None:
    for pattern, (marker, reason) in ELSEWHERE.items():
        assert any(fits(one, pattern) for one in ALL), pattern
        assert marker in ("none", "ci", "test", "slow", "launches", "clusters", "gpu") and reason
        for path in re.findall(r"tests/[\w/.]+\w", reason):
            assert (ROOT / path).exists(), path


def test_a_new_command_without_an_entry_is_seen() -> None:
    page = "Text\n\n    shardproof frob RUN   # does it\n\n```sh\nfrobnicate\n$ make frob\n```\n"
    page += "```text\nmake output\n```\n    shardproof run a \\\n        -k b\n"
    lines = [line for _, line in typed(page)]
    assert lines[0].startswith("shardproof frob") and lines[1:3] == ["frobnicate", "make frob"]
    assert "make output" not in lines and lines[3].split() == ["shardproof", "run", "a", "-k", "b"]
    odd = Command("shardproof frob RUN", "page.md", 1)
    assert entry(odd) is None and verb(odd) not in READ


@pytest.mark.parametrize("one", [one for one in ALL if verb(one) == "make"], ids=name)
def test_a_target_of_make_exists(one: Command) -> None:
    target = one.text.split()[1]
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), one


@pytest.mark.parametrize("one", CASES, ids=name)
def test_a_command_that_runs_cases_chooses_some(one: Command, place: Path) -> None:
    done = here(*_in(place, one), "--dry-run", cwd=place, paths=[place])
    assert done.returncode == 0, f"{one}: {done.stdout}{done.stderr}"


@pytest.mark.parametrize("one", READING, ids=name)
def test_a_command_about_a_run_does_what_it_says(one: Command, place: Path) -> None:
    given = _in(place, one)
    if "--output" in given and (place / given[-1]).is_file():
        (place / given[-1]).unlink()  # that of the fixture, which is made again
    done = here(*given, cwd=place)
    told = done.stdout + done.stderr
    assert done.returncode in READ[verb(one)] and "Traceback" not in told, f"{one}: {told}"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("one", KINDS, ids=name)
def test_a_command_that_runs_cases_runs_them(one: Command, place: Path, tmp_path: Path) -> None:
    """As many as fit into a few seconds; whole selections are what ``make`` and CI run."""
    given = _in(place, one)
    more = ["--rounds", "3"] if {"bench", "collectives"} <= {*given} else ["--budget", BUDGET]
    if more[0] in given:  # minutes, or many rounds, for who types it
        at = given.index(more[0])
        del given[at : at + 2]
    if "--results" not in given and "--resume" not in given:
        more += ["--results", str(tmp_path / "run")]
    done = here(*given, *more, cwd=place, paths=[place])
    told = done.stdout + done.stderr
    assert done.returncode in (0, 3) and "Traceback" not in told, f"{one}: {told}"


def _in(place: Path, one: Command) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)  # for the names that a shell would put in the place of a pattern
        return words(one)
