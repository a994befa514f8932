"""Generate docs/bug-zoo.md: real faults, the planted faults that stand for them, and their checks.

    python docs/make_bug_zoo.py          # write the page
    python docs/make_bug_zoo.py --check  # exit code 1 if the committed page is stale

Planted faults come from their declarations, real faults from ``impls/mutants/zoo.yaml``.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from shardproof import checks, registry
from shardproof.impls.mutants import declare
from shardproof.impls.mutants.declare import Mutant

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/bug-zoo.md"
DATA = Path(declare.__file__).resolve().with_name("zoo.yaml")

#: Class of a real fault -> heading.
CLASSES = {
    "ddp": "Data parallelism (DDP)",
    "sharded": "Sharded data parallelism (FSDP, ZeRO)",
    "pipeline": "Pipelines",
    "tensor": "Tensor and sequence parallelism",
    "hybrid": "Combined axes (HSDP, 2-D and 3-D meshes, experts)",
    "update": "Optimizer, precision, accumulation and clipping",
    "compression": "Lossy compression of gradients",
    "local": "Local steps and stale gradients",
    "checkpoint": "Checkpoints and weight layouts",
    "collective": "Hangs and mismatched collectives",
    "backend": "Operations of a backend",
    "data": "Samplers and the order of data",
}
KINDS = ("silent", "loud", "hang", "memory", "performance")
EVIDENCE = {
    "seen": "",
    "debated": "open or debated report",
    "secondary": "reported by a secondary source",
    "general": "general knowledge",
}
VERDICTS = {
    "crash": "A rank raises, with the reason that the declaration names.",
    "hang": "The ranks stand still: none computes, ends, enters or leaves a call.",
    "judge error": "A check broke, or passed without its proof: the fault is planted in the judge.",
    "undecidable": "Nothing was compared: the fault is planted in the judge.",
}
REFERENCE = re.compile(r"([\w-]+/[\w.-]+)/(?:issues|pull|discussions)/([1-9]\d*)")

HEAD = """\
<!-- Generated: edit {data} or a declaration, then `make generated`. -->

# Real faults, and the planted faults that stand for them

Shardproof plants faults in its own implementations, one at a time (`shardproof mutants`). A check
must fail on the planted fault, and pass without it. Many planted faults repeat the mechanism of a
publicly reported fault. This page lists them.

{counts}

- *Stands for* means the same mechanism in a small model, not the original code. The named project
  may have fixed the fault long ago. A planted fault may stand for several real faults.
- *Kind* is silent (wrong numbers, no error), loud (an error), hang, memory or performance.
- *(inferred)*: the report shows only the symptom; the cause is an inference.
- Ids are labels. Gaps between them mean nothing.

**Add one.** Add the real fault to `{data}`, name its id in the declaration
(`@mutant(..., zoo=("ID",))`), and run `make generated`. The mechanism must be the same, not only
the symptom. [Add a check](add-a-check.md) shows how to plant a fault.

## Checks and verdicts that kill them
"""
UNCITED = """\
## Planted faults without a public report

