"""The checker behind the import hooks of conftest.py: annotations hold, and an int is a float."""

from beartype import BeartypeConf, beartype

CONF = BeartypeConf(is_pep484_tower=True, claw_is_pep526=False)
check = beartype(conf=CONF)
