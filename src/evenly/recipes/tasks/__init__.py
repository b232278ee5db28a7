"""What is trained: classification of images, text character by character, a generator against a discriminator."""

from evenly.recipes.tasks.classification import Classification
from evenly.recipes.tasks.gan import train_gan
from evenly.recipes.tasks.language import Language
from evenly.recipes.tasks.objective import Objective
from evenly.recipes.tasks.supervised import train_supervised

__all__ = ["Classification", "Language", "Objective", "train_gan", "train_supervised"]
