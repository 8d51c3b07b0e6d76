"""A mixture of experts around its products: the choice of experts (`routing`), and the exchange of
tokens between their ranks and those of their experts (`dispatch`).

Imports `ops`, `mesh` and `recipe`. Dimension letters as in `ops`.
"""
