"""What a repository of one's own needs to judge its strategy from now on."""
