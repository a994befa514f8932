"""The run folder: evidence on disk, its integrity, and bundles."""
