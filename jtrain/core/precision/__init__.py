"""Mixed precision: parameters in a narrow type while a loss computes, and the loss scale."""
