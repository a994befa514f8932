"""What the machine reports while ranks are timed."""
