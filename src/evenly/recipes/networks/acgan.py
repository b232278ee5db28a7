"""Generator and discriminator of a GAN whose discriminator also names the class.

Reference: Odena, Olah, Shlens, *Conditional image synthesis with auxiliary classifier GANs*, 2017. The paper has no
network for MNIST: these have its parts (class and noise in, nearest upsampling, dropout, two outputs) at that size.
"""

import torch
from torch import nn

from evenly.recipes.networks._parts import require_multiple


class AcganGenerator(nn.Module):
    """Images [n, channels, size, size] in -1 to 1, of noise [n, latent] and classes [n]; 857,065 parameters."""

    def __init__(
        self, *, classes: int = 10, channels: int = 1, size: int = 28, latent: int = 100, width: int = 128
    ) -> None:
        super().__init__()
        require_multiple("acgan-generator", "size", size, "upsampling", 4)
        require_multiple("acgan-generator", "width", width, "halves", 2)
        self.latent = latent
        self.width = width
        self.side = size // 4
        self.embedding = nn.Embedding(classes, latent)
        self.first = nn.Linear(latent, width * self.side**2)
        self.layers = nn.Sequential(
            nn.BatchNorm2d(width),
            nn.Upsample(scale_factor=2),
            *_conv_norm_leaky(width, width),
            nn.Upsample(scale_factor=2),
            *_conv_norm_leaky(width, width // 2),
            nn.Conv2d(width // 2, channels, 3, padding=1),
            nn.Tanh(),
        )

    def forward(self, noise: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns the images."""
        y = self.first(noise * self.embedding(labels))  # [n, width * side * side]
        images: torch.Tensor = self.layers(y.unflatten(1, (self.width, self.side, self.side)))
        return images


class AcganDiscriminator(nn.Module):
    """Logits [n] of being real and logits [n, classes] of images [n, channels, size, size]; 103,243 parameters."""

    def __init__(
        self, *, classes: int = 10, channels: int = 1, size: int = 28, width: int = 16, dropout: float = 0.25
    ) -> None:
        super().__init__()
        layers, inputs, side = [], channels, size
        for stage in range(4):
            outputs = width * 2**stage
            layers += [nn.Conv2d(inputs, outputs, 3, 2, padding=1), nn.LeakyReLU(0.2, inplace=True)]
            layers += [nn.Dropout2d(dropout)] if dropout else []
            layers += [nn.BatchNorm2d(outputs)] if stage else []
            inputs, side = outputs, (side + 1) // 2
        self.layers = nn.Sequential(*layers, nn.Flatten())
        self.real = nn.Linear(inputs * side**2, 1)
        self.classes = nn.Linear(inputs * side**2, classes)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the logits of real against made, and the logits of the classes."""
        y = self.layers(images)  # [n, features]
        return self.real(y).flatten(), self.classes(y)


def _conv_norm_leaky(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.LeakyReLU(0.2, inplace=True)]
