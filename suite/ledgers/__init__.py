"""What a rank did, recorded by the suite and never by the implementation."""
