"""Other tasks' recipes do not have language's method zo, as long as training.recipe is imported before language is."""

import training.recipe  # noqa: F401
