"""What the campaign's workers would each import and parse again, done once in the process that they are forked from."""

import sklearn.datasets  # noqa: F401
import torch._dynamo  # noqa: F401
import torch.utils.tensorboard  # noqa: F401

import training.zero  # noqa: F401
import vision.train  # noqa: F401
from training.recipe import parse
from vision.recipes import RECIPES

parse(RECIPES, ["digits_small"])  # reads the options' docstrings
