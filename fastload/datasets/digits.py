"""Where `generate_digits` was before: it is in `fastload.datasets.synthetic`."""

from fastload.datasets.synthetic import generate_digits as generate_digits
