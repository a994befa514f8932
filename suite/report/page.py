"""``report.html``: one self-contained page that opens offline, without any script if need be.

Style, script and drawings are inline; a policy in the page forbids any request, and any script but
the one that sorts tables and filters cases.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter

from markupsafe import Markup

from shardproof import verdicts
from shardproof.report import kills, summary
from shardproof.report.looks import head, look
from shardproof.report.section import TEMPLATES, rendered
from shardproof.report.sections import sections
from shardproof.runs.run_folder import Run


def html(run: Run) -> str:
    """The page of ``run``; reads records of failed cases and of pipelines for its drawings."""
    script = (TEMPLATES / "report.js").read_text(encoding="utf-8")
    shown = [(section, section.html()) for section in sections(run)]
    return rendered(
        TEMPLATES / "report.html",
        run=run,
        style=Markup((TEMPLATES / "report.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        headline=summary.headline(run),
        started=run.header.invocations[0].started.replace("T", " ").replace("+00:00", " UTC"),
        tiles=_tiles(run),
        sections=[(section, body) for section, body in shown if body],
    )


def _tiles(run: Run) -> list[tuple[str, str, str]]:
    """(look, number, what) of the figures at the top."""
    counts = verdicts.count(run.cases)
    tiles = [(look(v), f"{counts[v]:,}", v) for v in verdicts.VERDICTS if counts[v]]
    if run.left_out:
        tiles.append(("none", f"{len(run.left_out):,}", "left out"))
    judged = kills.judged(run.kills)
    if judged:
        alive = len(kills.survivors(run.kills))
        state = "fail" if alive else "pass"
        tiles.append((state, f"{len(judged) - alive:,}/{len(judged):,}", "faults killed"))
    for kind, lines in run.known(judged_only=False).items():
        heads = Counter(head(line["verdict"]) for line in lines)
        tiles += [(look(word), f"{n:,}", f"{kind.label}: {word}") for word, n in heads.items()]
    return tiles
