"""Sources: rows by their index, from arrays, files and other libraries."""
