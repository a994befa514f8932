"""Inputs that nobody would write, for every command that reads something.

    python tests/support/fuzzing.py --minutes 10      what breaks goes into tests/fuzz/corpus

An input is a file and the commands that read it, both drawn from a number.  A command must end with
a documented exit code, and never with a traceback; what it prints has no control characters.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gzip
import hashlib
import io
import json
import random
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import synthetic
import synthetic_run

from shardproof.cases.kills import pair
from shardproof.commands import main
from shardproof.commands.execution import Execution
from shardproof.compare import baseline
from shardproof.registry import load_mutant
from shardproof.runs.durations import Durations
from shardproof.runs.run_folder import RunFolder
from shardproof.scenarios.budget import fit_cases

ROOT = Path(__file__).parents[2]
CORPUS = ROOT / "tests" / "fuzz" / "corpus"
CODES = (0, 1, 2, 3)
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")

#: What stands in place of a value.
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**70, -(2**70), 0.5, 1e308, -0.0, 1e-320),
    *("", " ", "nan", "inf", "-inf", "\x00", "\x1b[2J", "\ud800", "é", "x" * 5000, "../../etc"),
    *(
        "/proc/self/mem",
        "pass",
        "fail",
        "0",
        "1/0",
        "1/3",
        "::",
        "a::b::c::d::e::f::g::h",
        "[seed1]",
    ),
    *([], {}, [[]], [None], {"": ""}, {"a": None}, [{}], ["x"], [1, 2], {"kind": "case"}),
)
TOKENS = (
    *(
        "~",
        "[]",
        "{}",
        "[",
        "{",
        "]",
        "}",
        ":",
        "-",
        "- ",
        "?",
        "&a ",
        "*a",
        "<<: *a",
        "!!set",
        "!x",
    ),
    *(
        "|",
        ">",
        "'",
        '"',
        "#",
        "%YAML 9",
        "---",
        "...",
        "\t",
        "\x00",
        "\x85",
        "\ufeff",
        "1e999",
        "0x1",
    ),
    *(
        "yes",
        "012",
        "1:30",
        ".nan",
        "-1",
        "99999999999999999999",
        "null",
        "é",
        "\ud83d",
        "a: b",
        "[[[[",
    ),
)


@dataclass(frozen=True)
class Input:
    """``content`` in place of the file ``name`` of ``base``, read by the command ``words``."""

    base: str
    name: str
    content: bytes
    words: tuple[str, ...]

    def save(self, why: str) -> Path:
        """Keep it, with why, in the corpus; of files in tracebacks the names, not the folders."""
        why = re.sub(r'(File ")[^"]*/', r"\1", why)
        fields = {**vars(self), "content": gzip.compress(self.content, mtime=0).hex(), "why": why}
        text = json.dumps(fields, indent=1) + "\n"
        path = CORPUS / f"{self.base}-{hashlib.sha256(text.encode()).hexdigest()[:10]}.json"
        path.write_text(text)
        return path

    @classmethod
    def load(cls, path: Path) -> Input:
        fields = json.loads(path.read_text())
        content = gzip.decompress(bytes.fromhex(fields["content"]))
        return cls(fields["base"], fields["name"], content, tuple(fields["words"]))


def bases(place: Path) -> Path:
    """Everything that inputs are made of, in ``place``: runs, a bundle, a baseline, YAML files."""
    durations = Durations(place / "durations.json")
    made = pair(load_mutant("ddp_never_reduces"))
    with RunFolder(place / "real", ["test"]) as folder:
        schedule = fit_cases([made.parent, made.case], durations, 1, None)
        Execution(folder, schedule, 1, durations).run()
    synthetic_run.write_run(
        place / "made",
        8,
        3,
        kills=4,
        survivors=1,
        benches=2,
        scalings=True,
        pipelines=1,
        left_out=1,
    )
    baseline.save(baseline.load(str(place / "real")), place / "base.json")
    call("bundle", str(place / "real"), "-o", str(place / "run.tar.gz"))
    (place / "policy.yaml").write_bytes((ROOT / "deploy/ci/policy.yaml").read_bytes())
    return place


YAMLS = sorted((ROOT / "scenarios").rglob("*.yaml"))


def draw(place: Path, number: int) -> Input:
    """The input of that number."""
    source = random.Random(number)
    kind = source.choice(
        ("words", "yaml", "yaml", "policy", "baseline", "bundle", "run", "run", "run")
    )
    if kind == "words":
        return Input("words", "", b"", _words(source))
    if kind == "yaml":
        path = source.choice(YAMLS)
        words = source.choice(
            (
                ("check-scenario", "FILE"),
                ("run", "FILE", "--dry-run"),
                ("bench", "FILE", "--dry-run"),
            )
        )
        return Input("yaml", "in.yaml", _text(source, path.read_text()), words)
    if kind == "policy":
        words = ("gate", "real", "--against", "base.json", "--policy", "FILE")
        return Input("policy", "in.yaml", _text(source, (place / "policy.yaml").read_text()), words)
    if kind == "baseline":
        words = source.choice(
            (
                ("compare", "FILE", "real"),
                ("compare", "real", "FILE", "--by", "hardware"),
                ("gate", "real", "--against", "FILE"),
                ("compare", "FILE", "base.json", "--format", "csv"),
            )
        )
        return Input(
            "baseline", "in.json", changed_json(source, (place / "base.json").read_bytes()), words
        )
    if kind == "bundle":
        content = (place / "run.tar.gz").read_bytes()
        if source.random() < 0.7:
            content = gzip.compress(changed_bytes(source, gzip.decompress(content)), 1, mtime=0)
        else:
            content = changed_bytes(source, content)
        words = source.choice((("verify", "FILE"), ("report", "FILE"), ("compare", "FILE", "real")))
        return Input("bundle", "in.tar.gz", content, words)
    base = source.choice(("real", "made"))
    files = sorted(
        p for p in (place / base).rglob("*") if p.suffix in (".json", ".jsonl", ".parquet")
    )
    path = source.choice(files)
    name = path.relative_to(place / base).as_posix()
    words = source.choice(
        (
            ("verify", "RUN"),
            ("report", "RUN"),
            ("report", "RUN", "--format", "html"),
            ("report", "RUN", "--format", "markdown"),
            ("badges", "RUN", "-o", "OUT/badges"),
            ("bundle", "RUN", "-o", "OUT/x.tar.gz"),
            ("compare", "RUN", "base.json"),
            ("gate", "RUN", "--against", "base.json", "--verify"),
            ("run", "--resume", "--results", "RUN", "--dry-run"),
            ("run", "--rerun-failed", "--results", "RUN", "--dry-run"),
        )
    )
    return Input(base, name, _file(source, path), words)


def run(one: Input, place: Path) -> str:
    """What is wrong with how the command ended; empty: nothing."""
    with tempfile.TemporaryDirectory(dir=place) as folder:
        out = Path(folder)
        target = out / one.name
        if one.base in ("real", "made"):
            shutil.copytree(place / one.base, out / "run")
            target = out / "run" / one.name
        if one.name:
            target.write_bytes(one.content)
        if one.base in ("real", "made") and len(one.content) % 2:  # who edits can seal again
            with contextlib.suppress(Exception):
                _seal(out / "run", one.name)
        known = {"RUN": str(out / "run"), "FILE": str(target), "real": str(place / "real")}
        known["base.json"] = str(place / "base.json")
        words = [known.get(word, word.replace("OUT", folder)) for word in one.words]
        return wrong(*call(*words))


def _seal(run: Path, name: str) -> None:
    """A manifest of the run as it is now."""
    synthetic.seal(run)


def wrong(code: object, text: str) -> str:
    """What no command may do."""
    if "Traceback (most recent call last)" in text:
        return text[-3000:]
    if code not in CODES:
        return f"exit code {code}: {text[-500:]}"
    if control := _CONTROL.search(text):
        return (
            f"prints {control[0]!r}: {text[max(0, control.start() - 200) : control.end() + 50]!r}"
        )
    return ""


def call(*words: str) -> tuple[object, str]:
    """Exit code and all output of ``shardproof``, in this process."""
    out = io.StringIO()
    before, sys.argv = sys.argv, ["shardproof", *words]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            main.main()
        code: object = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:  # noqa: BLE001 - whatever it is, it is a finding
        code = traceback.format_exc()
        out.write(str(code))
    finally:
        sys.argv = before
    return code, out.getvalue()


# ------------------------------------------------------------------------------------- mutations

OPTIONS = {
    "run": ("--impl", "--backend", "--world", "-k", "--tier", "--budget", "-j", "--seed", "--junit",
            "--campaign", "--results", "--resume", "--rerun-failed"),
    "list": ("--impl", "--backend", "--world", "-k", "--tier", "--seed"),
    "bench": ("-k", "--backend", "--world", "--size", "--param", "--batch", "--micro-batches",
              "--option-a", "--mesh-a", "--blocks", "--launches", "--goal", "--fail-on"),
    "report": ("--format", "--into"),
    "compare": ("--format", "--by", "--only-changed", "--into"),
    "gate": ("--against", "--policy", "--on", "--annotations", "--verify", "--append"),
    "verify": (),
    "schema": (),
    "check-scenario": (),
    "nothing": ("--version", "-h"),
}  # fmt: skip
ARGUMENTS = (
    *("ddp-gpt", "conformance", "cases", "impls", "checks", "traits", "strong", "peers", "real"),
    *("reference/ddp", "pytorch/ddp", "plain", "reference/*", "gloo", "in_memory", "2", "0", "-1"),
    *(
        "1e9",
        "nan",
        "inf",
        "",
        " ",
        "*",
        "[",
        "a and",
        "not (",
        "(" * 200,
        "x" * 300,
        "k=v",
        "k=",
        "=v",
    ),
    *("replicate=2", "replicate=0", "shard=2,tensor=2", "quick", "full", "table", "json", "html"),
    *(
        "2026-01-01",
        "9999-99-99",
        "/dev/null",
        "/proc/self/mem",
        "/",
        ".",
        "..",
        "\udcff",
        "é",
        "\x1b[2J",
    ),
    *(
        "ddp-gpt::plain::in_memory::replicate1::sgd::noclip::fp64::quick",
        "slower",
        "goal",
        "github",
    ),
)


def _words(source: random.Random) -> tuple[str, ...]:
    command = source.choice(sorted(OPTIONS))
    words = [command]
    for _ in range(source.randint(0, 4)):
        if OPTIONS[command] and source.random() < 0.6:
            words.append(source.choice(OPTIONS[command]))
        if source.random() < 0.8:
            words.append(source.choice(ARGUMENTS))
    return (*words, *(["--dry-run"] if command in ("run", "bench") else []))


def _text(source: random.Random, text: str) -> bytes:
    for _ in range(source.randint(1, 4)):
        lines = text.split("\n")
        place = source.randrange(len(lines))
        how = source.randrange(7)
        if how == 0:
            del lines[place]
        elif how == 1:
            lines.insert(place, lines[source.randrange(len(lines))])
        elif how == 2:
            key, colon, _ = lines[place].partition(":")
            token = source.choice((*TOKENS, str(source.choice(VALUES))))
            lines[place] = f"{key}{colon} {token}"
        elif how == 3:
            at = source.randint(0, len(lines[place]))
            lines[place] = lines[place][:at] + source.choice(TOKENS) + lines[place][at:]
        elif how == 4:
            lines[place] = " " * source.randint(0, 9) + lines[place].lstrip()
        elif how == 5:
            lines = lines[: place + 1]
        else:
            depth = source.choice((5, 40, 2000))
            lines[place] = f"{lines[place].partition(':')[0]}: {'[' * depth}{']' * depth}"
        text = "\n".join(lines)
    return text.encode("utf-8", "surrogatepass")


def changed_bytes(source: random.Random, content: bytes) -> bytes:
    data = bytearray(content)
    for _ in range(source.randint(1, 6)):
        if not data:
            break
        at = source.randrange(len(data))
        how = source.randrange(4)
        if how == 0:
            data[at] ^= 1 << source.randrange(8)
        elif how == 1:
            del data[at : at + source.choice((1, 7, 512, 10_000))]
        elif how == 2:
            data[at:at] = data[at : at + source.choice((1, 512, 4096))]
        else:
            data[at : at + 8] = source.randbytes(8)
    return bytes(data)


def changed_json(source: random.Random, content: bytes) -> bytes:
    """A document with some of its nodes changed; sometimes no document any more."""
    if source.random() < 0.15:
        return changed_bytes(source, content)
    try:
        document = json.loads(content)
    except ValueError:  # what was changed before
        return changed_bytes(source, content)
    for _ in range(source.randint(1, 3)):
        document = _changed(source, document)
    return json.dumps(document).encode()


def _changed(source: random.Random, document: Any) -> Any:
    document = copy.deepcopy(document)
    node = document
    while True:
        keys: list[Any] = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return source.choice(VALUES)
        key = source.choice(keys)
        if isinstance(node[key], (dict, list)) and node[key] and source.random() < 0.85:
            node = node[key]
            continue
        how = source.random()
        if how < 0.2:
            del node[key]
        elif how < 0.3 and isinstance(node, dict):
            node[str(source.choice(VALUES))] = node.pop(key)
        elif how < 0.4:
            deep: Any = 1
            for _ in range(source.choice((3, 60))):
                deep = [deep]
            node[key] = deep
        else:
            node[key] = source.choice(VALUES)
        return document


def _file(source: random.Random, path: Path) -> bytes:
    content = path.read_bytes()
    if path.suffix == ".parquet":
        return _parquet(source, path) if source.random() < 0.8 else changed_bytes(source, content)
    if path.suffix == ".json":
        return changed_json(source, content)
    lines = content.splitlines()
    for _ in range(source.randint(1, 2)):
        place = source.randrange(len(lines))
        lines[place] = changed_json(source, lines[place])
    return b"\n".join(lines) + b"\n"


def _parquet(source: random.Random, path: Path) -> bytes:
    """A record whose metadata, or whose columns, are changed."""
    table = pq.read_table(path)
    metadata = {**(table.schema.metadata or {})}
    if b"shardproof" in metadata and source.random() < 0.6:
        metadata[b"shardproof"] = changed_json(source, metadata[b"shardproof"])
    else:
        number = source.randrange(table.num_columns)
        how = source.randrange(3)
        if how == 0:
            table = table.remove_column(number)
        elif how == 1:
            table = table.slice(0, source.randint(0, table.num_rows))
        else:
            name, column = table.column_names[number], table.column(number).to_pylist()
            source.shuffle(column)
            table = table.set_column(number, name, [column])
    sink = io.BytesIO()
    pq.write_table(table.replace_schema_metadata(metadata), sink)
    return sink.getvalue()


# ------------------------------------------------------------------------------------ long runs


def broken(
    place: Path, numbers: Iterator[int], until: Callable[[], bool]
) -> Iterator[tuple[int, Input, str]]:
    """Inputs that break a command, of ``numbers``, as long as ``until`` is false."""
    for number in numbers:
        if until():
            return
        one = draw(place, number)
        if why := run(one, place):
            yield number, one, why


def fuzz(arguments: Sequence[str] | None = None) -> int:
    """The command line of this file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    end = time.monotonic() + 60 * options.minutes
    seen: set[str] = set()
    count = 0
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        place = bases(Path(folder))

        def numbers() -> Iterator[int]:
            nonlocal count
            while True:
                count += 1
                yield options.seed * 10**9 + count

        for number, one, why in broken(place, numbers(), lambda: time.monotonic() > end):
            cause = "\n".join(why.strip().splitlines()[-3:])
            if cause not in seen:
                seen.add(cause)
                print(
                    f"{number}: {one.save(cause[-300:])}: {' '.join(one.words)!r}\n{why[-1500:]}\n",
                    flush=True,
                )
    print(f"{count} inputs, {len(seen)} causes")
    return int(bool(seen))


if __name__ == "__main__":
    sys.exit(fuzz())
