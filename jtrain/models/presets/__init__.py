"""Models by their published names, and how published weights become their parameters."""
