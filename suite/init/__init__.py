"""The files with which your repository tests its strategy from now on."""
