"""Programs that are killed, and what they are given to work on."""
