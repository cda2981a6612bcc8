"""Small programs that show how the plugin is used; each runs with `python -m examples.NAME`."""
