"""The actions of a rank, recorded by the suite and never by the implementation."""
