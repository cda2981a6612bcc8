"""What `hbp rehearse` works out: a recipe scaled down to a few CPU processes, and its verdict."""
