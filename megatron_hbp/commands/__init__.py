"""One module per command of `hbp`: add_command() registers it, run() does it."""