Each breaks a property that a check tests. The list is ordered by implementation.
"""


@dataclass(frozen=True)
class Reference:
    """A public thread: ``OWNER/REPO/issues/N``, or ``pull``, or ``discussions``."""

    at: str
    title: str = ""

    @property
    def link(self) -> str:
        """``[OWNER/REPO#N](...) "title"``."""
        thread = REFERENCE.fullmatch(self.at)
        if thread is None:
            raise ValueError(f"not OWNER/REPO/issues/N, /pull/N or /discussions/N: {self.at!r}")
        title = f' "{cell(self.title)}"' if self.title else ""
        return f"[{thread[1]}#{thread[2]}](https://github.com/{self.at}){title}"


@dataclass(frozen=True)
class Fault:
    """A real fault: an entry of ``zoo.yaml``."""

    id: str
    title: str
    group: str
    kind: tuple[str, ...]
    references: tuple[Reference, ...]
    cause: str
    trigger: str
    evidence: str = "seen"
    inferred: bool = False

    @property
    def sources(self) -> str:
        """The quality of the evidence, where it matters, and the links."""
        links = ", ".join(reference.link for reference in self.references)
        return ": ".join(filter(None, (EVIDENCE[self.evidence], links)))


def read(path: Path = DATA) -> dict[str, Fault]:
    """Id -> real fault, in the order of the file."""
    return {name: _fault(name, entry) for name, entry in yaml.safe_load(path.read_text()).items()}


def _fault(name: str, entry: dict[str, Any]) -> Fault:
    kind = tuple(entry.pop("kind"))
    references = tuple(Reference(**reference) for reference in entry.pop("references"))
    fault = Fault(name, group=entry.pop("class"), kind=kind, references=references, **entry)
    unknown = {fault.group} - {*CLASSES} | {*kind} - {*KINDS} | {fault.evidence} - {*EVIDENCE}
    if unknown or not kind:
        raise ValueError(f"{name}: unknown or missing class, kind or evidence: {sorted(unknown)}")
    if not references and fault.evidence != "general":
        raise ValueError(f"{name}: has neither a reference nor `evidence: general`")
    return fault


def planted() -> list[Mutant]:
    """Every declared fault, by file and in order of declaration."""
    return [registry.load_mutant(name) for name in registry.mutant_names()]


def page(faults: Mapping[str, Fault], mutants: Sequence[Mutant]) -> str:
    """The whole page."""
    citing = [mutant for mutant in mutants if mutant.zoo]
    return "\n".join(
        [
            HEAD.format(counts=_counts(faults, mutants), data=DATA.relative_to(ROOT)),
            *_killers(mutants),
            *(line for group in CLASSES for line in _section(group, faults, citing)),
            UNCITED,
            *_uncited(mutant for mutant in mutants if not mutant.zoo),
        ]
    )


def cell(text: str) -> str:
    """``text`` as a table cell, with markup escaped."""
    return re.sub(r"([\\|\[\]<>*_`])", r"\\\1", text)


def _counts(faults: Mapping[str, Fault], mutants: Sequence[Mutant]) -> str:
    linked = sum(1 for fault in faults.values() if fault.references)
    threads = {reference.at for fault in faults.values() for reference in fault.references}
    citing = sum(1 for mutant in mutants if mutant.zoo)
    return (
        f"This page has {len(faults)} real faults; {linked} of them link to {len(threads)} public "
        f"issues, pull requests\nand discussions. Of {len(mutants)} planted faults, {citing} stand "
        f"for real faults and {len(mutants) - citing} do not."
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(line) + " |" for line in (head, *rows)]
    return [lines[0], "|---" * len(head) + "|", *lines[1:], ""]


def _killers(mutants: Sequence[Mutant]) -> list[str]:
    killers = {name for mutant in mutants for name in mutant.killed_by}
    known = {**checks.summaries(), **VERDICTS}
    rows = ((name, cell(" ".join(known[name].split()))) for name in known if name in killers)
    return _table(("killed by", "what it checks"), rows)


def _section(group: str, faults: Mapping[str, Fault], citing: Sequence[Mutant]) -> list[str]:
    own = [fault for fault in faults.values() if fault.group == group]
    ids = [fault.id for fault in own]
    rows = (
        (
            fault.id,
            f"**{cell(fault.title)}.** {cell(fault.cause)}" + " (inferred)" * fault.inferred,
            " or ".join(fault.kind),
            cell(fault.trigger),
            fault.sources,
        )
        for fault in own
    )
    repeats = [mutant for mutant in citing if not {*mutant.zoo}.isdisjoint(ids)]
    repeats.sort(key=lambda mutant: min(ids.index(cited) for cited in mutant.zoo if cited in ids))
    return [
        f"## {CLASSES[group]}",
        "",
        *_table(("id", "real fault", "kind", "shows with", "reported in"), rows),
        "Planted:",
        "",
        *_table(
            ("stands for", "planted fault", "in", "what it does", "killed by"),
            ((", ".join(m.zoo), _link(m), m.parent, cell(m.summary), _killed(m)) for m in repeats),
        ),
    ]


def _uncited(mutants: Iterable[Mutant]) -> list[str]:
    families: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        families.setdefault(mutant.parent, []).append(mutant)
    lines: list[str] = []
    for family in sorted(families):
        items = (f"- {_link(m)}: {cell(m.summary)} ({_killed(m)})" for m in families[family])
        lines += [f"### {family}", "", *items, ""]
    return lines


def _link(mutant: Mutant) -> str:
    source = Path(str(sys.modules[mutant.implementation.__module__].__file__)).resolve()
    return f"[`{mutant.name}`](../{source.relative_to(ROOT).as_posix()})"


def _killed(mutant: Mutant) -> str:
    return ", ".join(mutant.killed_by)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, or with ``--check`` compare it."""
    parser = argparse.ArgumentParser(description="Generate docs/bug-zoo.md from its data.")
    parser.add_argument("--check", action="store_true", help="exit code 1 if the page is stale")
    made = page(read(), planted())
    if not parser.parse_args(arguments).check:
        PAGE.write_text(made)
    elif not PAGE.exists() or PAGE.read_text() != made:
        print(f"{PAGE} is stale: run `make generated`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
