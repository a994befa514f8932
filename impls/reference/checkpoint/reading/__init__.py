"""Reading checkpoints: files that somebody else may have written, and layouts unlike one's own.

``checkpoint`` opens one, ``reshape`` plans what a rank reads of it, ``regions`` is the arithmetic
of parts.  ``safe_files`` and ``guarded_json`` touch what nobody vouches for.
"""
