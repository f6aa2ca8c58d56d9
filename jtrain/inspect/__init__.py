"""Looking at a step or at a run: plans, debugging, reports."""
