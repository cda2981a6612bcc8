"""What `hbp check` works out from a plan, a layout and the facts of a start: without megatron."""
