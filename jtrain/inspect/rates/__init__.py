"""Learning-rate range tests: a short run in which the rate grows, and the rate that it suggests."""
