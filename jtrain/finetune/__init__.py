"""Fine-tuning: frozen weights with a small trained part."""
