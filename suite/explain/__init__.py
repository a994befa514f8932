"""What a case, a check or a verdict means, for a person at a terminal."""
