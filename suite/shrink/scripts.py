"""A script of an upstream system alone that shows the defect of a shrunk case.

Folders of systems have plain code of each in ``scripts.yaml``; ``skeletons.yaml`` beside this file
has what scripts of a kind share: the model, one process to compare with, and the ranks.  A script
is only kept if it was run and shows the defect: an error of the same kind of state, or the same
exception.  Where the case has options, the same script without them must not show it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from shardproof.case import Case
from shardproof.cases import kinds
from shardproof.commands import options
from shardproof.contract import Options
from shardproof.shrink.cause import Cause, words
from shardproof.shrink.search import Shrunk

#: Lines of a script, which a maintainer reads in an issue.
MOST_LINES = 40
#: Wall-clock seconds of a script, after which it hangs.
DEADLINE = 120.0
#: Errors of a sum in another order are below it, those of a defect above, in every dtype.
ERROR = 1e-6
#: Kinds of state whose errors a script prints.
_NUMBERS = {"gradients": "a gradient", "buffers": "a buffer"}
#: Words of an error that must come again: later ones may tell of the machine.
_COMPARED = 8
_SHOWN = re.compile(r"largest relative error of (a \w+): ([-+.e\w]+)$")
_RAISED = re.compile(r"^(?:[\w.]+\.)?(\w+(?:Error|Exception))(?:: ?(.*))?$", re.M)
#: Variables that a script does not get.
_NOT_GIVEN = ("PYTHONPATH", "PYTHONUNBUFFERED")
_HERE = Path(__file__).parent


class NoScript(Exception):
    """Why there is no script."""


@dataclass(frozen=True)
class Said:
    """The output of a script, and its exit code (``None``: it was ended at its deadline)."""

    out: str
    err: str
    code: int | None

    @property
    def ended(self) -> bool:
        """Whether it was not ended at its deadline."""
        return self.code is not None


def write(shrunk: Shrunk, file: Path) -> tuple[Path | None, str]:
    """Write the script of ``shrunk`` to ``file`` if it shows the defect; else why there is none."""
    import jinja2

    try:
        text = made(shrunk)
    except NoScript as why:
        return None, str(why)
    except (jinja2.TemplateError, KeyError) as error:
        return None, f"no plain code for a setting of the case: {error}"
    options.write(file, text)
    return file, ""


def made(shrunk: Shrunk) -> str:
    """The script.

    :raises NoScript: there is no plain code for the case, or what there is does not show it.
    """
    case, cause = shrunk.best, shrunk.cause
    system = _system(case.implementation)
    said = _run(render(case, shrunk, system, case.options))
    printed = shows(said, cause)
    if not printed:
        told = (said.out + said.err).strip().splitlines() or ["nothing"]
        raise NoScript(f"plain code does not show it: it prints {told[-1][:160]!r}")
    own = {k: v for k, v in case.options.items() if k != "precision"}
    if own and shows(_run(render(case, shrunk, system, {})), cause):
        raise NoScript("plain code shows it without the options as well, which the case does not")
    # On one rank nothing is split: what shows there is a fault of the script.
    alone = replace(case, mesh=dict.fromkeys(case.mesh, 1))
    if case.world > 1 and shows(_run(render(alone, shrunk, system, case.options)), cause):
        raise NoScript("plain code shows it on one rank as well, which the case does not")
    text = render(case, shrunk, system, case.options, printed)
    if (lines := len(text.splitlines())) > MOST_LINES:
        raise NoScript(f"plain code takes {lines} lines, more than {MOST_LINES}")
    return text


def shows(said: Said, cause: Cause) -> str:
    """The line by which a script shows ``cause``; empty: it does not."""
    if cause.end == "hang":
        return "" if said.ended or _RAISED.search(said.err) else "nothing: it hangs"
    if cause.end == "crash":
        return _raised(said, cause)
    kind = _NUMBERS.get(cause.state, "")
    for line in said.out.splitlines() if said.code == 0 else ():
        found = _SHOWN.search(line)
        if found and found[1] == kind and not _number(found[2]) <= ERROR:
            return line.strip()
    return ""


def _number(text: str) -> float:
    """The number that ``text`` is; 0 where lines of two ranks ran into each other."""
    try:
        return float(text)
    except ValueError:
        return 0.0


def _raised(said: Said, cause: Cause) -> str:
    """The last exception, if it is that of ``cause``: of its type, with its words."""
    wanted = cause.says.split()[:_COMPARED]
    for found in reversed([*_RAISED.finditer(said.err)]):
        # Some messages begin in the line below.
        message = found[2] or next(iter(said.err[found.end() :].strip("\n").splitlines()), "")
        told = words(message).split()
        alike = all(word in told for word in wanted) and bool(told) == bool(wanted)
        if found[1] == cause.state and (alike or not (wanted or found[2])):
            return f"{found[1]}: {message.strip() if wanted else ''}".strip(": ")[:160]
    return ""


def render(
    case: Case,
    shrunk: Shrunk,
    system: Mapping[str, Any],
    given: Options,
    printed: str = "...",
) -> str:
    """The text of the script with the options ``given``.

    :raises NoScript: the skeleton has no form for a trait, an option or the kind of failure.
    """
    import jinja2

    from shardproof.scenarios import source

    skeletons: Any = source.read(_HERE / "skeletons.yaml").plain()
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    facts: dict[str, Any] = {**_facts(case), "options": given, "printed": _quoted(printed)}
    facts["expected"] = _expected(case, shrunk.cause)
    facts["title"] = _title(case, shrunk)

    def filled(template: str, **more: Any) -> str:
        return environment.from_string(template).render({**facts, **more}).strip("\n")

    facts |= {k: v for k, v in system.items() if isinstance(v, list | dict) and k != "options"}
    for name, text in system.get("facts", {}).items():
        value = filled(text)
        facts[name] = int(value) if value.isdecimal() else value
    code, keywords, loss = _settings(system, given, filled)
    traits = [_trait(skeletons["traits"], name) for name in case.workload.traits]
    facts["traits"] = "\n".join(filled(text) for text in traits if text)
    facts["layer"], facts["sample"] = (filled(t) for t in _layer(skeletons["layers"], case))
    facts |= {"keywords": keywords, "loss": loss, "full": system.get("full", "")}
    facts["own_optimizer"] = filled(system.get("own_optimizer", ""))
    facts["imports"] = filled(system["imports"])
    facts["wrap"] = "\n".join(filter(None, (filled(system["wrap"]), code)))
    for part in ("head", "join", "spawn"):
        facts[part] = filled(skeletons[part])
    lines = filled(skeletons["skeletons"][system["skeleton"]]).splitlines()
    text = "\n".join(line.rstrip() for line in lines) + "\n"
    # What a part leaves empty leaves no line inside of a function.
    return re.sub(r"\n\n+(?=[ ])", "\n", text)


def _facts(case: Case) -> dict[str, Any]:
    spec, optimizer = case.workload, case.optimizer
    if not kinds.of(spec).trains:
        raise NoScript(f"no plain code for the workload {spec.name}")
    if case.precision or case.lane == "working_precision":
        raise NoScript("no plain code for mixed precision")
    if case.checkpoint or case.membership or case.deaths or case.fault or case.expect:
        raise NoScript("no plain code for plans, which the case needs")
    micro_batches = spec.micro_batches * spec.windows
    clip = optimizer.clip_norm
    arguments = ", ".join(f"{k}={v}" for k, v in optimizer.arguments.items() if v)
    nets = ("net", "split")
    return {
        "world": case.world,
        "steps": case.steps,
        "micro_batches": micro_batches,
        "batch": case.world * micro_batches * 2,
        "width": 8,
        "layers": int(spec.params.get("layers", 3)),
        "dtype": case.dtype,
        "sizes": tuple(case.mesh.values()),
        "names": tuple(case.mesh),
        "optimizer": optimizer.kind.__name__,
        "arguments": arguments,
        "clip": "\n".join(
            f"nn.utils.clip_grad_norm_({net}.parameters(), {clip})" for net in nets if clip
        ),
    }


def _settings(system: Mapping[str, Any], given: Options, filled: Any) -> tuple[str, str, str]:
    """Code, keywords and factors of the loss that the options ``given`` ask for."""
    code, keywords, loss = [], "", ""
    for name, value in given.items():
        if name not in system["options"]:
            raise NoScript(f"no plain code for the option {name}")
        how = system["options"][name]
        code += [filled(how["code"], value=value)] if "code" in how else []
        keywords += f", {how['keyword']}={value!r}" if "keyword" in how else ""
        loss += filled(how.get("loss", ""), value=value)
    return "\n".join(code), keywords, loss


def _trait(known: Mapping[str, str], name: str) -> str:
    if name not in known:
        raise NoScript(f"no plain code for the trait {name}")
    return known[name]


def _layer(known: Mapping[str, Any], case: Case) -> tuple[str, str]:
    """The layer of a model, and the shape of a sample."""
    names = (*case.workload.traits, case.workload.name, "usual")
    layer, sample = next(known[name] for name in names if name in known)
    return layer, sample


def _system(name: str) -> Mapping[str, Any]:
    """The plain code of the system ``name``.

    :raises NoScript: there is none.
    """
    from shardproof.scenarios import source

    family, _, rest = name.partition("/")
    spec = importlib.util.find_spec("shardproof.impls")  # finds, does not import
    for root in (spec and spec.submodule_search_locations) or ():
        file = Path(root) / family / "scripts.yaml"
        if rest and file.is_file() and name in (known := source.read(file).plain()):
            found: Mapping[str, Any] = known[name]
            return found
    raise NoScript(f"no plain code for {name}")


def is_upstream(name: str) -> bool:
    """Whether there may be a script: the system is one of a package, behind an adapter."""
    return name.partition("/")[0] not in ("reference", "mutants") and ":" not in name


def _expected(case: Case, cause: Cause) -> str:
    errors = f"errors below {1e-12 if case.dtype == 'float64' else ERROR:g}"
    return (
        f"{errors}, and no exception" if cause.end in ("crash", "hang") else f"{errors} everywhere"
    )


def _quoted(text: str) -> str:
    """``text`` for the docstring of a script."""
    return text.replace("\\", "/").replace('"""', "'''")


def _title(case: Case, shrunk: Shrunk) -> str:
    reason = (shrunk.result.reason.splitlines() or [""])[0]
    package = f"torch {metadata.version('torch')}"
    text = f"{case.system} ({package}): {reason}"
    text = re.sub(r"(?:/[\w.+-]+)+/(?=[\w.+-]+)", "", _quoted(text))  # paths of this machine
    return text[:160]


def _run(text: str) -> Said:
    """Run a script in a process group of its own, which is ended with it."""
    # Unbuffered, a line and its end are two writes, between which another rank may print.
    environment = {k: v for k, v in os.environ.items() if k not in _NOT_GIVEN}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "script.py")
        file.write_text(text)
        with subprocess.Popen(
            [sys.executable, str(file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=environment | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        ) as process:
            code: int | None = None
            try:
                out, err = process.communicate(timeout=DEADLINE)
                code = process.returncode
            except subprocess.TimeoutExpired:
                _end(process.pid)
                out, err = process.communicate()
            finally:
                _end(process.pid)
    return Said(out, err, code)


def _end(group: int) -> None:
    """Kill what is left of the script's process group."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return
