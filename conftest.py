"""``pytest scenarios/`` runs scenario files; ``pytest tests`` does not notice."""

pytest_plugins = ["shardproof.commands.pytest_plugin"]
