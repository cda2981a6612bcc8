"""What the plugin costs, measured: each `make bench-*` target runs one module of this folder."""
