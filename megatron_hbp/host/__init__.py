"""The only folder that imports megatron."""
