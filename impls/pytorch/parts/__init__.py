"""Parts that the adapters share."""
