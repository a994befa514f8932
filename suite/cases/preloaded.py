"""Imported by the fork server, so that no leader has to: checks, cost models, the suite's systems.

Never a user's module, which may start threads or fail, and none that needs more than torch.
"""

import importlib

from shardproof import registry, strategies
from shardproof.checks import CHECKS
from shardproof.costs import cost_model_class
from shardproof.files import learn_forms

# With the parts that systems import when options ask for them: no rank pays for these, either.
for module in (*CHECKS.values(), *registry.modules("reference"), *registry.modules("pytorch")):
    importlib.import_module(module)
for strategy in strategies.in_tree():
    cost_model_class(strategy)
learn_forms()
