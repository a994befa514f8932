"""Public systems, each with an adapter under 60 lines of code: ``docs/install-extras.md``."""
