"""A mixture of experts around its products: the exchange of tokens between their ranks and those of
their experts (`routing`), and products whose sizes are known only at run time (`grouped_matmul`).

Imports `ops`, `mesh` and `recipe`. Dimension letters as in `ops`.
"""
