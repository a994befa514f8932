"""Ctrl-C while a command still loads its modules, or reads what it is to do."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: Runs the command; Ctrl-C comes when a module of that name is looked for.
PROGRAM = """
import os, runpy, signal, sys

name = sys.argv.pop(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background ignore it

class Interrupts:
    def find_spec(self, fullname, path=None, target=None):
        if fullname == name:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
sys.argv[0] = "shardproof"
runpy.run_module("shardproof", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    "name",
    [
        *("shardproof.commands.main", "typer", "shardproof.wings", "shardproof.commands.run"),
        *("shardproof.scenarios.selection", "shardproof.scenarios.vocabulary"),
    ],
)
def test_no_traceback_and_130(name: str) -> None:
    command = [sys.executable, "-c", PROGRAM, name, "list", "cases"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, ""), done.stderr
