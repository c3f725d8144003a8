"""Lengths of documents in tokens: laws, drawn by a seed, and a real text's lengths.

The parameters are ours: `github_like` and `prolong_like` only share a shape with the data of these names.
"""

import re
from collections.abc import Callable

import numpy as np

Lengths = np.ndarray  # int64 [documents], tokens
CHARACTERS_A_TOKEN = 4.3  # of English prose under a vocabulary of 30,000; it only scales lengths
HEADING = r"\n\s*(?:CHAPTER|Chapter|BOOK|ACT|LETTER)\b[^\n]*\n"
PARAGRAPH = r"\n\s*\n"


def log_normal(n: int, rng: np.random.Generator, median: float = 500, sigma: float = 1.1) -> np.ndarray:
    """Web text: of mean 900, one document in 300 above 10,000."""
    return rng.lognormal(np.log(median), sigma, n)


def github_like(n: int, rng: np.random.Generator) -> np.ndarray:
    """Source files and joined repositories: a log-normal body, and 6 % from a Pareto tail of index 1.2 above 8,000."""
    tail = 8000 * (1 + rng.pareto(1.2, n))
    return np.where(rng.random(n) < 0.06, tail, log_normal(n, rng, 700, 1.3))


def prolong_like(n: int, rng: np.random.Generator) -> np.ndarray:
    """The idea of ProLong (arXiv 2410.02660), long documents among short ones: some 60 % of the tokens are in documents
    of 65,536, the rest is web text."""
    return np.where(rng.random(n) < 0.02, 65536, log_normal(n, rng))


def uniform(n: int, rng: np.random.Generator) -> np.ndarray:
    """900 to 1,100: nothing to gain."""
    return rng.uniform(900, 1100, n)


LAWS: dict[str, Callable[[int, np.random.Generator], np.ndarray]] = {
    law.__name__: law for law in (log_normal, github_like, prolong_like, uniform)
}


def draw(law: str, n: int, seed: int) -> Lengths:
    """n lengths of a law, 1 or more."""
    return np.maximum(LAWS[law](n, np.random.default_rng(seed)), 1).astype(np.int64)


def of_text(text: str, boundary: str) -> Lengths:
    """Of the parts of a text, from one match of the pattern to the next, in its order; empty ones are left out."""
    characters = np.array([len(part.strip()) for part in re.split(boundary, text)])
    return np.ceil(characters[characters > 0] / CHARACTERS_A_TOKEN).astype(np.int64)


def cut(lengths: Lengths, longest: int) -> Lengths:
    """The lengths of the pieces, where what is longer than `longest` is cut into pieces of it and a rest."""
    whole, rest = np.divmod(lengths, longest)
    pieces = np.full(int(whole.sum() + (rest > 0).sum()), longest)
    last = np.cumsum(whole + (rest > 0)) - 1
    pieces[last[rest > 0]] = rest[rest > 0]
    return pieces
