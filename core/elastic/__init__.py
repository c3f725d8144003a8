"""Workers that come and go."""

from .loop import ElasticLoop as ElasticLoop
from .loop import elastic_co2 as elastic_co2
