"""Published weights: families of models, folders as Hugging Face lays them out, and GGUF files."""
