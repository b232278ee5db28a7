"""What optimizes: optimizers, clipping and scaling that are exact on cut parameters."""
