"""One file for each family of published models: its config and its table of tensors."""
