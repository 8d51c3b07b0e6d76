"""The checker behind the import hook of conftest.py: annotations hold, and an int is a float."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
