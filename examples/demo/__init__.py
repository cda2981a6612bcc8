"""make demo: train a DeepSeek-V2-shaped model on CPU, with HBP and with single-level packing."""
