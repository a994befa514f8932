"""Imported by the fork server, so that no leader has to: checks, cost models, the suite's systems.

Never a user's module, which may start threads or fail, and none that needs more than torch.
"""

import importlib

from shardproof import registry
from shardproof.checks import CHECKS
from shardproof.costs import cost_model_class
from shardproof.files import read_annotations
from shardproof.strategies import STRATEGIES

for check in CHECKS.values():
    importlib.import_module(check)
for strategy in STRATEGIES:
    cost_model_class(strategy)
for system in registry.names():
    if system.startswith(("reference/", "pytorch/")) and not registry.is_foreign(system):
        registry.load(system)
read_annotations()
