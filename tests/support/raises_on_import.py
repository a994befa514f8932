"""An implementation whose module cannot be imported."""

raise ImportError("libfast.so: cannot open shared object file")
