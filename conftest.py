"""``pytest scenarios/`` runs scenario files; ``pytest tests`` does not notice."""

pytest_plugins = ["suite.pytest_plugin"]
