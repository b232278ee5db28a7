"""The published experiments: models, data readers, training configurations."""
