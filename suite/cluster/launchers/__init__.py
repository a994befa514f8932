"""A run of what ranks left in a folder, wherever they ran."""
