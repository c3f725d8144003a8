"""The tasks of bench.search by name. Their data and models are made when they are first asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable

from bench.search import clouds, pictures, texts
from bench.search.task import Task

TASKS: dict[str, Callable[[], Task]] = {
    "digits": pictures.digits,
    "cifar": pictures.cifar,
    "cifar_vit": pictures.cifar_vit,
    "segmentation": pictures.segmentation,
    "surfaces": clouds.surfaces,
    "bytes": lambda: texts.bytes_("bytes", 48, "0.07"),
    "bytes_narrow": lambda: texts.bytes_("bytes_narrow", 24, "0.02"),
    "bytes_wide": lambda: texts.bytes_("bytes_wide", 96, "0.25"),
    "gpt2": texts.gpt2,
    "gpt2_small": texts.gpt2_small,
    "transnormer": texts.transnormer,
    "roberta": texts.roberta,
}


@functools.cache
def load(name: str) -> Task:
    return TASKS[name]()
