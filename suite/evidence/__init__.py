"""What ranks left behind, put together, and the account that a verdict is made of."""
