"""A mixture of experts, except its matmuls: `routing` chooses experts, and `dispatch` exchanges
tokens between their own ranks and the ranks of their experts.

Imports `ops`, `mesh` and `recipe`. Dimension letters are as in `ops`.
"""
