"""A mixture of experts around its products: which tokens go to which experts and back (`routing`),
and products of rows whose number is known only at run time (`grouped`).

Imports `ops`, `mesh` and `recipe`. Dimension letters as in `ops`.
"""
