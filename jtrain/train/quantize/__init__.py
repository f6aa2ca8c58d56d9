"""Matrix products of a loss in 8 bits: fp8 for training, int8 for evaluation."""
