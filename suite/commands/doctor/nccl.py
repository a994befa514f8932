"""What NCCL would find here: GPUs, the driver, its own version, and variables that nobody reads.

Of the environment only names are looked at that begin with ``NCCL_`` or ``TORCH_NCCL_``, and only
names are told, never a value.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from pathlib import Path

import yaml

from shardproof.backends.gloo_cuda import GlooCuda
from shardproof.wings import Finding

#: Where a name is nearer than this to a known one, it is that one misspelt.
_NEAR = 0.8


def examine() -> Iterator[Finding]:
    """GPUs and versions, then the variables."""
    yield _gpus()
    yield _versions()
    yield _variables()


def known_variables() -> set[str]:
    """Names of the variables that NCCL or torch reads."""
    listed = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    return {f"{prefix}{name}" for prefix, names in listed.items() for name in names.split()}


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
    known = known_variables()
    given = sorted(name for name in os.environ if name.startswith(("NCCL_", "TORCH_NCCL_")))
    unknown = [name for name in given if name not in known]
    if not unknown:
        return Finding("NCCL variables", "good", ", ".join(given) or "none set")
    meant = []
    for name in unknown:
        near = difflib.get_close_matches(name, known, 1, _NEAR)
        other = "unset, unless a plugin of NCCL reads it"
        meant.append(f"{name}: {f'did you mean {near[0]}?' if near else other}")
    found = f"neither NCCL nor torch knows {', '.join(unknown)}"
    return Finding("NCCL variables", "note", found, "; ".join(meant))
