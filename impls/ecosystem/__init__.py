"""Systems that people use, each an adapter under 60 lines of code: ``docs/install-extras.md``."""
