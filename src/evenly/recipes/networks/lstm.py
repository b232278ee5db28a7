"""A recurrent network that reads an image row by row.

References: Hochreiter, Schmidhuber, *Long short-term memory*, 1997; images as sequences: Le, Jaitly, Hinton, *A simple
way to initialize recurrent networks of rectified linear units*, 2015.
"""

import torch
from torch import nn


class RowLSTM(nn.Module):
    """Logits [n, classes] of images [n, channels, h, size]; 214,282 parameters for images of 28 x 28.

    Each row, with all its channels, is one time step; the last output gives the logits.
    """

    def __init__(
        self,
        *,
        classes: int = 10,
        channels: int = 1,
        size: int = 28,
        hidden: int = 128,
        layers: int = 2,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.lstm = nn.LSTM(channels * size, hidden, layers, batch_first=True, dropout=dropout)
        self.head = nn.Linear(hidden, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns the logits [n, classes]."""
        rows = images.transpose(1, 2).flatten(2)  # [n, h, channels * size]
        outputs, _ = self.lstm(rows)  # [n, h, hidden]
        logits: torch.Tensor = self.head(outputs[:, -1])
        return logits
