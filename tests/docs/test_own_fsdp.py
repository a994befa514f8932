"""The system of docs/own-fsdp.md passes, and fails as it says without each of its two lines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from commands import script

pytestmark = pytest.mark.launches

PAGE = (Path(__file__).parents[2] / "docs/own-fsdp.md").read_text()
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))
OUTPUT = re.search(r"`python judge.py` prints\n\n((?: {4}.*\n)+)", PAGE)
DECLARED = ' initial_state="everywhere",'
USES_STATE = """\
    def setup(self, build, state, optimizer, mesh, options):
        build(mesh.device).load_state_dict(state, strict=False)
        super().setup(build, state, optimizer, mesh, options)

    def wrap("""
REMEDY = "Capabilities(initial_state='everywhere')"
#: What is changed into what, and what is then said of it; the page has the first words.
FAULTS = {
    "kept its own values": (
        ((DECLARED, ""),),
        ("from the values that were built itself, not from those given", REMEDY),
    ),
    "used no state": (
        ((DECLARED, ""), ("    def wrap(", USES_STATE)),
        ("the argument state is None on all ranks but rank 0", REMEDY),
    ),
    "divides": (
        (("float(self.mesh.world)", "1.0"),),
        ("every gradient is 2 times too small (2 = ranks)",),
    ),
}


def judged(folder: Path, text: str) -> str:
    (folder / "my_fsdp.py").write_text(text)
    (folder / "judge.py").write_text(FILES["judge.py"])
    done = script(folder / "judge.py", cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_prints_what_the_page_shows(tmp_path: Path) -> None:
    assert OUTPUT is not None
    shown = [line.strip() for line in OUTPUT[1].splitlines()]
    assert [line.strip() for line in judged(tmp_path, FILES["my_fsdp.py"]).splitlines()] == shown


@pytest.mark.parametrize("name", FAULTS)
def test_without_a_line_it_fails_as_the_page_says(tmp_path: Path, name: str) -> None:
    changes, says = FAULTS[name]
    text = FILES["my_fsdp.py"]
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    assert says[0] in PAGE
    told = judged(tmp_path, text)
    assert "pass" not in told
    assert all(words in told for words in says), told
