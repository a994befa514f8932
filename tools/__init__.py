"""Programs for people who work on the suite itself; none is part of the package."""
