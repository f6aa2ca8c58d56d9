"""Pipeline parallelism: stages, their schedule and what they exchange."""
