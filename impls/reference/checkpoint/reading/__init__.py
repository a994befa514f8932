"""Reading checkpoints: files from untrusted writers, and layouts that differ from the reader's.

``checkpoint`` opens one, ``reshape`` plans what a rank reads of it, ``regions`` is the arithmetic
of parts.  ``safe_files`` and ``guarded_json`` touch what nobody vouches for.
"""
